import pytest
from django.utils import translation

from jobs import sentences
from jobs.states import EndReason, JobState

CODES = ["", "capacity", "too_large", "reserved", "quota", "backend_unavailable", "retry", "something new"]


@pytest.mark.parametrize("language", ["en", "zh-hans"])
@pytest.mark.parametrize("reason", EndReason)
def test_every_end_has_a_sentence_in_every_language(language, reason):
    with translation.override(language):
        assert sentences.end_sentence(reason).endswith((".", "。"))
        told = sentences.event_sentence("failed", {"reason": reason, "detail": "Why."})
        assert told.startswith(sentences.end_sentence(reason))
        assert told.endswith("Why.")


def test_an_end_says_who_pays():
    for reason in EndReason:
        free = reason in {EndReason.NO_CAPACITY, EndReason.NODE_LOST, EndReason.PLATFORM_ERROR}
        assert ("costs nothing" in sentences.end_sentence(reason)) == free
    assert sentences.end_sentence("") == ""


@pytest.mark.parametrize("language", ["en", "zh-hans"])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("data", [{}, {"free": 3, "running": 2, "most": 4, "since": "x", "reason": "node_lost"}])
def test_every_wait_has_a_sentence_in_every_language(language, code, data):
    with translation.override(language):
        for ahead in (0, 1, 5):
            told = sentences.waiting_sentence(code, data, nodes=2, spec="Nano", ahead=ahead)
            assert told.endswith((".", "。"))
            assert "%(" not in told


def test_waits_say_what_is_needed_what_is_free_and_what_would_start():
    tell = sentences.waiting_sentence
    assert tell("", {}, nodes=1, spec="Nano", ahead=0) == "It starts in a moment."
    assert tell("", {}, nodes=1, spec="Nano", ahead=1) == "1 job is before it."
    assert tell("capacity", {"free": 1}, nodes=2, spec="Nano", ahead=2) == (
        "Waiting for 2 free nodes of Nano; 1 is free now. 2 jobs are before it. A run on 1 of them would start now."
    )
    assert "would start now" not in tell("capacity", {"free": 0}, nodes=2, spec="Nano", ahead=0)


@pytest.mark.parametrize("kind", ["ordered", *JobState])
def test_every_event_has_a_sentence(kind):
    assert sentences.event_sentence(kind, {"reason": "completed"} if kind == "succeeded" else {"reason": ""})


def test_events_of_money_and_of_a_retry():
    assert "$1.23" in sentences.event_sentence("settled", {"total_minor": 123, "currency": "USD"})
    told = sentences.event_sentence("queued", {"retry": True, "reason": "node_lost", "detail": "Node 1 was lost."})
    assert "Node 1 was lost." in told
    assert "free of charge" in told
    assert "another run took the room" in sentences.event_sentence("queued", {})
