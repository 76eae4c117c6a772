"""The sentences about waiting, starting, ends, failures and events: complete in each language, and naming the cause."""

import pytest
from django.utils import timezone, translation

from jobs import messages
from jobs.states import ENDED, EndReason, JobState, pays_for_hang
from runtime.specs import FailureCode, WaitingCode

# No sentence shows the stored message, which is in English.
LOST = {"message": "stored", "code": "node_lost", "data": {}, "node": 1, "rank": None, "exit_code": None, "signal": ""}
WAITS = ["", "capacity", "too_large", "reserved", "quota", "backend_unavailable", "retry", "backoff", "something new"]
WAIT_DATA = {"free": 3, "running": 2, "most": 4, "since": "x", "reason": "node_lost"}
FAILURE_DATA = {
    "limit_mib": 512, "limit": 100, "seconds": 61.5, "rank": 1, "where": "a.py, line 3", "field": "script",
    "free_mib": 3,
}  # fmt: skip


def waiting(code, data, *, nodes=1, ahead=0):
    return messages.waiting_sentence(code, data, nodes=nodes, spec="Nano", ahead=ahead)


@pytest.mark.parametrize("language", ["en", "zh-hans"])
def test_everything_has_a_complete_sentence_in_every_language(language):
    with translation.override(language):
        sentences = [waiting(code, data, nodes=2, ahead=ahead)
                     for code in WAITS for data in ({}, WAIT_DATA) for ahead in (0, 1, 5)]  # fmt: skip
        sentences += [messages.failure_sentence(LOST | {"code": code, "data": data})
                      for code in FailureCode for data in ({}, FAILURE_DATA)]  # fmt: skip
        for reason in EndReason:
            event = messages.event_sentence("failed", {"reason": reason, "failure": LOST})
            assert event.startswith(messages.end_sentence(reason))
            assert event.endswith(messages.failure_sentence(LOST))
            sentences.append(event)
        sentences += [messages.event_sentence(kind, {}) for kind in ("ordered", "installing", *(set(JobState) - ENDED))]
        starting = [messages.starting_sentence(code, data) for code, (data, _text) in STARTING.items()]
        starting += [messages.starting_sentence(code, {}) for code in STARTING]
    assert [text for text in sentences if not text.endswith((".", "。"))] == []
    assert [text for text in sentences + starting if "%(" in text or "stored" in text] == []
    is_chinese = [any("一" <= letter <= "鿿" for letter in text) for text in sentences + starting]
    assert is_chinese == [language == "zh-hans"] * len(is_chinese)


def test_the_end_sentence_says_who_pays():
    for reason in EndReason:
        is_free = reason in {EndReason.NO_CAPACITY, EndReason.NODE_LOST, EndReason.PLATFORM_ERROR}
        assert ("The run is free." in messages.end_sentence(reason, is_free=True)) == is_free
        assert "The run is free." not in messages.end_sentence(reason)
        assert "ou pay" not in messages.end_sentence(reason, is_free=True)
    assert messages.end_sentence("") == ""


def test_a_hang_that_is_charged_is_not_called_free():
    whole = LOST | {"code": "hung", "data": {"seconds": 9, "charged_whole": True}}
    text = messages.event_sentence("failed", {"reason": "hung", "failure": whole})
    assert "free" not in text
    assert "you pay for the time until the run was ended" in text
    verified = LOST | {"code": "hung", "data": {"seconds": 9}}
    assert "is free" in messages.end_sentence("hung", is_hang_charged=pays_for_hang(verified))


def test_waits_say_what_is_needed_what_is_free_and_what_would_start():
    assert waiting("", {}) == "It starts shortly."
    assert waiting("", {}, ahead=1) == "1 job is ahead of yours."
    assert waiting("capacity", {"free": 1}, nodes=2, ahead=2) == (
        "Waiting for 2 free nodes of Nano; 1 is free now. 2 jobs are ahead of yours. "
        "A run on 1 of them would start now."
    )
    assert "would start now" not in waiting("capacity", {"free": 0}, nodes=2)
    at = timezone.now().replace(hour=12, minute=30, second=5).isoformat()
    text = waiting("backoff", {"reason": "code_failed", "at": at})
    assert text.startswith("The last attempt failed with an error in the code. The run is retried, as you ordered.")
    assert "after 12:30:05" in text


def test_events_say_what_was_charged_and_why_a_run_is_retried():
    assert "$1.23" in messages.event_sentence("settled", {"total_minor": 123, "currency": "USD"})
    text = messages.event_sentence("queued", {"retry": True, "reason": "node_lost", "failure": LOST})
    assert "Node 1 was lost" in text
    assert "That attempt is free" in text
    assert "another run took the capacity" in messages.event_sentence("queued", {})


RAISED = {"exception": "RuntimeError", "message": "a wrong shape", "file": "train.py", "line": "27", "function": "step"}
HUNG = {"seconds": 61.5, "rank": 1, "where": "train.py, line 8, step"}


# Failures, and the whole sentence of each or, without a full stop, a part of it.
FAILURES = [
    ({"code": None, "rank": 0, "exit_code": 3}, "Rank 0 on node 1 exited with code 3."),
    ({"code": "rank_exited", "exit_code": 137}, "Node 1 ended with exit code 137 and left no record"),
    ({"code": "rank_exited", "rank": 3, "signal": "SIGSEGV"}, "Rank 3 on node 1 was killed by SIGSEGV."),
    ({"code": "rank_raised", "rank": 3, "data": RAISED},
     "Rank 3: RuntimeError: a wrong shape (train.py, line 27, in step)."),
    ({"code": "rank_raised", "rank": 3, "data": {"exception": "KeyError", "message": "", "file": ""}},
     "Rank 3: KeyError."),
    ({"code": "hung", "data": HUNG},
     "No rank made progress for 61 seconds. Rank 1 is in train.py, line 8, step; the other ranks wait for it."),
    ({"code": "out_of_memory", "data": {"limit_mib": 512}}, "512 MiB"),
    ({"code": "too_many_processes", "data": {"limit": 100}}, "100"),
    ({"code": "disk_full", "data": {"free_mib": 1}}, "not because of this run"),
    ({"code": "node_silent"}, "Node 1 stopped responding"),
    ({"code": "image_too_large", "data": {"image": "r.example/x:1", "limit_mib": 50}},
     "The image r.example/x:1 needs more than the 50 MiB of disk"),
    ({"code": "image_too_slow", "data": {"image": "r.example/x:1", "limit_seconds": 9}},
     "Pulling and unpacking the image r.example/x:1 took longer than 9 seconds"),
    ({"code": "image_not_unpacked", "data": {"image": "r.example/x:1", "detail": "invalid header"}},
     "The image r.example/x:1 could not be unpacked: invalid header. Build it again"),
]  # fmt: skip


def test_failures_name_rank_code_signal_and_limits():
    for failure, sentence in FAILURES:
        text = messages.failure_sentence(LOST | failure)
        assert text == sentence if sentence.endswith(".") else sentence in text
    # Without a rank, these three codes say only that the platform failed. All others have a sentence of their own.
    for code in set(FailureCode) - {"rank_exited", "rank_killed", "platform_error"}:
        text = messages.failure_sentence({"code": code, "data": {}, "node": 1, "rank": None})
        assert text != "The platform failed during the run.", code


STARTING = {
    "": ({}, "Capacity is allocated"),
    "starting": ({"step": "container", "nodes": 2}, "The nodes are pulling the image"),
    "gpus": ({"wanted": 2, "gpu_type": "H200", "nodes": 4, "free": 3}, "2 × H200 on each of 4 nodes. Free now: 3."),
    "cpus": ({"wanted": 2, "nodes": 1, "free": None}, "has … free"),
    "memory": ({"wanted": 512, "nodes": 1, "free": 100}, "512 MiB"),
    "image_name": ({"image": "r.example/x:1"}, "image r.example/x:1 does not exist"),
    "image_credentials": ({"image": "r.example/x:1"}, "user name and password"),
    "image_network": ({"image": "r.example/x:1"}, "can't reach the registry"),
    "volume": ({"claim": "runs", "detail": ""}, "volume: runs"),
    "quota": ({"detail": "exceeded"}, "quota is used up"),
    "taint": ({"taint": "gpu=yes"}, "taint: gpu=yes"),
    "too_large": ({}, "No machine in the cluster is large enough for a node of this run"),
    "admission": ({"queue": "train", "detail": ""}, "not admitted"),
    "unschedulable": ({"detail": "0/3 nodes"}, "0/3 nodes"),
    "cluster_queue": ({"detail": "Priority"}, "the cluster's own queue"),
    "cluster_limit": ({"detail": "AssocGrpCpuLimit"}, "is reached (AssocGrpCpuLimit)"),
    "cluster_rule": ({"detail": "QOSNotAllowed"}, "do not allow this run (QOSNotAllowed)"),
    "held": ({"detail": "JobHeldAdmin"}, "holds the run in the queue (JobHeldAdmin)"),
    "machines_closed": ({"detail": "PartitionDown"}, "out of service (PartitionDown)"),
}


def test_a_starting_run_says_what_it_waits_for_and_the_remedy():
    for code in ("", *WaitingCode):
        data, words = STARTING[code]
        text = messages.starting_sentence(code, data)
        assert words in text
        assert text.endswith("Nothing is charged yet.")
    assert "pulled and unpacked. This time is free." in messages.starting_sentence("starting", {"step": "image"})
