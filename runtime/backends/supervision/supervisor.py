"""The supervisor of one node: a detached process that starts the launcher in its sandbox and enforces its limits.

It receives its plan when it starts, and needs no console after that. It enforces the deadline, the limits and the
maximum sizes of logs, and writes the node's record. Backends ask it by files in the run's folder to end the run or to
move the deadline. If it dies, the kernel ends the sandbox. No third-party packages, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime import pids
from runtime.backends.supervision import resource_limits
from runtime.backends.supervision.limits import Limits
from runtime.backends.supervision.node_plan import SupervisorPlan
from runtime.backends.supervision.process_tree import ProcessTree
from runtime.backends.supervision.shell_socket import ShellSocket
from runtime.launcher.node import Node
from runtime.launcher.output import Output
from runtime.launcher.processes import Exit, reap, signal_name
from runtime.launcher.protocol import Message
from runtime.launcher.record import Record, Verdict

_REPORT_SECONDS = 3.0
"""How long a node must show no progress before its CPU use is reported to the launcher: the hang detector needs the
report only then."""
_SIGNAL_EXIT_BASE = 128
"""If a signal ended the launcher, bubblewrap's exit code is the signal's number plus this."""


class Supervisor(Node):
    """Supervises one node, from the launcher's start to the node's last record."""

    _plan: SupervisorPlan
    _limits: Limits
    _tree: ProcessTree
    _caught_signals: socket.socket

    def __init__(self, plan: SupervisorPlan) -> None:
        folder, node = Path(plan["folder"]), plan["node"]
        plan_fields = plan["launcher"]["plan"]  # the fields of `topology.Plan`
        record = self._create_record(plan, folder, plan_fields["addresses"][node])
        tree = self._create_tree(plan, folder / "nodes" / f"{node}.cgroups")
        super().__init__(
            plan,
            plan_fields,
            record=record,
            limits=self._create_limits(plan, record, tree),
            tree=tree,
            output=Output(selectors.DefaultSelector(), folder / "logs"),
            metrics_path=str(folder / "run" / "metrics.jsonl"),
        )
        self._stop_path = folder / "stop.json"
        self._deadline_path = folder / "deadline.json" if plan.get("is_extensible") else None
        self._shell_socket = ShellSocket(folder, plan["node"]) if plan.get("shells") else None

    # Parts that the subclass for Slurm replaces

    def _create_record(self, plan: SupervisorPlan, folder: Path, address: str) -> Record:
        # Readers of the record use these fields to find out whether this process is alive.
        process = {"pid": os.getpid(), "start_time": pids.start_time(os.getpid())}
        return Record(folder, Path(plan["change_file"]), node=plan["node"], address=address, first_fields=process)

    def _create_tree(self, plan: SupervisorPlan, cgroups_file: Path) -> ProcessTree:
        return ProcessTree(plan, cgroups_file)

    def _create_limits(self, plan: SupervisorPlan, record: Record, tree: ProcessTree) -> Limits:
        return Limits(plan, record, tree)

    # The life of the node

    def run(self) -> None:
        """Supervise the node to its end."""
        plan = self._plan
        self._record.create()
        self._record.reserve_space()
        resource_limits.raise_own_priority()
        self._catch_signals()
        self._limits.measure_folders()
        self._start(plan["ranks"], plan["listener"], plan["launcher"])
        self._run_loop()
        if self._shell_socket is not None:
            self._shell_socket.remove()
        self._add_final_data()
        self._tree.remove_cgroups()
        launcher_exit = self._tree.exit
        # Last, because readers take this write as the node's end.
        self._record.finish(
            finished_at=time.time(), exit_code=None if launcher_exit is None else launcher_exit.exit_code
        )

    # Starting

    def _catch_signals(self) -> None:
        """Arrange that every caught signal wakes the selector, by a byte in a socket pair."""
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        # SIGTERM means that stop.json may exist. The other signals must not end this process.
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # A handler that does nothing: with SIG_IGN, the signal would not wake the selector.
            signal.signal(number, lambda _number, _frame: None)
        # The registered data keeps `writer` open: `set_wakeup_fd` knows only the number of its descriptor.
        self._selector.register(reader, selectors.EVENT_READ, (reader, writer))
        self._caught_signals = reader

    def _start_launcher(self, launch_plan_fd: int, output_fd: int, inherit_fds: Sequence[int]) -> Message:
        """Start the launcher; return the fields to add to its launch plan: the numbers of descriptors that it inherits.

        `warm` is the socket to forked ranks (None in a cold start), and `shells` the listening socket for shells.
        """
        listener = None if self._shell_socket is None else self._shell_socket.listen()
        if listener is None:
            return {"warm": self._tree.start(launch_plan_fd, output_fd=output_fd, inherit_fds=inherit_fds)}
        with listener:  # closed here: only the launcher keeps it open, so nobody can connect after the launcher's end
            warm = self._tree.start(launch_plan_fd, output_fd=output_fd, inherit_fds=[*inherit_fds, listener.fileno()])
            return {"warm": warm, "shells": listener.fileno()}

    # Events

    def _handle_own_event(self, _ready: Any) -> None:
        """Handle an event that only this class has registered: signals have arrived."""
        self._read_signals()

    def _read_signals(self) -> None:
        """Handle the signals that have arrived, if any."""
        signals = b""
        with contextlib.suppress(BlockingIOError):
            signals = self._caught_signals.recv(4096)  # one byte per signal, its number
        for process_exit in reap():
            self._tree.note_exit(process_exit)
        self._handle_signals(set(signals))

    def _handle_signals(self, numbers: set[int]) -> None:
        """Handle the signals with these numbers. Subclasses distinguish the numbers."""
        del numbers  # after any signal there may be a request to stop
        self._check_for_stop()

    def _check(self, now: float) -> None:
        """Check for requests of the backend and for exceeded limits, and report CPU use to the launcher."""
        self._check_for_stop()
        self._check_for_extension()
        super()._check(now)
        cpu_seconds = self._limits.take_cpu_seconds()
        if cpu_seconds is not None and time.time() - (self._record.data["progress_at"] or 0.0) > _REPORT_SECONDS:
            self._send({"type": "cpu_use", "is_working": self._limits.is_using_cpu, "seconds": cpu_seconds})

    def _check_for_stop(self) -> None:
        """End the ranks if `stop.json` has a request to end the run."""
        try:
            stop = json.loads(self._stop_path.read_bytes())
        except (OSError, ValueError):
            return  # no request, or one that cannot be read now; the next check reads it again
        if stop is None:  # no request; Slurm's backend creates the file with the run
            return
        # The request has Unix times, the limits monotonic ones.
        self._limits.kill_by(time.monotonic() + stop["at"] + stop["grace_seconds"] - time.time())
        self._end(Verdict(kind="stopped", code="stopped", message="The run was stopped on request."))

    def _check_for_extension(self) -> None:
        """Move the deadline if `deadline.json` has a later one."""
        if self._deadline_path is None or self._record.phase != "running" or self._is_aborting:
            return  # the ranks do not run, or the node is ending, which a later deadline must not delay
        # Usually there is no such file. One that cannot be read now is read again at the next check.
        with contextlib.suppress(OSError, ValueError):
            self._limits.extend(float(json.loads(self._deadline_path.read_bytes())["deadline_seconds"]))

    # Ending

    def _explain_exit(self, launcher_exit: Exit) -> None:
        """Record why the launcher ended without reporting its end. `launcher_exit` is bubblewrap's exit."""
        code = launcher_exit.exit_code or 0
        was_killed = bool(launcher_exit.signal) or code > _SIGNAL_EXIT_BASE
        verdict = self._limits.find_memory_kill() if was_killed else None
        self._record.add_cause(verdict or self._exit_verdict(launcher_exit.signal, code))
        if verdict is None:  # the launcher's last output may say more than its exit code
            self._record.data["detail"] = "\n".join(self._output.launcher_lines)

    def _exit_verdict(self, bubblewrap_signal: str, code: int) -> Verdict:
        """Return the verdict by the signal that ended bubblewrap ("" for none) and its exit code."""
        node = self._node
        if bubblewrap_signal:
            # The sandbox cannot signal bubblewrap, so a process of the host ended it.
            return Verdict(
                kind="node_lost",
                code="node_lost",
                message=f"The sandbox of node {node} was ended ({bubblewrap_signal}).",
            )
        exit_reason = signal_name(code - _SIGNAL_EXIT_BASE) if code > _SIGNAL_EXIT_BASE else f"code {code}"
        if self._limits.code_has_started:
            return self._limits.launcher_killed_verdict(f"was ended ({exit_reason})")
        message = f"Node {node} could not be started, or failed while it started ({exit_reason})."
        return Verdict(kind="platform_error", code="platform_error", message=message)

    def _check_after_end(self) -> None:
        """If other runs have filled the disk, record that as the first cause in place of the code's failure."""
        verdict = self._limits.check_after_end()
        causes = self._record.data["causes"]
        # `heard` marks a cause that another node reported.
        if verdict is None or not any(cause["kind"] == "code_failed" and not cause.get("heard") for cause in causes):
            return
        self._record.add_cause(verdict)
        # The earliest cause decides the outcome, so this one is dated just before all others.
        causes[-1]["at"] = min(float(cause["at"]) for cause in causes) - 0.001
