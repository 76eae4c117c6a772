"""Signed records and stop requests: a Pod's code can neither forge nor reuse them, and long ones are shortened."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.launcher import signed_record
from runtime.launcher.causes import first_cause
from runtime.launcher.signed_record import MAX_RECORD_BYTES, read_record, read_stop, sign_record, sign_stop

RECORD = {"run": "job-1-1", "node": 0, "phase": "ended", "detail": "", "causes": [], "members": []}
TEXTS = st.text(max_size=1000)
CAUSES = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["code_failed", "node_lost", "time_limit"]),
            "code": st.just("rank_exited"),
            "at": st.floats(1e9, 1e9 + 3),  # `first_cause` chooses among those of a second
            "node": st.just(0),
            "rank": st.integers(0, 7),
            "signal": st.sampled_from(["", "SIGABRT", "SIGKILL"]),
            "echo": st.booleans(),
            "heard": st.booleans(),
            "message": TEXTS,
            "data": st.dictionaries(st.text(max_size=10), TEXTS, max_size=3),
            "last_lines": st.lists(TEXTS, max_size=7),
        }
    ),
    max_size=7,
)


def test_a_signed_record_can_be_read():
    for record in (RECORD, {**RECORD, "detail": ',"signature":"0"}'}):  # a text that looks like a signature
        signed = sign_record(record, "key")
        assert json.loads(signed)["phase"] == "ended"
        assert read_record(signed + b"\n", "key", run_name="job-1-1", node=0) == record


def sign_nested(depth):
    """Sign a record that is nested deeper than the json module encodes."""
    body = b'{"run":"job-1-1","node":0,"causes":' + b"[" * depth + b"]" * depth + b"}"
    return body[:-1] + b',"signature":"' + signed_record._signature(body, "key") + b'"}'


@pytest.mark.parametrize(
    "signed",
    [
        b"",
        b"{}",
        b"null",
        b"\xff\xfe",
        b'{"run":"job-1-1","node":0}',
        b'{"run":"job-1-1","node":0,"signature":""}',
        sign_nested(1500),
        sign_record(RECORD, "another"),
        sign_record({**RECORD, "run": "job-1-2"}, "key"),
        sign_record({**RECORD, "node": 1}, "key"),
        sign_record({**RECORD, "node": 1}, "key").replace(b'"node":1', b'"node":0'),
        sign_record(RECORD, "key").replace(b"ended", b"other"),
        sign_record(RECORD, "key")[:-3],
        sign_record(RECORD, "key") + sign_record(RECORD, "key").replace(b"ended", b"other"),
    ],
)
def test_invalid_records_are_refused(signed):
    assert read_record(signed, "key", run_name="job-1-1", node=0) is None


def test_stop_requests_and_records_are_not_interchangeable():
    request = sign_stop("job-1-1", 2, "key")  # to end within two seconds
    assert read_stop(request, "key", run_name="job-1-1") == 2.0
    for other in (sign_stop("job-1-1", 2, "another"), sign_stop("job-1-2", 2, "key"), sign_record(RECORD, "key"), b""):
        assert read_stop(other, "key", run_name="job-1-1") is None
    assert read_stop(sign_stop("job-1-1", 2, ""), "", run_name="job-1-1") is None, "a reader without a key"
    assert read_record(request, "key", run_name="job-1-1", node=0) is None


# Of several failures within a second, a rank that a signal killed comes first.
LONG_CAUSE = {
    "kind": "code_failed",
    "code": "rank_exited",
    "node": 0,
    "message": "m" * 1000,
    "data": {"line": "l" * 300},
}
KILLED_LAST = [
    {**LONG_CAUSE, "at": 1e9 + rank / 10, "rank": rank, "signal": "SIGKILL" if rank == 6 else ""} for rank in range(7)
]


@settings(deadline=None)  # a busy machine may be slow
@example(causes=KILLED_LAST, detail="", members=[])
@example(causes=[{**cause, "data": {"line": "l" * 3000}} for cause in KILLED_LAST], detail="", members=[])
@given(causes=CAUSES, detail=TEXTS, members=st.lists(st.fixed_dictionaries({"nodes": st.just(list(range(300)))})))
def test_a_shortened_record_keeps_run_node_and_first_cause(causes, detail, members):
    record = {**RECORD, "causes": causes, "detail": detail, "members": members}
    signed = sign_record(record, "key", MAX_RECORD_BYTES)
    assert len(signed) <= MAX_RECORD_BYTES
    read = read_record(signed, "key", run_name="job-1-1", node=0)
    assert read["phase"] == "ended"
    names = ("kind", "at", "rank", "signal")
    first, kept = (
        cause and {name: cause[name] for name in names} for cause in map(first_cause, (causes, read["causes"]))
    )
    assert kept == first
