"""Search for names of files in a workspace."""

import os
from pathlib import Path

import pytest

from storage import search
from storage.errors import FileMissing, UnsafePath, WrongKind
from storage.search import StopReason, find


def paths(found):
    return sorted(match.path for match in found.matches)


def test_a_search_finds_names_in_any_case_below_a_folder(root):
    (root / "Models" / "deep").mkdir(parents=True)
    for path in ("model.py", "Models/deep/MODEL.pt", "Models/readme.md", "other.py"):
        (root / path).touch()
    (root / "model-link").symlink_to("..")
    Path(os.fsdecode(os.fsencode(root) + b"/model-\xff")).touch()
    found = find(root=root, text="model")
    assert paths(found) == ["Models", "Models/deep/MODEL.pt", "model-link", "model-\ufffd", "model.py"]
    assert found.stopped is None
    assert paths(find(root=root, text="model", path="Models")) == ["Models/deep/MODEL.pt"]
    assert paths(find(root=root, text="secret")) == [], (
        "links are not followed: the fixture's folder outside has such a file"
    )


def test_a_search_starts_in_a_folder_of_the_workspace(root):
    (root / "file").touch()
    (root / "link").symlink_to("/")
    for path, error in (("none", FileMissing), ("..", UnsafePath), ("link", UnsafePath), ("file", WrongKind)):
        with pytest.raises(error):
            find(root=root, text="a", path=path)


def test_a_search_says_why_it_stopped(root, monkeypatch):
    for number in range(5):
        (root / f"a{number}").touch()
    assert find(root=root, text="a", max_entries=5).stopped is None
    stopped = find(root=root, text="a", max_entries=4)
    assert (len(stopped.matches), stopped.stopped) == (4, StopReason.ENTRIES)
    assert find(root=root, text="a", max_seconds=-1).stopped is StopReason.SECONDS
    monkeypatch.setattr(search, "MAX_MATCHES", 4)
    stopped = find(root=root, text="a")
    assert (len(stopped.matches), stopped.stopped) == (4, StopReason.MATCHES)
    monkeypatch.setattr(search, "MAX_DEPTH", 2)
    (root / "x/y/z").mkdir(parents=True)
    (root / "x/y/z/deep").touch()
    assert find(root=root, text="deep").stopped is StopReason.DEPTH
