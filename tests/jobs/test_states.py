import pytest

from jobs.models import Job
from jobs.states import (
    ACTIVE,
    BILLED,
    END_STATE,
    ENDED,
    RETRIED,
    TRANSITIONS,
    EndReason,
    JobState,
    may_follow,
)

S = JobState
ALLOWED = {
    S.QUEUED: {S.STARTING, S.CANCELLED, S.FAILED},
    S.STARTING: {S.RUNNING, S.STOPPING, S.QUEUED, S.SUCCEEDED, S.FAILED, S.CANCELLED},
    S.RUNNING: {S.STOPPING, S.QUEUED, S.SUCCEEDED, S.FAILED, S.CANCELLED},
    S.STOPPING: {S.SUCCEEDED, S.FAILED, S.CANCELLED},
}


@pytest.mark.parametrize("current", JobState)
@pytest.mark.parametrize("following", JobState)
def test_only_what_the_table_names_may_follow(current, following):
    assert may_follow(current, following) == (following in ALLOWED.get(current, set()))


def test_the_table_is_total_and_every_state_reaches_an_end():
    assert set(TRANSITIONS) == set(JobState)
    assert {S.SUCCEEDED, S.FAILED, S.CANCELLED} == ENDED
    assert ACTIVE | ENDED | {S.QUEUED} == set(JobState)
    for state in set(JobState) - ENDED:
        assert TRANSITIONS[state] & ENDED


def test_every_reason_has_an_end_state_and_somebody_who_pays():
    assert set(END_STATE) == set(EndReason)
    assert set(END_STATE.values()) == ENDED
    assert set(EndReason) == BILLED | RETRIED
    assert not BILLED & RETRIED
    assert {EndReason.NO_CAPACITY, EndReason.NODE_LOST, EndReason.PLATFORM_ERROR} == RETRIED


def test_labels_cover_the_states_and_reasons():
    assert set(Job.States.values) == set(JobState)
    assert set(Job.Reasons.values) == set(EndReason)
