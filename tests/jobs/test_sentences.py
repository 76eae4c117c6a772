import pytest
from django.utils import timezone, translation

from jobs import sentences
from jobs.sentences import WAITING_SENTENCES
from jobs.states import EndReason, JobState
from runtime.specs import FailureCode, WaitingCode

CODES = ["", "capacity", "too_large", "reserved", "quota", "backend_unavailable", "retry", "backoff", "something new"]
LOST = {
    "message": "English.",
    "code": "node_lost",
    "data": {},
    "node": 1,
    "rank": None,
    "exit_code": None,
    "signal": "",
}


@pytest.mark.parametrize("language", ["en", "zh-hans"])
@pytest.mark.parametrize("reason", EndReason)
def test_every_end_has_a_sentence_in_every_language(language, reason):
    with translation.override(language):
        assert sentences.end_sentence(reason).endswith((".", "。"))
        told = sentences.event_sentence("failed", {"reason": reason, "failure": LOST})
        assert told.startswith(sentences.end_sentence(reason))
        assert told.endswith(sentences.failure_sentence(LOST))


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
    told = sentences.event_sentence("queued", {"retry": True, "reason": "node_lost", "failure": LOST})
    assert "Node 1 was lost" in told
    assert "costs nothing" in told
    told = sentences.event_sentence("queued", {"retry": True, "reason": "hung", "failure": None})
    assert told == "The last attempt hung. It is tried again, as you ordered."
    assert "another run took the room" in sentences.event_sentence("queued", {})


@pytest.mark.parametrize("language", ["en", "zh-hans"])
@pytest.mark.parametrize("code", [*FailureCode, *sentences.Cause])
@pytest.mark.parametrize(
    "data",
    [
        {},
        {"limit_mib": 512, "limit": 100, "seconds": 61.5, "rank": 1, "where": "a.py, line 3"},
        {"field": "script", "free_mib": 3},
    ],
    ids=str,
)
def test_every_failure_has_a_sentence_that_no_row_keeps(language, code, data):
    with translation.override(language):
        told = sentences.failure_sentence(LOST | {"code": code, "data": data})
        assert told.endswith((".", "。"))
        assert "English" not in told
        assert "%(" not in told


def test_failures_name_rank_code_signal_and_limits():
    tell = sentences.failure_sentence
    rank = LOST | {"code": "rank_exited", "rank": 3}
    assert tell(rank | {"exit_code": 7}) == "Rank 3 on node 1 exited with code 7."
    assert tell(rank | {"signal": "SIGSEGV", "exit_code": None}) == "Rank 3 on node 1 was ended by SIGSEGV."
    assert "512 MiB" in tell(LOST | {"code": "out_of_memory", "data": {"limit_mib": 512}})
    assert tell(LOST | {"code": "hung", "data": {"seconds": 61.5, "rank": 1, "where": "train.py, line 8, step"}}) == (
        "No rank showed any sign of progress for 61 seconds. "
        "The others wait for rank 1, which is in train.py, line 8, step."
    )
    assert tell(LOST | {"code": "hung", "data": {"seconds": 9}}).endswith("for 9 seconds.")
    assert "100" in tell(LOST | {"code": "too_many_processes", "data": {"limit": 100}})
    assert "as many as it may" in tell(LOST | {"code": "too_many_processes", "data": {}})
    assert "not by this run" in tell(LOST | {"code": "disk_full", "data": {"free_mib": 1}})
    assert "Node 1 stopped answering" in tell(LOST | {"code": "node_silent"})


def test_a_row_of_before_failures_had_codes_still_reads():
    old = {"message": "Rank 0 ...", "node": 0, "rank": 0, "exit_code": 3, "signal": "", "last_lines": []}
    assert sentences.failure_sentence(old) == "Rank 0 on node 0 exited with code 3."


def test_a_retry_that_waits_says_until_when():
    at = timezone.now().replace(hour=12, minute=30, second=5).isoformat()
    told = sentences.waiting_sentence("backoff", {"reason": "code_failed", "at": at}, nodes=1, spec="Nano", ahead=0)
    assert told.startswith("The last attempt ended with an error of the code. It is tried again, as you ordered.")
    assert "until 12:30:05" in told


STARTING = {
    "": ({}, "A place was found"),
    "starting": ({"step": "image", "nodes": 2}, "The image is being pulled"),
    "gpus": ({"wanted": 2, "gpu_type": "H200", "nodes": 4, "free": 3}, "2 × H200 on each of 4 nodes; 3 are free now"),
    "cpus": ({"wanted": 2, "nodes": 1, "free": None}, "has … free"),
    "memory": ({"wanted": 512, "nodes": 1, "free": 100}, "512 MiB"),
    "image_name": ({"image": "r.example/x:1"}, "no image r.example/x:1"),
    "image_credentials": ({"image": "r.example/x:1"}, "user name and password"),
    "image_network": ({"image": "r.example/x:1"}, "can't be reached"),
    "volume": ({"claim": "runs", "detail": ""}, "volume runs"),
    "quota": ({"detail": "exceeded"}, "quota is used up"),
    "taint": ({"taint": "gpu=yes"}, "taint gpu=yes"),
    "too_large": ({}, "no machine that can hold a node of this run"),
    "admission": ({"queue": "train", "detail": ""}, "not admitted"),
    "unschedulable": ({"detail": "0/3 nodes"}, "0/3 nodes"),
}


def test_all_that_a_cluster_may_wait_for_is_worded():
    assert set(STARTING) == {"", *WaitingCode}
    assert set(WAITING_SENTENCES) | {"", "starting", "gpus", "cpus", "memory"} == set(STARTING)


@pytest.mark.parametrize("code", STARTING)
@pytest.mark.parametrize("language", ["en", "zh-hans"])
def test_what_a_run_that_starts_waits_for_is_told_with_its_remedy(code, language):
    data, words = STARTING[code]
    with translation.override(language):
        told = sentences.starting_sentence(code, data)
        bare = sentences.starting_sentence(code, {})
    assert "%(" not in told + bare
    if language == "en":
        assert words in told
        assert told.endswith("Nothing is charged yet.")
    else:
        assert any("一" <= letter <= "鿿" for letter in told)


OF_RANKS = {"rank_exited", "rank_killed", "platform_error"}


@pytest.mark.parametrize("code", sorted(set(FailureCode) - OF_RANKS))
def test_every_failure_of_a_cluster_has_its_words(code):
    with translation.override("en"):
        told = sentences.failure_sentence({"code": code, "data": {}, "node": 1, "rank": None})
    assert told != "The platform failed while it ran this."
    assert "%(" not in told
