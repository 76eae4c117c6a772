"""Paths that customers choose: split, opened without following links, and errors of the system translated."""

import errno

import pytest

from storage.errors import FileMissing, StorageFull, Unreadable, UnsafePath, WrongKind
from storage.paths import open_folder, split_path, translate_os_errors


def test_os_errors_are_translated():
    for number, error in (
        (errno.ENOENT, FileMissing), (errno.ELOOP, UnsafePath), (errno.ENAMETOOLONG, UnsafePath),
        (errno.EACCES, Unreadable), (errno.EISDIR, WrongKind), (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull), (errno.EIO, OSError),
    ):  # fmt: skip
        with pytest.raises(error, match="refused" if error is OSError else None), translate_os_errors():
            raise OSError(number, "refused")


def test_a_path_is_split_into_its_components():
    for path, parts in ((".", ()), ("./a//b/.", ("a", "b")), ("...", ("...",)), ("%2e%2e/a", ("%2e%2e", "a"))):
        assert split_path(path) == parts


def test_folders_are_created_only_on_request(root):
    with pytest.raises(FileMissing), open_folder(root=root, parts=("a", "b")):
        pass
    with open_folder(root=root, parts=("a", "b"), create=True):
        assert (root / "a" / "b").is_dir()
