"""Hostile scripts: what a run leaves behind keeps nobody else from running."""

from __future__ import annotations

import threading

import pytest

from runtime.backends import local
from runtime.backends.trash import Trash
from runtime.specs import Outcome
from tests.runtime.conftest import Yard

DEEP = """
    import os
    os.chdir(os.environ["RUN_DIR"])
    for _ in range(4000):
        os.mkdir("d" * 20)
        os.chdir("d" * 20)
"""


def test_folders_without_end_are_removed_and_stop_nobody(yard: Yard) -> None:
    """Python's own `rmtree` calls itself: it failed, and with it every later start on the machine."""
    assert yard.run(DEEP).outcome in {Outcome.COMPLETED, Outcome.DISK_FULL}
    yard.backend.delete("job-1-1")
    assert yard.run("print('other')", name="job-2-1").outcome is Outcome.COMPLETED
    assert list((yard.folder / "runs" / ".trash").iterdir()) == []


def test_checkpoints_without_end_are_removed(yard: Yard) -> None:
    yard.run(DEEP.replace("RUN_DIR", "CHECKPOINT_DIR"), checkpoint_key="job-1")
    yard.backend.delete_checkpoints("job-1")
    assert list((yard.folder / "runs" / ".checkpoints").iterdir()) == []
    assert list((yard.folder / "runs" / ".trash").iterdir()) == []


def test_a_removal_that_takes_long_holds_up_no_submission(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    removing, go_on = threading.Event(), threading.Event()
    empty = Trash.empty

    def take_long(self: Trash) -> None:
        removing.set()
        assert go_on.wait(60)
        empty(self)

    yard.run("print('first')")
    monkeypatch.setattr(local.Trash, "empty", take_long)
    deletion = threading.Thread(target=yard.backend.delete, args=("job-1-1",))
    deletion.start()
    assert removing.wait(60)
    try:
        assert yard.run("print('second')", name="job-2-1").outcome is Outcome.COMPLETED
    finally:
        go_on.set()
        deletion.join()
