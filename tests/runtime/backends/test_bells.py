from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.backends.bells import Bells


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Bells]:
    with contextlib.closing(Bells(tmp_path)) as opened:
        yield opened


def test_what_was_written_moved_in_or_deleted_is_heard(heard: Bells, tmp_path: Path) -> None:
    (tmp_path / "job-1-1").write_bytes(b"!")
    assert heard.hear(10) == {"job-1-1"}
    (tmp_path / "job-1-1").write_bytes(b"!")
    (tmp_path / "job-2-1").write_bytes(b"!")
    assert heard.hear(10) == {"job-1-1", "job-2-1"}
    (tmp_path / "job-2-1").unlink()
    assert heard.hear(10) == {"job-2-1"}
    other = tmp_path.parent / f"{tmp_path.name}-other"
    other.write_bytes(b"!")
    other.rename(tmp_path / "job-3-1")
    assert heard.hear(10) == {"job-3-1"}


def test_nothing_is_heard_of_what_was_before_or_is_only_looked_at(tmp_path: Path) -> None:
    (tmp_path / "before").write_bytes(b"!")
    with contextlib.closing(Bells(tmp_path)) as heard:
        (tmp_path / "before").read_bytes()
        assert heard.hear(0.01) == set()


def test_who_waits_is_woken(heard: Bells, tmp_path: Path) -> None:
    ringer = threading.Timer(0.1, (tmp_path / "late").write_bytes, [b"!"])
    ringer.start()
    assert heard.hear(60) == {"late"}
    ringer.join()


def test_one_who_never_stops_ringing_keeps_nobody(heard: Bells, tmp_path: Path) -> None:
    ends = threading.Event()

    def ring() -> None:
        while not ends.is_set():
            (tmp_path / "often").write_bytes(b"!")

    ringer = threading.Thread(target=ring)
    ringer.start()
    try:
        assert heard.hear(60) == {"often"}
    finally:
        ends.set()
        ringer.join()


def test_where_events_were_lost_it_may_have_been_any(heard: Bells, tmp_path: Path) -> None:
    (tmp_path / "one").touch()
    (tmp_path / "two").touch()
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    for number in range(limit + 2):
        os.close(os.open(tmp_path / ("one", "two")[number % 2], os.O_WRONLY))
    (tmp_path / "lost").touch()
    found: set[str] = set()
    while more := heard.hear(0):
        found |= more
    assert found == {"one", "two", "lost"}


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="no notice of changes"):
        Bells(tmp_path / "nowhere")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
