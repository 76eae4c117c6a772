"""What a container may take of the cores, held to by the kernel, as on a real machine.

The one rule: where this machine lets nobody make control groups, containers take what they like, and nothing fails.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

_PERIOD = 100_000
_OLD, _NEW = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def hold(cpus: float) -> Path | None:
    """A control group with so many cores; None where there can be none. Who ends what is in it removes it."""
    quota = str(int(cpus * _PERIOD))
    ways = {_OLD: ("cpu.cfs_quota_us", quota), _NEW: ("cpu.max", f"{quota} {_PERIOD}")}
    for root, (file, text) in ways.items():
        if not (root / "cgroup.procs").exists():
            continue
        made = root / f"ty-fake-{uuid.uuid4().hex[:12]}"
        try:
            made.mkdir()
            (made / file).write_text(text)
        except OSError:
            remove(made)
            continue
        return made
    return None


def remove(group: Path) -> None:
    """Nobody is in it any more."""
    with contextlib.suppress(OSError):
        group.rmdir()
