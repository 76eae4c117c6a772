"""Measure the resource usage of one node, from /proc, the node's cgroup if it is visible, and NVML.

/proc shows the launcher's pid namespace. Reading it is cheap and never waits. Processes that end meanwhile are left
out, and unavailable values are null. Another thread reads the GPUs, because their driver may hang.

One sample is one JSON object:

    at            Unix seconds; rates and sums cover `seconds`, the time since the previous sample
    seconds
    cpu           cores in use by all processes of the node
    memory        bytes in use: the cgroup's value without file caches. Without a cgroup, the sum of: the private memory
                  of all processes, the largest shared part, files in /tmp and /dev/shm if those are in memory
    processes     their number
    disk_read     bytes per second from and to disks, without the page cache
    disk_write
    net_rx        bytes per second; null if the node shares its network with others. Loopback counts only if there
    net_tx        is no other interface
    gpus          a list with one object per GPU: gpu (0, 1, ...), utilization and memory_utilization (per cent), memory
                  and memory_total (bytes), power (watts), temperature (Celsius); null if the driver does not report it
    ranks         a list with one object per rank: rank, cpu (cores) and memory (bytes) of its processes, steps (the
                  number of optimizer steps with a known duration), step_seconds (the sum of these durations),
                  comm_seconds (how much of that sum the rank waited for others; null if not known). `step_timer`
                  says which calls count

The console (`jobs.resource_usage`) calls a rank slow if its (step_seconds - comm_seconds) / steps, from sums over the
last minute, is more than 1.3 times the median of all ranks. As the share of communication it shows comm_seconds /
step_seconds, from sums over the attempt.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .. import cgroup_events
from ..step_timer import Counts
from .gpus import Gpu, Gpus

PROC = "/proc"
"""The default of all parameters `proc`, which replace the kernel's folder in tests."""
_MEMORY_FOLDERS = ("/tmp", "/dev/shm")  # noqa: S108 - the sandbox's own
_MEMORY_FILE_SYSTEMS = (b"tmpfs", b"ramfs")  # file systems that use memory
_TICKS_PER_SECOND = float(os.sysconf("SC_CLK_TCK"))  # the unit of CPU time in /proc
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_READ_BYTES = 1 << 16
"""Maximum number of bytes that are read from a file of /proc; these files are usually shorter."""
_NO_COUNTS = Counts(0, 0, 0.0, None)


class Process(NamedTuple):
    """One process. CPU seconds and bytes are sums since its start, and include children that it has reaped.

    `state` is the letter of /proc/<pid>/stat. `start` is its start time in ticks, which distinguishes processes of the
    same pid. `runnable_seconds` is how long its first thread has run or waited for a core. Bytes are those read from
    disks and written to them.
    """

    pid: int
    parent: int
    state: str
    start: int
    cpu_seconds: float
    runnable_seconds: float
    read_bytes: int
    written_bytes: int


def read_processes(proc: str = PROC) -> Dict[int, Process]:
    """Read every process of this pid namespace except this one."""
    processes: Dict[int, Process] = {}
    own_pid = os.getpid()
    for name in os.listdir(proc):
        if not name.isdigit() or int(name) == own_pid:
            continue
        process = read_process(int(name), proc)
        if process is not None:
            processes[process.pid] = process
    return processes


def read_process(pid: int, proc: str = PROC) -> Optional[Process]:
    """Read one process; None if it has ended."""
    folder = "{}/{}/".format(proc, pid)
    stat = read_file(folder + "stat")
    # Positions count from after the last bracket, since the name of a process may contain spaces and brackets. They are
    # 0 state, 1 parent, 11-14 CPU time (user and system, then the same of reaped children), 19 start time.
    _, bracket, fields_text = stat.rpartition(b")")
    fields = fields_text.split()
    if not bracket or len(fields) < 20:
        return None
    cpu_seconds = sum(map(int, fields[11:15])) / _TICKS_PER_SECOND
    schedule = read_file(folder + "schedstat").split()
    # Nanoseconds of running and of waiting for a core. Some kernels do not count them.
    runnable_seconds = (int(schedule[0]) + int(schedule[1])) / 1e9 if len(schedule) > 1 else cpu_seconds
    disk_bytes = _parse_disk_bytes(read_file(folder + "io"))
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[19]), cpu_seconds, runnable_seconds, *disk_bytes)


def read_threads(pid: int, proc: str = PROC) -> Dict[int, float]:
    """Return the CPU seconds of each thread of a process; the first thread has the process's number."""
    folder = "{}/{}/task".format(proc, pid)
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    cpu_seconds_by_thread = {}
    for name in names:
        fields = read_file("{}/{}/stat".format(folder, name)).rpartition(b")")[2].split()
        if len(fields) > 12:  # 11 and 12: user and system time
            cpu_seconds_by_thread[int(name)] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    return cpu_seconds_by_thread


def _parse_disk_bytes(data: bytes) -> Tuple[int, int]:
    """Return bytes read and written, from the text of /proc/<pid>/io."""
    values = {}
    for line in data.splitlines():
        name, _, value = line.partition(b": ")
        values[name] = value
    return int(values.get(b"read_bytes", 0)), int(values.get(b"write_bytes", 0))


def group_by_rank(processes: Mapping[int, Process], ranks_by_pid: Mapping[int, int]) -> Dict[int, List[int]]:
    """Return the pids of each rank's processes: its first process and all descendants. Orphans belong to no rank.

    `ranks_by_pid` has each rank's `rank_id` by the pid of its first process. The result is by `rank_id`.
    """
    pids_by_rank: Dict[int, List[int]] = {rank_id: [] for rank_id in ranks_by_pid.values()}
    for pid in processes:
        # The processes were not all read at the same moment, so their parents could form a loop, which `depth` ends.
        ancestor, depth = pid, 0
        while ancestor not in ranks_by_pid and ancestor in processes and depth < len(processes):
            ancestor, depth = processes[ancestor].parent, depth + 1
        if ancestor in ranks_by_pid:
            pids_by_rank[ranks_by_pid[ancestor]].append(pid)
    return pids_by_rank


class NetworkBytes(NamedTuple):
    """Bytes that network interfaces have received and sent so far."""

    received: int
    sent: int


def parse_network_bytes(data: bytes) -> NetworkBytes:
    """Return the bytes of all interfaces, from the text of /proc/net/dev.

    Loopback counts only if there is no other interface.
    """
    loopback, others = NetworkBytes(0, 0), NetworkBytes(0, 0)
    has_others = False
    for line in data.splitlines()[2:]:  # without the two header lines
        name, _, counters = line.partition(b":")
        fields = counters.split()
        if len(fields) < 9:  # eight counters of received data, then those of sent data; bytes come first
            continue
        received, sent = int(fields[0]), int(fields[8])
        if name.strip() == b"lo":
            loopback = NetworkBytes(received, sent)
        else:
            has_others = True
            others = NetworkBytes(others.received + received, others.sent + sent)
    return others if has_others else loopback


class Reading(NamedTuple):
    """One reading of the node's processes and counters.

    `at` is monotonic. None: not available.
    """

    at: float
    processes: Dict[int, Process]
    network: Optional[NetworkBytes]
    cgroup_cpu_seconds: Optional[float]

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of all processes. The cgroup's value is preferred, since it includes ended processes."""
        if self.cgroup_cpu_seconds is not None:
            return self.cgroup_cpu_seconds
        return sum(process.cpu_seconds for process in self.processes.values())

    @property
    def read_bytes(self) -> int:
        """Bytes that all processes have read. The sum shrinks if a process ends and its parent does not reap it."""
        return sum(process.read_bytes for process in self.processes.values())

    @property
    def written_bytes(self) -> int:
        """Bytes that all processes have written. The sum can shrink like `read_bytes`."""
        return sum(process.written_bytes for process in self.processes.values())


class Sampler:
    """Turns readings into the samples of one node. `own_network`: see `topology.Plan`.

    `cgroup` replaces the kernel's folder of control groups in tests.
    """

    def __init__(
        self, *, own_network: bool, gpus: Optional[Gpus] = None, proc: str = PROC, cgroup: str = cgroup_events.ROOT
    ) -> None:
        self._own_network = own_network
        self._gpus = gpus
        self._proc = proc
        self._cgroup = cgroup
        self._last_reading: Optional[Reading] = None
        self._counts: Dict[int, Counts] = {}  # by rank_id, as of the last sample

    def read(self) -> Reading:
        """Take a reading."""
        network = parse_network_bytes(read_file(self._proc + "/net/dev")) if self._own_network else None
        return Reading(time.monotonic(), read_processes(self._proc), network, cgroup_events.cpu_seconds(self._cgroup))

    @property
    def gpus(self) -> List[Gpu]:
        """The node's GPUs at their last reading."""
        return self._gpus.readings if self._gpus is not None else []

    def sample(
        self, reading: Reading, ranks_by_pid: Mapping[int, int], counts: Mapping[int, Counts]
    ) -> Optional[Dict[str, Any]]:
        """Return the sample of the time between the reading of the last call and this one; None on the first call.

        `ranks_by_pid` has the live ranks; `counts` is by rank_id.
        """
        before, self._last_reading = self._last_reading, reading
        if before is None or reading.at <= before.at:
            return None
        # Ranks that are missing in `counts` keep their last counts. The run's last sample includes ended ranks again,
        # and must not report their earlier steps twice.
        last_counts, self._counts = self._counts, {**self._counts, **counts}
        seconds = reading.at - before.at
        pids_by_rank = group_by_rank(reading.processes, ranks_by_pid)
        pids_by_rank_before = group_by_rank(before.processes, ranks_by_pid)
        sample: Dict[str, Any] = {
            "at": round(time.time(), 3),
            "seconds": round(seconds, 3),
            "cpu": _rate(reading.cpu_seconds - before.cpu_seconds, seconds, 3),
            "memory": self._memory(list(reading.processes)),
            "processes": len(reading.processes),
            "disk_read": _rate(reading.read_bytes - before.read_bytes, seconds),
            "disk_write": _rate(reading.written_bytes - before.written_bytes, seconds),
            "net_rx": None,
            "net_tx": None,
            "gpus": [gpu._asdict() for gpu in self.gpus],
            "ranks": [],
        }
        if reading.network is not None and before.network is not None:
            sample["net_rx"] = _rate(reading.network.received - before.network.received, seconds)
            sample["net_tx"] = _rate(reading.network.sent - before.network.sent, seconds)
        for rank_id in sorted({*pids_by_rank, *counts}):
            pids = pids_by_rank.get(rank_id, [])
            cpu_seconds = sum(reading.processes[pid].cpu_seconds for pid in pids)
            for pid in pids_by_rank_before.get(rank_id, []):
                # If a process has ended, its parent waited for it, and now has its CPU time. If a process runs on but
                # has lost its parent, it belongs to no rank any more, so `cpu_seconds` lacks its time.
                if pid in pids or pid not in reading.processes:
                    cpu_seconds -= before.processes[pid].cpu_seconds
            sample["ranks"].append(
                {
                    "rank": rank_id,
                    "cpu": _rate(cpu_seconds, seconds, 3),
                    "memory": self._private_memory(pids),
                    **_step_fields(last_counts.get(rank_id, _NO_COUNTS), counts.get(rank_id, _NO_COUNTS)),
                }
            )
        return sample

    def _memory(self, pids: Sequence[int]) -> int:
        cgroup_bytes = cgroup_events.memory_bytes(self._cgroup)
        return self._private_memory(pids) + files_in_memory(self._proc) if cgroup_bytes is None else cgroup_bytes

    def _private_memory(self, pids: Sequence[int]) -> int:
        """Return the private memory of these processes plus the largest shared part."""
        private = shared = 0
        for pid in pids:
            fields = read_file("{}/{}/statm".format(self._proc, pid)).split()
            if len(fields) > 2:  # in pages, 1: the resident memory, 2: the shared part of it
                private += int(fields[1]) - int(fields[2])
                shared = max(shared, int(fields[2]))
        return (private + shared) * _PAGE_BYTES


def _step_fields(before: Counts, now: Counts) -> Dict[str, Any]:
    """Return a rank's counts since the last sample, in the fields of a sample."""
    # The counts of a restarted rank begin at 0. `calls` shows a restart even if no step has a duration yet.
    if now.calls < before.calls or now.steps < before.steps:
        before = _NO_COUNTS
    # A step counts in the sample in which it ends, so its duration may exceed the sample's. Seconds without a step are
    # invalid: the rank writes both together, but its code can change the file.
    seconds = max(0.0, now.seconds - before.seconds) if now.steps > before.steps else 0.0
    communication: Optional[float] = None
    if now.communication is not None:
        communication = round(max(0.0, min(now.communication - (before.communication or 0.0), seconds)), 6)
    return {"steps": now.steps - before.steps, "step_seconds": round(seconds, 6), "comm_seconds": communication}


def _rate(amount: float, seconds: float, digits: Optional[int] = None) -> float:
    return round(max(0.0, amount) / seconds, digits)  # sums shrink when processes end


def files_in_memory(proc: str = PROC, folders: Sequence[str] = _MEMORY_FOLDERS) -> int:
    """Return the bytes of the files in these folders. Folders on a disk do not count, such as /tmp in a pod."""
    mounts = [line.split()[:3] for line in read_file(proc + "/self/mounts").splitlines()]
    file_systems = {fields[1]: fields[2] for fields in mounts if len(fields) == 3}
    total_bytes = 0
    for folder in folders:
        if file_systems.get(os.fsencode(folder)) not in _MEMORY_FILE_SYSTEMS:
            continue
        try:
            status = os.statvfs(folder)
        except OSError:
            continue
        total_bytes += (status.f_blocks - status.f_bfree) * status.f_frsize
    return total_bytes


def read_file(path: str) -> bytes:
    """Return the contents of a small file of the kernel; empty if there is none.

    `os.open` takes half the time of `open`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _READ_BYTES)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
