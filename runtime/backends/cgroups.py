"""One control group per node of a run: its memory, processes and CPU time, held by the kernel, where it lets us.

Hides the two generations (v2: one tree, where ours is delegated; v1: a tree per controller). The one rule: a group is
made below the one that this process is in, so that whatever bounds the console bounds its runs too. Where none can be
made, `create` returns None, and the watchdog measures instead. Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PROC = Path("/proc")
NEEDED = ("memory", "pids")
WANTED = (*NEEDED, "cpu")
_COUNTED = "cpuacct"
"""The first generation counts CPU time in a controller of its own."""
_LEAF = "trainyard-console"
_PERIOD = 100_000
_LEAST_QUOTA = 1_000
_LAUNCHERS_QUOTA = 2_000
"""Beside what was bought: the launcher is in the group too, and what it takes is not the code's."""
_SHARES, _LEAST_SHARES = 1024, 2
_WEIGHT, _LEAST_WEIGHT, _MOST_WEIGHT = 100, 1, 10_000
"""Of a group for each of its cores, in v1 and v2: what a process outside of any has. With the kernel's own, one such
for all its cores, a run would get half a core of two beside whatever else the machine does."""
_REMOVE_SECONDS = 2.0
_PAUSE_SECONDS = 0.01


class Group:
    """One node's group: a folder for each controller; with v2 all are the same one."""

    def __init__(self, folders: dict[str, Path], *, unified: bool) -> None:
        self._folders = folders
        self._unified = unified

    @property
    def folders(self) -> list[Path]:
        """Where it is, for `remove`."""
        return sorted(set(self._folders.values()))

    def join(self) -> None:
        """Put this very process in. Raises OSError."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text("0")

    def oom_kills(self) -> int:
        """How often the kernel has killed in here because the memory was used up."""
        return _count(
            self._folders["memory"] / ("memory.events" if self._unified else "memory.oom_control"), "oom_kill"
        )

    def refusals(self) -> int:
        """How often a new process or thread was refused because there were too many."""
        return _count(self._folders["pids"] / "pids.events", "max")

    def cpu_seconds(self) -> float | None:
        """What all that ever was in here has used of CPU time, also what lived too short to be seen."""
        folder = self._folders.get("cpu" if self._unified else _COUNTED)
        if folder is None:
            return None
        try:
            if self._unified:
                return _count(folder / "cpu.stat", "usage_usec") / 1e6
            return int((folder / "cpuacct.usage").read_text()) / 1e9
        except (OSError, ValueError):
            return None

    def tasks(self) -> int:
        """How many processes and threads are in here now."""
        try:
            return int((self._folders["pids"] / "pids.current").read_text())
        except (OSError, ValueError):
            return 0

    def limit(self, *, memory_bytes: int, processes: int, cpus: float) -> None:
        """Set the limits. Raises OSError where the kernel refuses one."""
        memory, pids, cpu = (self._folders.get(name) for name in WANTED)
        quota = max(_LEAST_QUOTA, int(cpus * _PERIOD)) + _LAUNCHERS_QUOTA
        if memory is None or pids is None:
            raise OSError("controllers are missing")
        (pids / "pids.max").write_text(str(processes))
        if self._unified:
            (memory / "memory.max").write_text(str(memory_bytes))
            _write_if_there(memory / "memory.swap.max", "0")
            if cpu is not None:
                (cpu / "cpu.max").write_text(f"{quota} {_PERIOD}")
                weight = min(_MOST_WEIGHT, max(_LEAST_WEIGHT, int(cpus * _WEIGHT)))
                _write_if_there(cpu / "cpu.weight", str(weight))
        else:
            (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
            # Memory and swap together: that there is swap gives nobody more.
            _write_if_there(memory / "memory.memsw.limit_in_bytes", str(memory_bytes))
            if cpu is not None:
                _write_if_there(cpu / "cpu.cfs_quota_us", str(quota))
                _write_if_there(cpu / "cpu.shares", str(max(_LEAST_SHARES, int(cpus * _SHARES))))


def create(
    name: str,
    *,
    memory_bytes: int,
    processes: int,
    cpus: float,
    proc: Path = PROC,
    announce: Callable[[list[Path]], object] = lambda _folders: None,
) -> tuple[Group | None, list[Path]]:
    """A new group of this name with its limits, and the folders that `remove` is to be given at the end.

    None where the kernel does not let us; then nothing is left of the attempt. `announce` is told of the folders before
    they are made.
    """
    places, unified = find(proc)
    folders = {controller: place / name for controller, place in places.items()}
    made = Group(folders, unified=unified)
    announce(made.folders)
    if not all(controller in folders for controller in NEEDED):
        return None, []
    try:
        for folder in made.folders:
            folder.mkdir()
        made.limit(memory_bytes=memory_bytes, processes=processes, cpus=cpus)
    except OSError:
        remove(made.folders)
        return None, []
    return made, made.folders


def find(proc: Path = PROC) -> tuple[dict[str, Path], bool]:
    """Controller to the folder that this process may make groups in; and whether that is v2's tree."""
    mine = _memberships(proc)
    unified: Path | None = None
    places: dict[str, Path] = {}
    for line in _lines(proc / "self" / "mountinfo"):
        if " - cgroup" not in line:
            continue
        left, _, right = line.partition(" - ")
        fields, (kind, _source, options, *_rest) = left.split(), [*right.split(), "", "", ""]
        root, mount = fields[3], Path(fields[4])
        if kind == "cgroup2" and "" in mine:
            unified = _below(mount, root, mine[""])
        elif kind == "cgroup":
            for controller in set(options.split(",")) & {*WANTED, _COUNTED} & set(mine):
                places[controller] = _below(mount, root, mine[controller])
    if all(name in places and os.access(places[name], os.W_OK) for name in NEEDED):
        return {name: place for name, place in places.items() if os.access(place, os.W_OK)}, False
    if unified is not None and _delegated(unified):
        return dict.fromkeys(WANTED, unified), True
    return {}, False


def why_not(proc: Path = PROC) -> str:
    """Why nodes get no control groups here, one English sentence; "" where they get them."""
    places, _unified = find(proc)
    if places:
        return ""
    return (
        "There is no cgroup that this user may divide: run the console as root, or as a systemd service with "
        "'Delegate=yes'."
    )


def why_no_cpu(proc: Path = PROC) -> str:
    """Why CPU time is not limited where memory and processes are, one English sentence; "" where it is."""
    places, _unified = find(proc)
    if not places or "cpu" in places:
        return ""
    return "The cgroup controller 'cpu' is not mounted, or this user may make no groups in it."


def kill(folders: Iterable[Path]) -> None:
    """End every process in there."""
    for folder in folders:
        with contextlib.suppress(OSError):
            (folder / "cgroup.kill").write_text("1")
            continue
        for line in _lines(folder / "cgroup.procs"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(line), signal.SIGKILL)


def processes(folders: Iterable[Path]) -> list[int]:
    """Who is in there. A process is in several folders of the first generation, and is named once."""
    return sorted({int(line) for folder in folders for line in _lines(folder / "cgroup.procs")})


def remove(folders: Iterable[Path]) -> bool:
    """Remove groups, ending what is still in them; False where one stays."""
    left = list(folders)
    give_up_at = time.monotonic() + _REMOVE_SECONDS
    while left:
        left = [folder for folder in left if not _removed(folder)]
        if not left or time.monotonic() > give_up_at:
            break
        kill(left)
        time.sleep(_PAUSE_SECONDS)  # that a group of the first generation is empty comes with no event
    return not left


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _delegated(folder: Path) -> bool:
    """Whether v2 groups with our controllers can be made here; makes it so where that is ours to do.

    A group with processes of its own passes no controllers on, so those move into a leaf of their own first.
    """
    try:
        there = set((folder / "cgroup.controllers").read_text().split())
        if not set(WANTED) <= there or not os.access(folder, os.W_OK):
            return False
        control = folder / "cgroup.subtree_control"
        if set(WANTED) <= set(control.read_text().split()):
            return True
        wanted = " ".join(f"+{name}" for name in WANTED)
        try:
            control.write_text(wanted)
        except OSError:
            leaf = folder / _LEAF
            leaf.mkdir(exist_ok=True)
            for pid in _lines(folder / "cgroup.procs"):
                with contextlib.suppress(ProcessLookupError):
                    (leaf / "cgroup.procs").write_text(pid)
            control.write_text(wanted)
    except OSError:
        return False
    return True


def _memberships(proc: Path) -> dict[str, str]:
    """Controller to this process's own path in its tree; "" is v2's. Our own leaf stands for the group above it."""
    mine = {}
    for line in _lines(proc / "self" / "cgroup"):
        _number, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            mine[controller] = path.removesuffix(f"/{_LEAF}") or "/"
    return mine


def _below(mount: Path, root: str, path: str) -> Path:
    """Where a group is seen: what is mounted may be only a part of the tree, from `root` on."""
    return mount / os.path.relpath(path, root) if path.startswith(root) else mount / path.lstrip("/")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _count(path: Path, name: str) -> int:
    for line in _lines(path):
        word, _, value = line.partition(" ")
        if word == name:
            return int(value)
    return 0


def _write_if_there(path: Path, value: str) -> None:
    if path.exists():
        path.write_text(value)
