"""The processes of one node: bubblewrap, its sandbox, and everything in it, as one thing.

Hides control groups, descriptors and who is whose parent. The one rule: the tree ends as one. The sandbox's first
process takes every other one of its pid namespace with it, and dies with this process. Standard library only: the
supervisor imports this.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.backends import cgroups, warmstart, watchdog
from runtime.launcher import calls
from runtime.launcher.processes import Exit, send_signal, spawn


class Tree:
    """One node's processes. `exit` says how they ended, None before; `init` is the sandbox's first one on the host."""

    def __init__(self, order: dict[str, Any], note: Path) -> None:
        self._order = order
        self._note = note
        self._bubblewrap = 0
        self._made: list[Path] = []
        self.group: cgroups.Group | None = None
        self.init = 0
        self.exit: Exit | None = None

    def start(self, order_on: int, *, output: int, inherit: Sequence[int]) -> int | None:
        """Start the launcher in its sandbox; it finds its order at the other end of the socket `order_on`.

        Returns the descriptor at which it may call for warm ranks, where there are any.
        """
        order = self._order
        if order["cgroups"]:
            self._make_group()
        midwife = warmstart.midwife(order["zygote"], len(order["ranks"])) if order["zygote"] else None
        reading, writing = os.pipe()
        refused = _refused_calls()
        arguments = [
            *order["sandbox"][:1],
            "--info-fd",
            str(writing),
            *(["--seccomp", str(refused)] if refused >= 0 else []),
            *order["sandbox"][1:],
            *order["command"],
            "--socket",
            str(order_on),
        ]
        calling = [] if midwife is None else [midwife.launcher_end.fileno()]
        inherited = [order_on, writing, *([refused] if refused >= 0 else []), *calling, *inherit]
        self._bubblewrap = spawn(arguments, {}, output=output, inherit=inherited, prepare=self._prepare)
        os.close(writing)
        if refused >= 0:
            os.close(refused)
        with os.fdopen(reading, "rb") as info, contextlib.suppress(ValueError, KeyError):
            self.init = int(json.loads(info.read())["child-pid"])
            watchdog.favour(self.init)
        if midwife is not None:
            midwife.show_in(self.init, self._bubblewrap, self._limits(), self._made)
            midwife.launcher_end.close()
        return calling[0] if calling else None

    def _limits(self) -> dict[str, int]:
        order = self._order
        file_bytes = max(order["disk_bytes"], order["memory_bytes"])
        return watchdog.kernel_limits(processes=order["process_limit"], file_bytes=file_bytes)

    def _make_group(self) -> None:
        order = self._order
        name = f"trainyard-{order['name']}-{order['node']}-{order['nonce'][:8]}"
        self.group, self._made = cgroups.create(
            name,
            memory_bytes=order["memory_bytes"],
            processes=order["process_limit"],
            cpus=order["cpus"],
            # Noted before it is made, so that whoever clears up after us knows of it.
            announce=lambda folders: self._note.write_text(json.dumps([str(folder) for folder in folders])),
        )

    def _prepare(self) -> None:
        """In the new process, before bubblewrap is there."""
        watchdog.limit_itself(self._limits())
        if self.group is not None:
            self.group.join()

    def reaped(self, gone: Exit) -> None:
        """A child of this process has ended: perhaps ours."""
        if gone.pid == self._bubblewrap:
            self.exit = gone

    def kill(self) -> None:
        """End everything, now."""
        for pid in (self.init, self._bubblewrap):
            if pid and self.exit is None:
                send_signal(pid, signal.SIGKILL)

    def clear(self) -> None:
        """Nothing runs any more: remove what was made for it."""
        if cgroups.remove(self._made):
            self._note.unlink(missing_ok=True)


def _refused_calls() -> int:
    """A descriptor to read from which calls are refused in the sandbox; -1 where that is not to be had."""
    program = None if calls.why_not() else calls.program()
    if program is None:
        return -1
    reading, writing = os.pipe()
    os.write(writing, program)  # far less than a pipe holds
    os.close(writing)
    return reading


def noted_groups(folder: Path) -> list[Path]:
    """The control groups of all nodes of a run, as their supervisors have noted them."""
    found: list[Path] = []
    for note in folder.glob("*.cgroups"):
        with contextlib.suppress(OSError, ValueError):
            found += map(Path, json.loads(note.read_bytes()))
    return found


def clear_after(note: Path) -> None:
    """What `clear` would have done, for a node whose supervisor was killed."""
    try:
        folders = [Path(folder) for folder in json.loads(note.read_bytes())]
    except (OSError, ValueError):
        return
    if cgroups.remove(folders):
        note.unlink(missing_ok=True)
