"""The table of job states, and the state and payer of each reason."""

from jobs.models import Job
from jobs.states import ACTIVE, BILLED, END_STATE, ENDED, PLATFORM_FAULTS, TRANSITIONS, EndReason, JobState, may_follow


def test_the_table_has_all_states_and_each_open_one_can_end():
    assert set(TRANSITIONS) == set(JobState)
    assert {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED} == ENDED
    assert ACTIVE | ENDED | {JobState.QUEUED} == set(JobState)
    for state in JobState:
        # An open state has successors, among them one that ends the job. An ended state has none.
        assert bool(TRANSITIONS[state]) == bool(TRANSITIONS[state] & ENDED) == (state not in ENDED)
        assert {each for each in JobState if may_follow(state, each)} == set(TRANSITIONS[state])


def test_every_reason_has_an_end_state_and_somebody_who_pays():
    assert set(END_STATE) == set(EndReason)
    assert set(END_STATE.values()) == ENDED
    assert set(EndReason) == BILLED | PLATFORM_FAULTS | {EndReason.PACKAGES_FAILED}
    assert not BILLED & PLATFORM_FAULTS
    assert {EndReason.NO_CAPACITY, EndReason.NODE_LOST, EndReason.PLATFORM_ERROR} == PLATFORM_FAULTS


def test_labels_cover_the_states_and_reasons():
    assert set(Job.States.values) == set(JobState)
    assert set(Job.Reasons.values) == set(EndReason)
