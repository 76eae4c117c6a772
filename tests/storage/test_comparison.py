"""Comparison of a customer's files with a workspace, whose files are not trusted."""

import hashlib
import os

import pytest

from storage import comparison
from storage.comparison import ClientFile
from storage.errors import UnsafePath


def described(path, content):
    return ClientFile(path, len(content), hashlib.sha256(content).hexdigest())


def test_only_files_with_the_same_bytes_are_equal(root, monkeypatch):
    (root / "same").write_bytes(b"same")
    (root / "other").write_bytes(b"0123")
    (root / "longer").write_bytes(b"same and more")
    (root / "folder").mkdir()
    (root / "link").symlink_to(root.parent / "secret.txt")
    os.mkfifo(root / "pipe")
    names = ["other", "longer", "folder", "pipe", "missing", "missing/below", "same/below"]
    asked = [described(name, b"same") for name in names]
    asked += [described("link", b"secret"), described("same", b"same")]
    assert comparison.differing(root=root, client_files=asked) == [*names, "link"]
    monkeypatch.setattr(comparison, "MAX_HASHED_BYTES", 3)
    assert comparison.differing(root=root, client_files=asked[-1:]) == ["same"], "not hashed, so sent again"
    for path in ("../secret.txt", "/etc/passwd", "a/../../secret.txt"):
        with pytest.raises(UnsafePath):
            comparison.differing(root=root, client_files=[described(path, b"secret")])
