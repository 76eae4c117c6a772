"""The table of job states, and the state and payer of each reason."""

from jobs.models import Job
from jobs.states import ACTIVE, BILLED, END_STATE, ENDED, PLATFORM_FAULTS, TRANSITIONS, EndReason, JobState, may_follow


def test_each_open_state_can_end_and_an_ended_one_cannot_change():
    assert set(TRANSITIONS) == set(JobState) == set(Job.States.values)
    assert ACTIVE | ENDED | {JobState.QUEUED} == set(JobState)
    for state in JobState:
        assert bool(TRANSITIONS[state]) == bool(TRANSITIONS[state] & ENDED) == (state not in ENDED)
        assert {each for each in JobState if may_follow(state, each)} == set(TRANSITIONS[state])


def test_every_reason_has_a_label_an_end_state_and_somebody_who_pays():
    assert set(END_STATE) == set(EndReason) == set(Job.Reasons.values)
    assert set(END_STATE.values()) == ENDED
    assert set(EndReason) == BILLED | PLATFORM_FAULTS | {EndReason.PACKAGES_FAILED}
    assert not BILLED & PLATFORM_FAULTS
