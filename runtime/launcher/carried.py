"""Files of this package as files. In a pod the package is an archive, and an interpreter starts no script out of one.

The one rule: only what the customer's own processes run is taken out (its folder is one that the customer's code can
write to); what this process and its like import comes from the archive, which nobody here can change.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, List, Set

_HERE = os.path.dirname(__file__)
_PARENTS = ("/tmp", "/dev/shm", "/var/tmp")  # noqa: S108 - what is found there already is ours or not used
_NAME = ".trainyard"
"""The same in every pod: MPI starts what one node names on all of them."""
_folders: List[str] = []
_taken: Set[str] = set()


def as_file(name: str, *with_it: str) -> str:
    """The path of a file of this package; `with_it` are others that it wants beside itself. Raises OSError."""
    beside = os.path.join(_HERE, name)
    if os.path.exists(beside):
        return os.path.abspath(beside)
    folder = _folder()
    for each in (*with_it, name):
        if each not in _taken:
            _take_out(each, folder)
    return os.path.join(folder, name)


def _take_out(name: str, folder: str) -> None:
    loader: Any = globals()["__loader__"]
    temporary = os.path.join(folder, ".{}.{}".format(name, os.urandom(4).hex()))
    with open(temporary, "xb") as file:
        file.write(loader.get_data(os.path.join(_HERE, name)))
    os.replace(temporary, os.path.join(folder, name))
    _taken.add(name)


def _folder() -> str:
    if not _folders:
        problem = OSError("no folder to write to")
        for parent in _PARENTS:
            for name in (_NAME, "{}-{}".format(_NAME, os.urandom(8).hex())):
                path = os.path.join(parent, name)
                try:
                    if _make(path):
                        _folders.append(path)
                        return path
                except OSError as error:
                    problem = error
        raise problem
    return _folders[0]


def _make(path: str) -> bool:
    """Make the folder; False where something of that name is not ours alone. Raises OSError."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700
    return True
