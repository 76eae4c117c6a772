"""The launcher as one file that any interpreter runs: a zip archive, for a ConfigMap.

The one rule: the same sources give the same bytes, on every machine and at every time, so that the name made from
their digest means them and nothing else. So nothing is compressed either, since libraries differ in how they do it.
"""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from pathlib import Path
from typing import NamedTuple

from runtime import launcher

LARGEST = 1 << 20
"""What a ConfigMap holds, in bytes."""
_PACKAGE = "launcher"
_MAIN = """import _signal
import sys

if "--pod" in sys.argv:
    # The kernel drops what the first process of a pod does not handle yet; what is blocked waits for `signals`.
    _signal.pthread_sigmask(_signal.SIG_BLOCK, {_signal.SIGTERM})

from launcher.__main__ import start

start()
"""
_MOMENT = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16


class Zipapp(NamedTuple):
    """The archive's bytes and their SHA-256 in hex."""

    data: bytes
    digest: str


@functools.lru_cache(maxsize=1)
def build() -> Zipapp:
    """The launcher of this installation."""
    return pack(Path(launcher.__file__).parent)


def pack(folder: Path) -> Zipapp:
    """A package's modules, with an entry. Raises ValueError where they are too large for a ConfigMap."""
    sources = {f"{_PACKAGE}/{path.name}": path.read_bytes() for path in sorted(folder.glob("*.py"))}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, source in {"__main__.py": _MAIN.encode(), **sources}.items():
            entry = zipfile.ZipInfo(name, _MOMENT)
            entry.external_attr = _MODE
            entry.create_system = 3
            archive.writestr(entry, source)
    data = stream.getvalue()
    if len(data) >= LARGEST:
        raise ValueError(f"The launcher has {len(data)} bytes, too many for a ConfigMap.")
    return Zipapp(data, hashlib.sha256(data).hexdigest())
