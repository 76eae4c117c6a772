"""The ranks of one node: started together, watched, and ended together.

A rank's end is reported once, and only after all of its own reports. `Rank.rank_id` identifies a rank during the whole
run: it is the global rank at submission, by which outputs and logs are named. A later round may assign another RANK.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from selectors import EVENT_READ, BaseSelector
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional

from .echoes import is_echo
from .extract import extract_file
from .frameworks import rank_environment
from .processes import Exit, send_signal, spawn
from .step_timer import open_counts
from .topology import LaunchPlan, Plan, rank_arguments
from .warm.client import WarmRanks

TERMINATE_SECONDS = 3.0
"""How long ranks get between SIGTERM and SIGKILL when the run or a round fails: enough to print a traceback. The grace
period of the order is for runs that are stopped."""
EXIT_SECONDS = 30.0
"""How long a rank may take to end after its script has failed. It usually takes seconds, but some ranks wait for a
worker thread or process that never ends."""
HEAD_START_SECONDS = 0.05
"""How much later than rank 0 the other PyTorch ranks start. Rank 0 serves the store that they connect to. A rank that
connects too early is refused, and retries only after about half a second."""
_READ_BYTES = 1 << 16
"""The default size of a pipe, so one read returns everything that an ended rank has reported."""
_FAILURE_FIELDS = 5
"""How many fields of a rank's report describe the exception itself. The fields of its chain of causes follow: see
`rank.py`, which sends the report."""


class ScriptFailure(NamedTuple):
    """The reason why a rank's script ended, as the rank reported it.

    `exception` is the name of the exception's type ("": unknown, or a SystemExit), followed by its text and its place.
    `exit_code` is what the process will end with, unless a signal or a handler of the script changes it. `echo`: the
    exception only follows from the end of another rank (`echoes`).
    """

    exception: str = ""
    message: str = ""
    file: str = ""
    line: str = ""
    function: str = ""
    exit_code: int = 1
    echo: bool = False


class Rank:
    """One rank's process, from its start to its end.

    `report_fd` is the descriptor of the pipe that it reports through (-1: closed). `on_report_data`, if set, is called
    with `rank_id` and all data from this pipe. `counts_fd` is the descriptor of its step counts (-1: none), see
    `step_timer`.
    """

    def __init__(self, rank_id: int, pid: int, report_fd: int, counts_fd: int = -1) -> None:
        self.rank_id = rank_id
        self.pid = pid
        self.report_fd = report_fd
        self.counts_fd = counts_fd
        self.on_report_data: Optional[Callable[[int, bytes], None]] = None
        self.exit: Optional[Exit] = None  # how the process ended; None while it runs
        self.script_returned = False  # the script has returned from its last line
        self.script_failed_at: Optional[float] = None  # by the rank's report, in Unix seconds
        self.failure_reported_at: Optional[float] = None  # when that report arrived (monotonic)
        self.script_failure = ScriptFailure()
        self.was_killed_late = False  # this launcher killed the rank EXIT_SECONDS after its script failed
        self._partial_line = b""

    def read(self) -> bool:
        """Read the rank's reports; False once the pipe is closed."""
        try:
            data = os.read(self.report_fd, _READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        if self.on_report_data is not None:
            self.on_report_data(self.rank_id, data)
        *lines, partial_line = (self._partial_line + data).split(b"\n")
        self._partial_line = partial_line[-_READ_BYTES:]  # limited, since code may write without a newline
        for line in lines:
            report, *fields = line.split(b"\t")
            kind, _, time_text = report.partition(b" ")
            if kind == b"finished":
                self.script_returned = True
            elif kind == b"raised" and self.script_failed_at is None:
                self.script_failed_at = _parse_time(time_text)
                self.failure_reported_at = time.monotonic()
                self.script_failure = _parse_failure([_make_printable(field) for field in fields])
        return True

    @property
    def is_failing(self) -> bool:
        """Whether its script has failed although its process still runs."""
        return self.exit is None and self.script_failed_at is not None

    @property
    def aborted_late(self) -> bool:
        """Whether the process aborted (SIGABRT) after its script had returned from the last line.

        Such a rank has succeeded: gloo may abort while the interpreter shuts down.
        """
        return self.exit is not None and self.exit.signal == "SIGABRT" and self.script_returned

    @property
    def succeeded(self) -> bool:
        """Whether the rank has ended successfully."""
        return self.exit is not None and (self.exit.exit_code == 0 or self.aborted_late)

    @property
    def failed_at(self) -> float:
        """When the rank failed (Unix seconds): when its script failed, or else now, since it was just reaped."""
        return time.time() if self.script_failed_at is None else self.script_failed_at

    @property
    def failed_by_signal(self) -> str:
        """The signal that ended the rank; "" if its script had raised an exception before."""
        return "" if self.exit is None or self.script_failure.exception else self.exit.signal


def _parse_time(text: bytes) -> float:
    """Parse the time at which a rank failed, in Unix seconds; return now if it is invalid.

    The customer's code can report any time, so only a time within the last minute is accepted.
    """
    now = time.time()
    try:
        reported_at = float(text)
    except ValueError:
        return now
    return reported_at if now - 60 < reported_at < now else now


def _parse_failure(fields: List[str]) -> ScriptFailure:
    """Parse the fields of the report `raised` (see `rank`); if some are missing, the failure is unknown."""
    if len(fields) < _FAILURE_FIELDS:
        return ScriptFailure()
    exception, message, file, line, function, *chain = fields
    # In `chain`, the type and the text of each exception alternate.
    echo = is_echo(list(zip(chain[::2], chain[1::2])))  # noqa: B905 - Python 3.8 has no `strict`
    if exception == "SystemExit":
        # The rank sends a number up to 255. Customer code could send any text, and `int` refuses some digits.
        is_number = message.isascii() and message.isdecimal() and len(message) <= 3
        return ScriptFailure(exit_code=int(message) & 255 if is_number else 1, echo=echo)
    return ScriptFailure(exception, message, file, line, function, exit_code=1, echo=echo)


def _make_printable(data: bytes) -> str:
    """Decode text and replace control characters, so that it can be stored and shown anywhere."""
    text = data.decode("utf-8", "replace")
    return "".join(character if character.isprintable() else " " for character in text).strip()


class WorkerGroup:
    """The ranks of this node.

    `launch_plan` is the whole launch plan, and `plan` its part of the same name: what the run executes, and where, as
    of its submission. Each round passes its own `Plan` to `start`.
    """

    def __init__(self, selector: BaseSelector, plan: Plan, launch_plan: LaunchPlan, warm_ranks: WarmRanks) -> None:
        self._selector = selector
        self._rank_ids = [plan.rank(local_rank) for local_rank in range(plan.workers)]
        self._outputs: List[int] = launch_plan["outputs"]
        self._python: str = launch_plan["python"]
        self._platform_environment: Dict[str, str] = launch_plan["environment"]
        self._order_variables: Dict[str, str] = launch_plan.get("variables", {})
        self._order_secrets: Dict[str, str] = launch_plan.get("secrets", {})
        self._local_rank_flag = launch_plan["local_rank_flag"]
        self._folder: str = launch_plan["folder"]
        self._warm_ranks = warm_ranks
        self._import_folders: List[str] = launch_plan.get("import_folders", [])
        self._may_restart = plan.elastic
        self._owns_pid_namespace = bool(launch_plan.get("owns_pid_namespace"))
        self._ranks_by_pid: Dict[int, Rank] = {}
        self._kill_at: Optional[float] = None  # when `handle_timers` kills the remaining ranks (monotonic)
        self.first_environment: Optional[Dict[str, str]] = None
        """The environment of the node's first rank, which shells get too; None before its start."""

    def start(self, plan: Plan, announcement: str = "") -> None:
        """Start every rank of this node.

        `announcement`, if any, is written to each rank's output first, with its `{rank}` and `{size}` filled in.
        """
        self.clear()
        for local_rank in range(plan.workers):
            if announcement:
                text = announcement.format(rank=plan.rank(local_rank), size=plan.world_size)
                with contextlib.suppress(OSError):  # the round does not depend on the announcement
                    os.write(self._outputs[local_rank], "[trainyard] {}\n".format(text).encode())
            self.start_rank(plan, local_rank)
        self.finish_starting()

    def clear(self) -> None:
        """Drop the ranks of the previous round, which have all ended."""
        for rank in self._ranks_by_pid.values():
            if rank.counts_fd >= 0:
                os.close(rank.counts_fd)
        self._ranks_by_pid.clear()
        self._kill_at = None

    def finish_starting(self) -> None:
        """Close the descriptors that are only needed to start ranks.

        The outputs stay open if later rounds may start ranks again.
        """
        self._warm_ranks.close()  # forked ranks serve only the first start; later rounds start cold
        if not self._may_restart:
            for output in self._outputs:
                os.close(output)

    def start_rank(self, plan: Plan, local_rank: int, extra_environment: Optional[Mapping[str, str]] = None) -> Rank:
        """Start one rank: warm if a forked rank is ready, else cold. Raises OSError.

        `extra_environment` has variables in addition to those of the contract.
        """
        report_fd, rank_report_fd = os.pipe()
        os.set_blocking(report_fd, False)
        counts_fd = open_counts()
        try:
            pid = self._start_process(plan, local_rank, rank_report_fd, counts_fd, extra_environment or {})
        except OSError:
            os.close(report_fd)
            if counts_fd >= 0:
                os.close(counts_fd)
            raise
        finally:
            os.close(rank_report_fd)
        rank = Rank(self._rank_ids[local_rank], pid, report_fd, counts_fd)
        self._ranks_by_pid[pid] = rank
        self._selector.register(report_fd, EVENT_READ, rank)
        return rank

    def _start_process(
        self, plan: Plan, local_rank: int, rank_report_fd: int, counts_fd: int, extra_environment: Mapping[str, str]
    ) -> int:
        """Start the process of a rank, which inherits these descriptors; return its pid. Raises OSError."""
        contract = rank_environment(plan, local_rank)
        environment = {**self._platform_environment, **contract, **extra_environment}
        environment.update({**self._order_variables, **self._order_secrets})
        platform_path = self._platform_environment.get("PYTHONPATH")
        if platform_path is not None and environment["PYTHONPATH"] != platform_path:
            # The order's own folders come first, but do not replace the platform's.
            environment["PYTHONPATH"] = "{}:{}".format(environment["PYTHONPATH"], platform_path)
        if not local_rank:
            self.first_environment = environment
        # `rank.py` loads `step_timer.py` from its own folder, so both are extracted into one folder.
        rank_script = extract_file("rank.py", "step_timer.py")
        arguments = [self._python, "-u", rank_script, "{},{}".format(rank_report_fd, counts_fd), plan.script]
        # Arguments cannot refer to secrets: the console rejects such an order.
        arguments += rank_arguments(plan, local_rank, self._local_rank_flag, {**contract, **self._order_variables})
        inherited = [rank_report_fd, counts_fd] if counts_fd >= 0 else [rank_report_fd]
        delay_seconds = HEAD_START_SECONDS if plan.framework == "pytorch" and plan.rank(local_rank) else 0.0
        # `WarmRanks.start` returns None if no forked rank is ready.
        return self._warm_ranks.start(
            arguments[4:],  # the script and its arguments: a forked rank has an interpreter already
            environment,
            folder=self._folder,
            descriptors=[self._outputs[local_rank], *inherited],
            delay_seconds=delay_seconds,
            import_folders=self._import_folders,
        ) or spawn(
            arguments,
            environment,
            output_fd=self._outputs[local_rank],
            inherit_fds=inherited,
            folder=self._folder,
            new_session=True,
            delay_seconds=delay_seconds,
        )

    @property
    def folder(self) -> str:
        """The folder in which ranks start: the script's."""
        return self._folder

    @property
    def pids(self) -> Dict[str, int]:
        """{pid: rank_id}, as in the message `running`."""
        return {str(pid): rank.rank_id for pid, rank in self._ranks_by_pid.items()}

    @property
    def ranks(self) -> List[Rank]:
        """All ranks of this round, whether or not they have ended."""
        return list(self._ranks_by_pid.values())

    @property
    def live_ranks(self) -> List[Rank]:
        """The ranks that have not ended."""
        return [rank for rank in self._ranks_by_pid.values() if rank.exit is None]

    @property
    def succeeded(self) -> bool:
        """Whether there are ranks and all of them have succeeded."""
        return bool(self._ranks_by_pid) and all(rank.succeeded for rank in self._ranks_by_pid.values())

    @property
    def has_ended_ranks(self) -> bool:
        """Whether any rank has ended, or any script has failed."""
        return any(rank.exit is not None or rank.script_failed_at is not None for rank in self._ranks_by_pid.values())

    def read_reports(self, rank: Rank) -> None:
        """Read the reports of a rank that have arrived. Does nothing once its pipe is closed."""
        if rank.report_fd >= 0 and not rank.read():
            self._selector.unregister(rank.report_fd)
            os.close(rank.report_fd)
            rank.report_fd = -1

    def note_exit(self, process_exit: Exit) -> Optional[Rank]:
        """Note the end of a process; return its rank.

        None if the process is not a rank: mpirun, a daemon, or an adopted orphan.
        """
        rank = self._ranks_by_pid.get(process_exit.pid)
        if rank is None or rank.exit is not None:
            return None
        # `handle_timers` kills a rank that does not end after its script has failed. The failure counts then, not the
        # signal; 1 is Python's exit code for an exception.
        rank.exit = (
            Exit(process_exit.pid, 1, "") if rank.was_killed_late and process_exit.signal == "SIGKILL" else process_exit
        )
        if rank.report_fd >= 0:
            self.read_reports(rank)
        return rank

    def terminate(self) -> None:
        """Send SIGTERM now, and SIGKILL after TERMINATE_SECONDS.

        Ranks whose script has failed get no SIGTERM, so that they can print their traceback.
        """
        for rank in self.live_ranks:
            if not rank.is_failing:
                send_signal(rank.pid, signal.SIGTERM)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + TERMINATE_SECONDS

    def timeout(self, max_seconds: float) -> float:
        """Return how long to wait, `max_seconds` at most, until `handle_timers` has something to do."""
        if self._kill_at is None:
            return max_seconds
        return max(0.0, min(max_seconds, self._kill_at - time.monotonic()))

    def handle_timers(self) -> None:
        """Kill ranks that still run long after their SIGTERM or after their script's failure."""
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self.signal(signal.SIGKILL)
            self._kill_at = None
        for rank in self.live_ranks:
            reported_at = rank.failure_reported_at
            if not rank.was_killed_late and reported_at is not None and now >= reported_at + EXIT_SECONDS:
                rank.was_killed_late = True
                send_signal(rank.pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to every rank that has not ended."""
        for rank in self.live_ranks:
            send_signal(rank.pid, number)

    def terminate_rank(self, pid: int) -> None:
        """Send SIGTERM to one rank, unless it has ended."""
        rank = self._ranks_by_pid.get(pid)
        if rank is not None and rank.exit is None:
            send_signal(pid, signal.SIGTERM)

    def kill_leftovers(self) -> None:
        """Kill the processes that ended ranks have left behind. Call this only when no rank runs."""
        if os.getpid() == 1:  # in a sandbox: everything in this pid namespace belongs to the run
            send_signal(-1, signal.SIGKILL)
            return
        if self._owns_pid_namespace:
            # In a pod: everything but the supervisor (pid 1) and this process belongs to the run.
            for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
                if pid not in (1, os.getpid()):
                    send_signal(pid, signal.SIGKILL)
            return
        # Elsewhere only the ranks' own process groups are known to belong to the run.
        for rank in self._ranks_by_pid.values():
            # Most groups are empty by now, and one may have only processes that have changed their user.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
