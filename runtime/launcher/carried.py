"""Files of this package as files. In a pod the package is an archive, and an interpreter starts no script out of one.

The one rule: only what the customer's own processes run is taken out (its folder is one that the customer's code can
write to); what this process and its like import comes from the archive, which nobody here can change.
"""

from __future__ import annotations

import os
from typing import Any, List

_HERE = os.path.dirname(__file__)
_FOLDERS = ("/tmp", "/dev/shm", "/var/tmp")  # noqa: S108 - a folder with an unknown name is made in there
_made: List[str] = []


def as_file(name: str, *with_it: str) -> str:
    """The path of a file of this package; `with_it` are others that it wants beside itself. Raises OSError."""
    beside = os.path.join(_HERE, name)
    if os.path.exists(beside):
        return os.path.abspath(beside)
    loader: Any = globals()["__loader__"]
    folder = _folder()
    for each in (*with_it, name):
        path = os.path.join(folder, each)
        if not os.path.lexists(path):
            with open(path, "wb") as file:
                file.write(loader.get_data(os.path.join(_HERE, each)))
    return os.path.join(folder, name)


def _folder() -> str:
    if _made:
        return _made[0]
    problem = OSError("no folder to write to")
    for parent in _FOLDERS:
        path = os.path.join(parent, ".trainyard-" + os.urandom(8).hex())
        try:
            os.mkdir(path, 0o700)
        except OSError as error:
            problem = error
            continue
        _made.append(path)
        return path
    raise problem
