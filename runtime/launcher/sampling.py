"""What one node uses: read from /proc of the launcher's own pid namespace, the node's cgroup where it is visible, NVML.

The one rule: reading costs next to nothing and never waits. A process that ends meanwhile is left out, a figure that
cannot be had is null, and the GPUs' driver, which may hang, is asked by a thread of its own.

One sample is one JSON object:

    at            Unix seconds; rates and sums are over `seconds`, the time since the sample before
    seconds
    cpu           cores in use, by every process of the node
    memory        bytes in use: the cgroup's figure, else private memory of all processes, the largest shared part, and
                  files in /tmp and /dev/shm
    processes     how many there are
    disk_read     bytes per second from and to disks (what the page cache answers is not counted)
    disk_write
    net_rx        bytes per second; null where the node shares its network with others. Without any other interface,
    net_tx        what goes over loopback
    gpus          a list, one object per GPU: gpu (0, 1, ...), utilization and memory_utilization (per cent), memory and
                  memory_total (bytes), power (watts), temperature (Celsius); null what a driver does not tell
    ranks         a list, one object per rank: rank, cpu (cores) and memory (bytes) of all its processes, steps and
                  step_seconds (optimizer steps with a known duration, and the sum of those), comm_seconds (how much of
                  that it waited for other ranks; null where it is not known). `steps` tells what is counted

A rank is slow where (step_seconds - comm_seconds) / steps is more than 1.3 times the median of all ranks; the share of
time spent communicating is comm_seconds / step_seconds. Both need sums over a minute or so.
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .gpus import Gpu, Gpus
from .steps import Counts

PROC = "/proc"
_CGROUP = "/sys/fs/cgroup"
_MEMORY_FOLDERS = ("/tmp", "/dev/shm")  # noqa: S108 - the sandbox's own
_TICKS = float(os.sysconf("SC_CLK_TCK"))
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LARGEST_READ = 1 << 16
_NOTHING = Counts(0, 0, 0.0, None)


class Process(NamedTuple):
    """One process. `cpu` in seconds and bytes from and to disk are sums since its start, its reaped children's too.

    `wanted` is for how long its first thread ran or waited for a core; `start` tells processes with one pid apart.
    """

    pid: int
    parent: int
    state: str
    start: int
    cpu: float
    wanted: float
    read: int
    written: int


def read_processes(proc: str = PROC) -> Dict[int, Process]:
    """Every process of this pid namespace but this one."""
    found: Dict[int, Process] = {}
    own = os.getpid()
    for name in os.listdir(proc):
        if not name.isdigit() or int(name) == own:
            continue
        process = read_process(int(name), proc)
        if process is not None:
            found[process.pid] = process
    return found


def read_process(pid: int, proc: str = PROC) -> Optional[Process]:
    """One process; None where it is gone."""
    folder = "{}/{}/".format(proc, pid)
    stat = read_file(folder + "stat")
    # The name of a process may hold spaces and brackets.
    _, bracket, rest = stat.rpartition(b")")
    fields = rest.split()
    if not bracket or len(fields) < 20:
        return None
    cpu = sum(map(int, fields[11:15])) / _TICKS
    read, written = _disk(read_file(folder + "io"))
    schedule = read_file(folder + "schedstat").split()
    wanted = (int(schedule[0]) + int(schedule[1])) / 1e9 if len(schedule) > 1 else cpu
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[19]), cpu, wanted, read, written)


def read_threads(pid: int, proc: str = PROC) -> Dict[int, float]:
    """Seconds of CPU that each thread of a process has used, the first one's under the process's own number."""
    folder = "{}/{}/task".format(proc, pid)
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    used = {}
    for name in names:
        fields = read_file("{}/{}/stat".format(folder, name)).rpartition(b")")[2].split()
        if len(fields) > 12:
            used[int(name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    return used


def _disk(data: bytes) -> Tuple[int, int]:
    read = written = 0
    for line in data.splitlines():
        name, _, value = line.partition(b": ")
        if name == b"read_bytes":
            read = int(value)
        elif name == b"write_bytes":
            written = int(value)
    return read, written


def belonging(processes: Mapping[int, Process], ranks: Mapping[int, int]) -> Dict[int, List[int]]:
    """Which processes are each rank's: {seat: pids}, from {pid: seat}. What lost its parent belongs to none."""
    owned: Dict[int, List[int]] = {seat: [] for seat in ranks.values()}
    for pid in processes:
        ancestor, steps = pid, 0
        while ancestor not in ranks and ancestor in processes and steps < len(processes):
            ancestor, steps = processes[ancestor].parent, steps + 1
        if ancestor in ranks:
            owned[ranks[ancestor]].append(pid)
    return owned


def network_bytes(data: bytes) -> Tuple[int, int]:
    """Received and sent, from the text of /proc/net/dev; loopback counts only where there is nothing else."""
    sums = {True: (0, 0), False: (0, 0)}
    seen = False
    for line in data.splitlines()[2:]:
        name, _, rest = line.partition(b":")
        fields = rest.split()
        if len(fields) < 9:
            continue
        loopback = name.strip() == b"lo"
        seen |= not loopback
        received, sent = sums[loopback]
        sums[loopback] = (received + int(fields[0]), sent + int(fields[8]))
    return sums[not seen]


class Reading(NamedTuple):
    """Everything at one moment (of a clock that never goes back)."""

    at: float
    processes: Dict[int, Process]
    network: Optional[Tuple[int, int]]
    cpu: Optional[float]

    @property
    def cpu_seconds(self) -> float:
        """What all processes have used; the cgroup also knows of those that are gone."""
        return sum(process.cpu for process in self.processes.values()) if self.cpu is None else self.cpu


class Sampler:
    """Makes one node's samples out of what it reads. `own_network`: see `Plan`."""

    def __init__(self, *, own_network: bool, gpus: Optional[Gpus] = None, proc: str = PROC) -> None:
        self._own_network = own_network
        self._gpus = gpus
        self._proc = proc
        self._before: Optional[Reading] = None
        self._counts: Dict[int, Counts] = {}

    def read(self) -> Reading:
        """Read once."""
        network = network_bytes(read_file(self._proc + "/net/dev")) if self._own_network else None
        return Reading(time.monotonic(), read_processes(self._proc), network, _cgroup_cpu())

    @property
    def gpus(self) -> List[Gpu]:
        """The node's GPUs as last seen."""
        return self._gpus.seen if self._gpus is not None else []

    def sample(
        self, reading: Reading, ranks: Mapping[int, int], counts: Mapping[int, Counts]
    ) -> Optional[Dict[str, Any]]:
        """The sample from the last reading that was given to this one; None for the first.

        `ranks` is {pid: seat} of the ranks that run, `counts` what each of them has counted.
        """
        before, self._before = self._before, reading
        if before is None or reading.at <= before.at:
            return None
        # What a rank that has ended had counted is kept: it may be asked once more, at the end.
        counted, self._counts = self._counts, {**self._counts, **counts}
        seconds = reading.at - before.at
        owned = belonging(reading.processes, ranks)
        sample: Dict[str, Any] = {
            "at": round(time.time(), 3),
            "seconds": round(seconds, 3),
            "cpu": _rate(reading.cpu_seconds - before.cpu_seconds, seconds, 3),
            "memory": self._memory(list(reading.processes)),
            "processes": len(reading.processes),
            "disk_read": _rate(_growth(before, reading, _read_bytes), seconds),
            "disk_write": _rate(_growth(before, reading, _written_bytes), seconds),
            "net_rx": None,
            "net_tx": None,
            "gpus": [gpu._asdict() for gpu in self.gpus],
            "ranks": [],
        }
        if reading.network is not None and before.network is not None:
            sample["net_rx"] = _rate(reading.network[0] - before.network[0], seconds)
            sample["net_tx"] = _rate(reading.network[1] - before.network[1], seconds)
        for seat in sorted({*owned, *counts}):
            pids = owned.get(seat, [])
            used = sum(reading.processes[pid].cpu for pid in pids)
            used -= sum(before.processes[pid].cpu for pid in pids if pid in before.processes)
            sample["ranks"].append(
                {
                    "rank": seat,
                    "cpu": _rate(used, seconds, 3),
                    "memory": self._private_memory(pids),
                    **_steps(counted.get(seat, _NOTHING), counts.get(seat, _NOTHING)),
                }
            )
        return sample

    def _memory(self, pids: Sequence[int]) -> int:
        told = _number(read_file(_CGROUP + "/memory.current"))
        if told is not None:
            return told
        files = 0
        for folder in _MEMORY_FOLDERS:
            try:
                state = os.statvfs(folder)
            except OSError:
                continue
            files += (state.f_blocks - state.f_bfree) * state.f_frsize
        return self._private_memory(pids) + files

    def _private_memory(self, pids: Sequence[int]) -> int:
        """What processes have for themselves, and once the largest part that one of them shares."""
        private = shared = 0
        for pid in pids:
            fields = read_file("{}/{}/statm".format(self._proc, pid)).split()
            if len(fields) > 2:
                private += int(fields[1]) - int(fields[2])
                shared = max(shared, int(fields[2]))
        return (private + shared) * _PAGE


def _steps(before: Counts, now: Counts) -> Dict[str, Any]:
    """What a rank has counted since; one that was started again began from nothing."""
    if now.calls < before.calls or now.steps < before.steps:
        before = _NOTHING
    # A step belongs to the sample in which it ends, so that a long one is longer than its sample.
    seconds = max(0.0, now.seconds - before.seconds) if now.steps > before.steps else 0.0
    told = None if now.communication is None else now.communication - (before.communication or 0.0)
    communication = None if told is None else round(max(0.0, min(told, seconds)), 6)
    return {"steps": now.steps - before.steps, "step_seconds": round(seconds, 6), "comm_seconds": communication}


def _read_bytes(process: Process) -> int:
    return process.read


def _written_bytes(process: Process) -> int:
    return process.written


def _growth(before: Reading, after: Reading, what: Callable[[Process], int]) -> int:
    """The growth of a sum that ends with a process, where its parent does not inherit it."""
    return sum(map(what, after.processes.values())) - sum(map(what, before.processes.values()))


def _rate(amount: float, seconds: float, digits: Optional[int] = None) -> float:
    return round(max(0.0, amount) / seconds, digits)


def _cgroup_cpu() -> Optional[float]:
    """What the node's cgroup has used, where there is one to see: the root of the hierarchy has no limit file."""
    if not os.path.exists(_CGROUP + "/cpu.max"):
        return None
    for line in read_file(_CGROUP + "/cpu.stat").splitlines():
        name, _, value = line.partition(b" ")
        if name == b"usage_usec":
            return int(value) / 1e6
    return None


def _number(data: bytes) -> Optional[int]:
    return int(data) if data.strip().isdigit() else None


def read_file(path: str) -> bytes:
    """A small file of the kernel's; empty where it is not to be had. By descriptor, which is half the price."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _LARGEST_READ)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
