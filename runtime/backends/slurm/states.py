"""Parse the output of Slurm's commands about jobs and machines. Pure: text in, plain data out.

`squeue` prints jobs in the format `JOB_FORMAT`. Its JSON output is not used, since not every build of Slurm has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

JOB_FORMAT = "%i|%T|%S|%e|%N|%r"
"""squeue's format for the fields of a SlurmJob. Times are Unix seconds if SLURM_TIME_FORMAT is `%s`."""
ACCOUNTING_FIELDS = "JobIDRaw,State,Start,End,NodeList,Reason"
"""The fields of a SlurmJob, as sacct names them."""
ACTIVE_STATES = frozenset(
    {
        *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"),
        *("COMPLETING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
    }
)
"""States of a job that has or may still get processes."""
WAITING_STATES = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
"""States of a job without machines."""
_FAILED_STATES = frozenset({"DOWN", "FAIL", "FAILING", "UNKNOWN"})
"""States and flags of a machine that does not work."""
_SILENT_STATES = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP"})
"""Flags of a machine that cannot answer Slurm now, which is no fault: Slurm powers idle machines down to save power."""
_CLOSED_STATES = frozenset(
    {
        *("DRAIN", "DRAINED", "DRAINING", "MAINT", "MAINTENANCE", "FUTURE"),
        *("REBOOT", "REBOOT_REQUESTED", "REBOOT_ISSUED", "POWER_DOWN", "POWERING_DOWN"),
    }
)
"""States and flags of a machine that takes no new jobs. POWERED_DOWN is not among them: Slurm allocates jobs to such a
machine and powers it up for them. POWER_DOWN is a request, which Slurm carries out once the machine has no jobs."""
_STATE_WORD = re.compile(r"[A-Z_]+")
_FIELD = re.compile(r"(?:^|\s)(\w+)=(\S*)")
"""`name=value`"""
_GPU_COUNT = re.compile(r"^gres/gpu(?::([^=]+))?=(\d+)$")
"""`gres/gpu=<count>` or `gres/gpu:<type>=<count>`"""


@dataclass(frozen=True)
class SlurmJob:
    """A job. Times are Unix seconds; 0: not known. `machines` is a list in Slurm's notation, such as `n[1-4]`.

    `reason` is why a waiting job waits, in Slurm's words.
    """

    job_id: str
    state: str
    started_at: float = 0.0
    ended_at: float = 0.0
    machines: str = ""
    reason: str = ""

    @property
    def is_active(self) -> bool:
        """Whether the job has or may still get processes."""
        return self.state in ACTIVE_STATES

    @property
    def is_waiting(self) -> bool:
        """Whether the job has no machines."""
        return self.state in WAITING_STATES


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster, which Slurm calls a node. `gpus` and `free_gpus` are numbers of GPUs by Gres type.

    `state` is a state and flags in Slurm's words, such as `IDLE+CLOUD+POWERED_DOWN`.
    """

    name: str
    state: str
    cpus: int
    free_cpus: int
    memory_mib: int
    free_memory_mib: int
    partitions: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    gpus: Mapping[str, int] = field(default_factory=dict)
    free_gpus: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether Slurm reports the machine as failed, or gets no answer from it."""
        words = self._state_words
        # Slurm before 21.08 appends "*" to the state of a machine that does not answer.
        is_silent = "*" in self.state or "NOT_RESPONDING" in words
        return bool(words & _FAILED_STATES) or (is_silent and not words & _SILENT_STATES)

    @property
    def is_open(self) -> bool:
        """Whether the machine takes new jobs."""
        return not self.has_failed and not self._state_words & _CLOSED_STATES

    @property
    def _state_words(self) -> frozenset[str]:
        """The state and its flags, without the symbols that Slurm may append to a word."""
        return frozenset(_STATE_WORD.findall(self.state))


def parse_jobs(text: str) -> dict[str, SlurmJob]:
    """Return the jobs by their id, from lines of JOB_FORMAT or of sacct's ACCOUNTING_FIELDS.

    Ids that are not only digits, such as those of job arrays, are left out: the console submits no such jobs.
    """
    jobs = {}
    for line in text.splitlines():
        # The reason comes last, since it is the only field that may contain the separator.
        parts = line.split("|", 5)
        if len(parts) == 6 and parts[0].isdigit():
            job_id, state, started_at, ended_at, machines, reason = (part.strip() for part in parts)
            # sacct adds the user who cancelled a job, as in "CANCELLED by 1000", and "+" to a state that it cut short.
            state = state.split(" ")[0].rstrip("+")
            jobs[job_id] = SlurmJob(job_id, state, _unix_time(started_at), _unix_time(ended_at), machines, reason)
    return jobs


def parse_machines(text: str) -> tuple[Machine, ...]:
    """Return the machines, from the output of `scontrol show node --oneliner`."""
    machines = []
    for line in text.splitlines():
        values = _fields(line)
        if values.get("NodeName"):
            machines.append(_machine(values))
    return tuple(machines)


def has_preemption_time(text: str) -> bool:
    """Return whether the output of `scontrol show job` has a time at which Slurm began to preempt the job."""
    return _fields(text).get("PreemptTime", "None") not in {"None", "N/A", "Unknown", ""}


def _fields(text: str) -> dict[str, str]:
    """Return the first value of each name. A second one may be part of a comment or reason."""
    values: dict[str, str] = {}
    for name, value in _FIELD.findall(text):
        values.setdefault(name, value)
    return values


def _machine(values: Mapping[str, str]) -> Machine:
    """Convert the fields that scontrol prints for one machine."""
    # CPUEfctv leaves out the cores that are reserved for the system; Slurm before 22.05 does not print it.
    cpus = _count(values.get("CPUEfctv") or values.get("CPUTot", ""))
    memory_mib = max(0, _count(values.get("RealMemory", "")) - _count(values.get("MemSpecLimit", "")))
    gpus, used_gpus = _gpus(values.get("CfgTRES", "")), _gpus(values.get("AllocTRES", ""))
    return Machine(
        name=values["NodeName"],
        state=values.get("State", "UNKNOWN"),
        cpus=cpus,
        free_cpus=max(0, cpus - _count(values.get("CPUAlloc", ""))),
        memory_mib=memory_mib,
        free_memory_mib=max(0, memory_mib - _count(values.get("AllocMem", ""))),
        partitions=_names(values.get("Partitions", "")),
        features=_names(values.get("ActiveFeatures", "")),
        gpus=gpus,
        free_gpus={gpu_type: max(0, count - used_gpus.get(gpu_type, 0)) for gpu_type, count in gpus.items()},
    )


def _gpus(tres: str) -> dict[str, int]:
    """Return the number of GPUs by type, from a list such as `cpu=64,gres/gpu=4,gres/gpu:a100=4`.

    GPUs without a type have the key "".
    """
    counts = {match[1] or "": int(match[2]) for match in map(_GPU_COUNT.match, tres.split(",")) if match is not None}
    if len(counts) > 1:
        counts.pop("", None)  # the entry without a type is the sum of the others
    return counts


def _names(text: str) -> frozenset[str]:
    return frozenset(name for name in text.split(",") if name and name != "(null)")


def _count(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _unix_time(text: str) -> float:
    """Convert Unix seconds to a number; 0 for any other text, such as "Unknown"."""
    return float(text) if text.isdigit() else 0.0
