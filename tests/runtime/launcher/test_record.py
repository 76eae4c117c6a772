"""The record of a node, as the process above its launcher writes it."""

import json
import time

import pytest

from runtime.launcher import record as module
from runtime.launcher.record import Record


@pytest.fixture
def record(tmp_path):
    for folder in ("nodes", "logs"):
        (tmp_path / folder).mkdir()
    return Record(tmp_path, tmp_path / "changes", node=1, address="127.0.0.1")


def written(record):
    return json.loads((record.folder / "nodes" / "1.json").read_bytes())


def test_progress_and_checkpoints_are_written_with_the_next_heartbeat(record):
    record.save()
    record.note_progress(100.0)
    record.note_checkpoint(50.0)
    assert written(record)["progress_at"] is None
    record.heartbeat()
    assert (written(record)["progress_at"], written(record)["checkpoint_at"]) == (100.0, 50.0)
    record.note_progress(90.0)
    record.heartbeat()
    assert written(record)["progress_at"] == 100.0, "an earlier sign changes nothing"
    record.note_progress(time.time() + 1000)
    record.heartbeat()
    reported = written(record)["progress_at"]
    assert isinstance(reported, float)
    assert 100.0 < reported <= time.time(), "a time in the future is replaced by now"


def test_samples_are_lines_and_have_a_limit(record, monkeypatch):
    path = record.folder / "nodes" / "1.samples.jsonl"
    record.add_sample({"type": "sample", "cpu": 1})
    assert path.read_text() == '{"cpu": 1}\n'
    monkeypatch.setattr(module, "SAMPLES_LIMIT_BYTES", 100)
    limited = Record(record.folder, record.folder / "changes", node=2, address="")
    for _ in range(100):
        limited.add_sample({"cpu": 1})
    assert (record.folder / "nodes" / "2.samples.jsonl").stat().st_size <= 100
