"""A control group for each node of a run, through which the kernel limits its memory, processes and CPU time.

Supports cgroup v2 (one tree, of which a part must be delegated to this user) and v1 (a tree per controller). Groups are
created below this process's own, so limits on the console hold for its runs too. Where `create` returns no group,
`resource_limits` measures usage instead. Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
REQUIRED_CONTROLLERS = ("memory", "pids")
"""Controllers without which nodes get no control groups."""
CONTROLLERS = (*REQUIRED_CONTROLLERS, "cpu")
"""Controllers that a group uses; v1 may lack `cpu`."""
_CPU_TIME_CONTROLLER = "cpuacct"
"""The v1 controller that counts CPU time."""
_PROCESSES_GROUP = "trainyard-console"
"""With v2, the child group to which `_enable_controllers` moves the processes of the console's group."""
_PERIOD_US = 100_000
"""The period of CPU quotas in microseconds: the kernel's default."""
_MIN_QUOTA_US = 1_000
"""The smallest quota that the kernel accepts."""
_LAUNCHER_QUOTA_US = 2_000
"""CPU time per period for the launcher, which runs in the same group and must not take up purchased CPU time: 2 % of a
core."""
_SHARES_PER_CORE, _MIN_SHARES = 1024, 2
_WEIGHT_PER_CORE, _MIN_WEIGHT, _MAX_WEIGHT = 100, 1, 10_000
"""Shares (v1) and weight (v2) per core, and the kernel's limits for them. 1024 and 100 are the kernel's defaults for a
whole group. A node gets that much for each of its cores. With the kernel's default for the whole node, a node of two
cores would get no more CPU time on a busy machine than a node of one."""
_SOCKET_MEMORY_DIVISOR = 16
"""v1 does not count sockets' memory towards the memory limit, so sockets need a limit of their own: a sixteenth of the
node's memory. By default the kernel gives all TCP sockets of a machine about a sixteenth of its memory. v2 needs no
such limit, since `memory.max` includes sockets."""
_NEAR_LIMIT = 0.9
"""A v1 group counts as having reached its memory limit if it ever used this share of it. The kernel may refuse a large
allocation, such as a huge page, before the limit is reached."""
_REMOVE_SECONDS = 2.0
"""How long to wait for the killed processes of a group to end; they do within milliseconds."""
_REMOVE_RETRY_SECONDS = 0.01
"""Interval between attempts to remove a group, whose processes end within milliseconds."""


class Group:
    """One node's group. `folders` has the folder of each controller; with v2 (`unified`), all have the same."""

    def __init__(self, folders: dict[str, Path], *, unified: bool) -> None:
        self._folders = folders
        self._unified = unified

    @property
    def folders(self) -> list[Path]:
        """The group's folders, each once."""
        return sorted(set(self._folders.values()))

    def join(self) -> None:
        """Move this process into the group. Raises OSError."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text("0")  # 0 stands for the process that writes it

    def oom_kills(self) -> int:
        """Return how often the kernel's OOM killer killed a process of the group."""
        return _read_count(
            self._folders["memory"] / ("memory.events" if self._unified else "memory.oom_control"), "oom_kill"
        )

    def has_reached_memory_limit(self) -> bool:
        """Return whether the group ever reached its memory limit.

        If not, an OOM kill in it means that the machine's memory was full.
        """
        folder = self._folders["memory"]
        if self._unified:
            return _read_count(folder / "memory.events", "max") > 0
        # v1's own counter, `memory.failcnt`, stays 0 where memory and swap have the same limit.
        try:
            peak_bytes = int((folder / "memory.max_usage_in_bytes").read_text())
            limit_bytes = int((folder / "memory.limit_in_bytes").read_text())
        except (OSError, ValueError):
            return True  # a node's own limit is the usual reason for an OOM kill
        return peak_bytes >= _NEAR_LIMIT * limit_bytes

    def process_refusals(self) -> int:
        """Return how often the kernel refused a new process or thread because of the group's limit."""
        return _read_count(self._folders["pids"] / "pids.events", "max")

    def cpu_seconds(self) -> float | None:
        """Return the CPU seconds of all processes that were ever in the group; None where nothing counts them."""
        folder = self._folders.get("cpu" if self._unified else _CPU_TIME_CONTROLLER)
        if folder is None:
            return None
        try:
            if self._unified:
                return _read_count(folder / "cpu.stat", "usage_usec") / 1e6
            return int((folder / "cpuacct.usage").read_text()) / 1e9
        except (OSError, ValueError):
            return None

    def count_tasks(self) -> int:
        """Return the number of processes and threads in the group."""
        try:
            return int((self._folders["pids"] / "pids.current").read_text())
        except (OSError, ValueError):
            return 0

    def set_limits(self, *, memory_bytes: int, processes: int, cpus: float) -> None:
        """Set the group's limits; `processes` includes threads. Raises OSError where the kernel refuses one."""
        memory, pids, cpu = self._folders.get("memory"), self._folders.get("pids"), self._folders.get("cpu")
        quota = max(_MIN_QUOTA_US, int(cpus * _PERIOD_US)) + _LAUNCHER_QUOTA_US
        if memory is None or pids is None:
            raise OSError("controllers are missing")
        (pids / "pids.max").write_text(str(processes))
        if self._unified:
            (memory / "memory.max").write_text(str(memory_bytes))
            _write_if_present(memory / "memory.swap.max", "0")  # absent in a kernel without swap accounting
            if cpu is not None:
                (cpu / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
                weight = min(_MAX_WEIGHT, max(_MIN_WEIGHT, int(cpus * _WEIGHT_PER_CORE)))
                _write_if_present(cpu / "cpu.weight", str(weight))
        else:
            (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
            # Limits memory and swap together, so that swap adds nothing. Absent in a kernel without swap accounting.
            _write_if_present(memory / "memory.memsw.limit_in_bytes", str(memory_bytes))
            # v1 counts the memory of sockets apart, and does not limit it by default.
            _write_if_present(memory / "memory.kmem.tcp.limit_in_bytes", str(memory_bytes // _SOCKET_MEMORY_DIVISOR))
            if cpu is not None:
                _write_if_present(cpu / "cpu.cfs_quota_us", str(quota))
                _write_if_present(cpu / "cpu.shares", str(max(_MIN_SHARES, int(cpus * _SHARES_PER_CORE))))


def create(
    name: str,
    *,
    memory_bytes: int,
    processes: int,
    cpus: float,
    proc: Path = PROC,
    record_folders: Callable[[list[Path]], object] = lambda _folders: None,
) -> Group | None:
    """Create a group with these limits; return None where the kernel refuses, without leaving anything behind.

    `record_folders` is called with the folders before they are created, so that a clean-up after a crash knows them.
    """
    parents, unified = find_parents(proc)
    folders = {controller: parent / name for controller, parent in parents.items()}
    group = Group(folders, unified=unified)
    record_folders(group.folders)
    if not all(controller in folders for controller in REQUIRED_CONTROLLERS):
        return None
    try:
        for folder in group.folders:
            folder.mkdir()
        group.set_limits(memory_bytes=memory_bytes, processes=processes, cpus=cpus)
    except OSError:
        # Callers choose unique names, so no folder of another group is removed.
        remove(group.folders)
        return None
    return group


class Parents(NamedTuple):
    """The folders in which this process may create groups, by controller. `unified`: they belong to v2."""

    folders: dict[str, Path]
    unified: bool


def find_parents(proc: Path = PROC) -> Parents:
    """Return the folders in which this process may create groups; none if it may not.

    `proc` is /proc; tests pass another folder. v1 is tried first: where both versions are mounted, the controllers
    belong to v1.
    """
    groups = _memberships(proc)
    unified_folder: Path | None = None
    parents: dict[str, Path] = {}
    for line in _lines(proc / "self" / "mountinfo"):
        if " - cgroup" not in line:
            continue
        # "<id> <parent> <device> <root> <mount point> <options> ... - <type> <source> <type's options>", proc(5).
        mount_fields, _, type_fields = line.partition(" - ")
        fields = mount_fields.split()
        # Padded with empty strings, since a line may lack the last fields.
        kind, _source, options, *_rest = [*type_fields.split(), "", "", ""]
        root, mount = fields[3], Path(fields[4])
        if kind == "cgroup2" and "" in groups:
            unified_folder = _folder_of(mount, root, groups[""])
        elif kind == "cgroup":
            for controller in set(options.split(",")) & {*CONTROLLERS, _CPU_TIME_CONTROLLER} & set(groups):
                parents[controller] = _folder_of(mount, root, groups[controller])
    writable = {controller: parent for controller, parent in parents.items() if os.access(parent, os.W_OK)}
    if writable.keys() >= set(REQUIRED_CONTROLLERS):
        return Parents(writable, unified=False)
    if unified_folder is not None and _enable_controllers(unified_folder):
        return Parents(dict.fromkeys(CONTROLLERS, unified_folder), unified=True)
    return Parents({}, unified=False)


def unavailable_reason(proc: Path = PROC) -> str:
    """Return why nodes get no control groups here, as an English sentence; "" if they get them."""
    if find_parents(proc).folders:
        return ""
    return (
        "This user may not create control groups: run the console as root, or as a systemd service with 'Delegate=yes'."
    )


def no_cpu_limit_reason(proc: Path = PROC) -> str:
    """Return why CPU time is not limited although memory and processes are, as an English sentence.

    "" where CPU time is limited, or where nodes get no control groups at all.
    """
    parents = find_parents(proc).folders
    if not parents or "cpu" in parents:
        return ""
    return "The cgroup controller 'cpu' is not mounted, or this user may not create groups in it."


def kill(folders: Iterable[Path]) -> None:
    """Kill every process in these groups."""
    for folder in folders:
        with contextlib.suppress(OSError):
            (folder / "cgroup.kill").write_text("1")  # kills all at once; only v2 has it, from Linux 5.14 on
            continue
        for line in _lines(folder / "cgroup.procs"):
            with contextlib.suppress(OSError, ValueError):  # the process has ended meanwhile
                os.kill(int(line), signal.SIGKILL)


def processes(folders: Iterable[Path]) -> list[int]:
    """Return the pids in these groups, each once: with v1 a process is in several folders."""
    return sorted({int(line) for folder in folders for line in _lines(folder / "cgroup.procs")})


def remove(folders: Iterable[Path]) -> bool:
    """Kill the processes that are left in these groups and remove the groups; return whether all groups are gone."""
    remaining = list(folders)
    give_up_at = time.monotonic() + _REMOVE_SECONDS
    while remaining := [folder for folder in remaining if not _remove_folder(folder)]:
        if time.monotonic() > give_up_at:
            break
        kill(remaining)
        time.sleep(_REMOVE_RETRY_SECONDS)  # v1 sends no event when a group becomes empty
    return not remaining


def _remove_folder(folder: Path) -> bool:
    """Remove a group that has no processes; return whether it is gone."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _enable_controllers(folder: Path) -> bool:
    """Enable the controllers for new groups in this v2 folder if necessary; return whether they are enabled.

    A v2 group that has processes of its own cannot enable controllers for its children. So where the kernel refuses,
    these processes are moved to a child group first.
    """
    try:
        available = set((folder / "cgroup.controllers").read_text().split())
        # With v2 a group needs all controllers: only v1 may lack `cpu`. Without write access no group can be created.
        if not set(CONTROLLERS) <= available or not os.access(folder, os.W_OK):
            return False
        control = folder / "cgroup.subtree_control"
        if set(CONTROLLERS) <= set(control.read_text().split()):
            return True
        enabling = " ".join(f"+{name}" for name in CONTROLLERS)
        try:
            control.write_text(enabling)
        except OSError:
            child = folder / _PROCESSES_GROUP
            child.mkdir(exist_ok=True)
            for pid in _lines(folder / "cgroup.procs"):
                with contextlib.suppress(ProcessLookupError):  # the process has ended
                    (child / "cgroup.procs").write_text(pid)
            control.write_text(enabling)
    except OSError:
        return False
    return True


def _memberships(proc: Path) -> dict[str, str]:
    """Return the path of this process's group by controller; the key "" stands for v2.

    A process in `_PROCESSES_GROUP` counts as a member of the group above it.
    """
    groups = {}
    # "<hierarchy>:<controllers>:<path>", cgroups(7).
    for line in _lines(proc / "self" / "cgroup"):
        _number, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path.removesuffix(f"/{_PROCESSES_GROUP}") or "/"
    return groups


def _folder_of(mount: Path, root: str, path: str) -> Path:
    """Return the folder of the group `path`. The file system at `mount` shows only groups at or below `root`.

    A `path` that is not below `root` is taken as relative to `mount`.
    """
    return mount / os.path.relpath(path, root) if path.startswith(root) else mount / path.lstrip("/")


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_count(path: Path, name: str) -> int:
    """Return the value of a line `name value`; 0 if the file has no such line."""
    for line in _lines(path):
        counter, _, value = line.partition(" ")
        if counter == name:
            return int(value)
    return 0


def _write_if_present(path: Path, value: str) -> None:
    if path.exists():
        path.write_text(value)
