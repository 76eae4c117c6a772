from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from runtime.launcher import record as module
from runtime.launcher.record import Record, Verdict


@pytest.fixture
def record(tmp_path: Path) -> Record:
    for folder in ("nodes", "logs"):
        (tmp_path / folder).mkdir()
    return Record(tmp_path, tmp_path / "bell", node=1, address="127.0.0.1")


def written(record: Record) -> dict[str, object]:
    read: dict[str, object] = json.loads((record.folder / "nodes" / "1.json").read_bytes())
    return read


def test_what_happened_is_on_disk_and_told(record: Record) -> None:
    record.save()
    record.add_cause(Verdict("disk_full", "disk_full", "Too much.", data={"limit_mib": 3}))
    record.save()
    assert (record.phase, record.started) == ("starting", False)
    (cause,) = record.causes
    assert written(record)["causes"] == [cause]
    assert (cause["node"], cause["rank"], cause["data"]) == (1, None, {"limit_mib": 3})
    record.ring_if_due(time.monotonic())
    assert (record.folder / "bell").exists()


def test_a_resting_bell_rings_later_and_for_the_end_at_once(record: Record) -> None:
    record.rest_the_bell(60)
    record.save()
    now = time.monotonic()
    record.ring_if_due(now)
    assert not (record.folder / "bell").exists()
    assert 55 < record.patience(now) <= 60
    record.ring_if_due(now + 61)
    assert (record.folder / "bell").exists()
    (record.folder / "bell").unlink()
    record.rest_the_bell(60)
    record.finish(exit_code=0)
    assert (record.folder / "bell").exists()


def test_a_beat_changes_the_records_time_and_nothing_else(record: Record) -> None:
    record.save()
    path = record.folder / "nodes" / "1.json"
    os.utime(path, (1, 1))
    before = path.stat().st_ino
    record.beat()
    assert path.stat().st_mtime > 1
    assert path.stat().st_ino == before


def test_progress_and_checkpoints_are_written_with_the_next_beat(record: Record) -> None:
    record.save()
    record.progress(100.0)
    record.checkpoint(50.0)
    assert written(record)["progress_at"] is None
    record.beat()
    assert (written(record)["progress_at"], written(record)["checkpoint_at"]) == (100.0, 50.0)
    record.progress(90.0)
    record.progress(time.time() + 1000)
    record.beat()
    told = written(record)["progress_at"]
    assert isinstance(told, float)
    assert 100.0 < told <= time.time(), "the future is no sign of life"


def test_a_disk_that_refuses_is_asked_again(record: Record) -> None:
    (record.folder / "nodes").rename(record.folder / "away")
    record.save()
    (record.folder / "away").rename(record.folder / "nodes")
    record.beat()
    assert written(record)["phase"] == "starting"


def test_samples_are_lines_and_have_a_limit(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record.folder / "nodes" / "1.samples.jsonl"
    record.add_sample({"type": "sample", "cpu": 1})
    assert path.read_text() == '{"cpu": 1}\n'
    monkeypatch.setattr(module, "SAMPLES_LIMIT_BYTES", 100)
    small = Record(record.folder, record.folder / "bell", node=2, address="")
    for _ in range(100):
        small.add_sample({"cpu": 1})
    assert (record.folder / "nodes" / "2.samples.jsonl").stat().st_size <= 100


def test_stacks_are_cut(record: Record) -> None:
    record.add_stacks(3, "x" * (1 << 20))
    assert (record.folder / "logs" / "stacks-3.txt").stat().st_size == module.STACKS_LIMIT_BYTES


def test_the_last_record_says_so(record: Record) -> None:
    record.add_detail("One thing.")
    record.add_detail("Another.")
    record.finish(finished_at=7.0, exit_code=0)
    assert (written(record)["phase"], written(record)["detail"]) == ("ended", "One thing. Another.")
