"""Changes of files in a folder, as the kernel reports them."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from runtime.backends.local.inotify import FolderWatch


@pytest.fixture
def watch(tmp_path):
    """A watch of the folder `tmp_path`."""
    with contextlib.closing(FolderWatch(tmp_path)) as opened:
        yield opened


def test_written_moved_and_deleted_files_are_reported(watch, tmp_path):
    (tmp_path / "job-1-1").write_bytes(b"!")
    assert watch.wait(10) == {"job-1-1"}
    (tmp_path / "job-1-1").write_bytes(b"!")
    (tmp_path / "job-2-1").write_bytes(b"!")
    assert watch.wait(10) == {"job-1-1", "job-2-1"}
    (tmp_path / "job-2-1").unlink()
    assert watch.wait(10) == {"job-2-1"}
    other = tmp_path.parent / f"{tmp_path.name}-other"
    other.write_bytes(b"!")
    other.rename(tmp_path / "job-3-1")
    assert watch.wait(10) == {"job-3-1"}


def test_constant_changes_are_still_reported(watch, tmp_path):
    """`wait` collects changes that follow each other closely, but must not wait for ever for a pause."""
    ends = threading.Event()

    def write():
        while not ends.is_set():
            (tmp_path / "often").write_bytes(b"!")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert watch.wait(60) == {"often"}
    finally:
        ends.set()
        writer.join()


def test_after_dropped_events_every_file_is_reported(watch, tmp_path):
    (tmp_path / "one").touch()
    (tmp_path / "two").touch()
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    for number in range(limit + 2):  # the kernel merges equal events, so they alternate
        os.close(os.open(tmp_path / ("one", "two")[number % 2], os.O_WRONLY))
    (tmp_path / "lost").touch()  # the queue is full, so this event is dropped
    names = set()
    while more := watch.wait(0):
        names |= more
    assert names == {"one", "two", "lost"}


def test_a_missing_folder_is_an_error_and_leaves_no_descriptor_open(tmp_path):
    before = _inotify_descriptors()
    with pytest.raises(OSError, match="cannot be watched"):
        FolderWatch(tmp_path / "nowhere")
    assert _inotify_descriptors() == before


def _inotify_descriptors():
    links = (os.path.realpath(path) for path in Path("/proc/self/fd").iterdir())
    return [link for link in links if "inotify" in link]
