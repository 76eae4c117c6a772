"""Which records of pods are believed: a customer who found the key can sign any JSON."""

import base64

import pytest

from runtime.backends.kubernetes.runs import Runs
from runtime.backends.records import is_well_formed
from runtime.launcher.signed_record import sign_record
from runtime.specs import Outcome
from tests.runtime.backends.samples import END, JOB, START, ended

KEY = "k" * 64
CAUSE = {"kind": "code_failed", "code": "rank_exited", "at": END, "node": 0, "rank": 0, "exit_code": 3}
RECORD = {"run": "job-1-1", "node": 0, "phase": "ended", "started_at": START, "finished_at": END, "causes": [CAUSE]}


class SecretOnly:
    """An API client that knows the run's Secret."""

    def find(self, path):
        assert path.endswith("/secrets/job-1-1")
        return {"data": {"record_key": base64.b64encode(KEY.encode()).decode()}}


def nested(depth):
    """Return lists in lists. The json module can encode 900 levels of them, but `dump_status` cannot."""
    return [nested(depth - 1)] if depth else []


def records_of(record):
    runs = Runs(SecretOnly(), None, None, lambda: None)  # without settings, folders and capacity
    pod = ended(0, 3, termination_message=sign_record(record, KEY).decode())
    return runs._verified_records(JOB, {0: pod})


def test_a_record_without_optional_values_is_well_formed():
    assert is_well_formed({"phase": "ended"})
    assert is_well_formed({**RECORD, "progress_at": None, "causes": [{"kind": str(Outcome.HUNG), "at": 1}]})
    assert records_of(RECORD) == {0: RECORD}


@pytest.mark.parametrize(
    "change",
    [
        {"finished_at": float("nan")},
        {"progress_at": 1e300},
        {"round": None},
        {"round": 1 << 40},
        {"causes": {"0": CAUSE}},
        {"causes": ["code_failed"]},
        {"causes": [{"at": END}]},
        {"causes": [{"kind": "code_failed"}]},
        {"causes": [{**CAUSE, "kind": ["code_failed"]}]},
        {"causes": [{**CAUSE, "kind": "anything"}]},
        {"causes": [{**CAUSE, "rank": [0]}]},
        {"causes": [{**CAUSE, "data": "none"}]},
        {"causes": [{**CAUSE, "data": {"used_seconds": "1"}}]},
        {"causes": [{**CAUSE, "code": "hung", "data": {"seconds": None}}]},
        {"causes": [{**CAUSE, "data": {"limit_mib": float("inf")}}]},
        {"causes": [{**CAUSE, "data": {"exception": nested(900)}}]},
        {"causes": [{**CAUSE, "message": nested(2)}]},
        {"causes": [{**CAUSE, "last_lines": 20}]},
        {"causes": [{**CAUSE, "last_lines": [nested(2)]}]},
        {"causes": [CAUSE, {**CAUSE, "message": "m" * (1 << 16)}]},
    ],
    ids=lambda change: repr(change)[:100],
)
def test_a_malformed_record_is_ignored_in_spite_of_its_signature(change):
    assert not is_well_formed({**RECORD, **change})
    assert records_of({**RECORD, **change}) == {}
