from __future__ import annotations

import errno
from pathlib import Path

import pytest

from storage.errors import FileMissing, StorageError, StorageFull, Unreadable, UnsafePath, WrongKind
from storage.paths import explained, open_folder, split


@pytest.mark.parametrize(
    ("number", "meaning"),
    [
        (errno.ENOENT, FileMissing),
        (errno.ELOOP, UnsafePath),
        (errno.ENAMETOOLONG, UnsafePath),
        (errno.EACCES, Unreadable),
        (errno.EISDIR, WrongKind),
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
    ],
)
def test_what_the_kernel_refuses_is_explained(number: int, meaning: type[StorageError]) -> None:
    with pytest.raises(meaning), explained():
        raise OSError(number, "refused")


def test_what_nobody_foresaw_stays_as_it_is() -> None:
    with pytest.raises(OSError, match="broken"), explained():
        raise OSError(errno.EIO, "broken")


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("", ()),
        (".", ()),
        ("a/b", ("a", "b")),
        ("./a//b/.", ("a", "b")),
        ("...", ("...",)),
        ("%2e%2e/a", ("%2e%2e", "a")),
    ],
)
def test_split(path: str, parts: tuple[str, ...]) -> None:
    assert split(path) == parts


def test_folders_are_made_only_when_asked(root: Path) -> None:
    with pytest.raises(FileMissing), open_folder(root=root, parts=("a", "b")):
        pass
    with open_folder(root=root, parts=("a", "b"), create=True):
        assert (root / "a" / "b").is_dir()
