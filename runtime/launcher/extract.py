"""Extract files of this package if the package is an archive, as in a pod.

An interpreter cannot run a script in an archive. The run's code can write to the folder of the extracted files.
Therefore only files that the code's own processes run are extracted. The platform's processes import from the archive,
which the code cannot change.
"""

from __future__ import annotations

import functools
import os
import stat
from typing import Any

_PACKAGE_FOLDER = os.path.dirname(__file__)
_PARENT_FOLDERS = ("/tmp", "/dev/shm", "/var/tmp")  # noqa: S108 - an existing folder there must belong to this user
_FOLDER_NAME = ".trainyard"
"""The folder's name. It is the same in every pod, because mpirun starts the same path on all nodes."""


def extract_file(name: str, *companions: str) -> str:
    """Return the path of a file of this package, extracted if necessary. Raises OSError.

    `companions` are files that it needs in the same folder.
    """
    path = os.path.join(_PACKAGE_FOLDER, name)
    if os.path.exists(path):
        return os.path.abspath(path)
    for companion in companions:
        _extract(companion)
    return _extract(name)


@functools.lru_cache(maxsize=None)
def _extract(name: str) -> str:
    """Extract one file of the archive; return its path. Raises OSError."""
    loader: Any = globals()["__loader__"]  # reads the archive, from which this module was imported too
    path = os.path.join(_extraction_folder(), name)
    temporary = os.path.join(_extraction_folder(), ".{}.{}".format(name, os.urandom(4).hex()))
    with open(temporary, "xb") as file:
        file.write(loader.get_data(os.path.join(_PACKAGE_FOLDER, name)))
    os.replace(temporary, path)
    return path


@functools.lru_cache(maxsize=None)
def _extraction_folder() -> str:
    """Return the folder for extracted files. If another user has created a folder of this name, add a random part."""
    last_error = OSError("no folder to write to")
    for parent in _PARENT_FOLDERS:
        for name in (_FOLDER_NAME, "{}-{}".format(_FOLDER_NAME, os.urandom(8).hex())):
            path = os.path.join(parent, name)
            try:
                if _create_folder(path):
                    return path
            except OSError as error:
                last_error = error
    raise last_error


def _create_folder(path: str) -> bool:
    """Create the folder; False if one of that name belongs to another user. Raises OSError."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.lstat(path)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700
    return True
