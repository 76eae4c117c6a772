"""The supervision of one node, for sandboxes and pods alike: start, messages, output, limits, end.

`runtime.backends.supervision.supervisor` and `pod.node` derive from `Node`. One loop on one thread handles events: a
message of the launcher, output, a signal, a timer. It completes each event before the next.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from typing import Any, Dict, Mapping, Optional, Protocol, Sequence

from .causes import first_cause
from .echoes import is_echo_in_output
from .masking import Mask
from .node_limits import SILENCE_SECONDS, NodeLimits, NodePlan
from .output import Output
from .processes import Exit
from .protocol import ConnectionLost, Link, Message
from .ranklog import RankLog
from .record import Record, Verdict
from .topology import LaunchPlan


class ProcessTree(Protocol):
    """The node's processes. `exit` is how the launcher ended; None while it runs."""

    exit: Optional[Exit]

    def kill(self) -> None:
        """Kill every process of the node."""


_DRAIN_SECONDS = 5.0
"""How long the pipes of an ended node are read, which takes milliseconds. The limit is needed because a process that
outlived the launcher may keep a pipe open."""
_OUTPUT_SECONDS = 1.0
"""Minimum interval between reports of output to the launcher. Hangs take far longer, so more reports would not help."""
_START_NOTIFICATION_SECONDS = 0.1
"""How long the notification of the ranks' start is delayed. A run that ends within this time wakes the readers of its
record only once."""
_ABORT_SECONDS = 0.5
"""How long a launcher may take to notify the other nodes before it is killed. It needs milliseconds if it works."""


class Node:
    """One node, from its launcher's start to the last write of its record.

    `plan` holds the node's limits, and `plan_fields` the fields of `topology.Plan`. `metrics_path` is the path of
    METRICS_FILE, to which the code reports metrics.
    """

    # Minimum intervals between two heartbeats and between two checks of the metrics; 0: at each check of the limits.
    _heartbeat_seconds = 0.0
    _metrics_seconds = 0.0

    def __init__(
        self,
        plan: NodePlan,
        plan_fields: Mapping[str, Any],
        *,
        record: Record,
        limits: NodeLimits,
        tree: ProcessTree,
        output: Output,
        metrics_path: str,
    ) -> None:
        self._plan = plan
        # The same as `Plan.elastic`.
        self._is_elastic = 0 < int(plan_fields.get("min_nodes", 0)) < int(plan_fields["nodes"])
        # If there are other ranks, an error may be the echo of another rank's failure (`echoes`).
        self._has_peers = int(plan_fields["nodes"]) * int(plan_fields["workers"]) > 1
        self._node = record.node
        self._record = record
        self._limits = limits
        self._tree = tree
        self._output = output
        self._selector = output.selector
        self._mask = Mask()  # replaces the values of the run's secrets
        self._link: Optional[Link] = None  # to the launcher; None before its start
        self._has_reported_end = False  # the launcher has sent `ended`
        self._is_aborting = False  # the launcher was asked to end the whole run
        self._next_heartbeat_at = 0.0  # monotonic
        self._unreported_output_at: Optional[float] = None  # the last output that is not reported yet (Unix seconds)
        self._output_reported_at = 0.0  # monotonic
        self._metrics_path = metrics_path
        self._next_metrics_check_at = 0.0  # monotonic
        self._metrics_state = (0, 0)  # modification time (ns) and size at the last check

    @property
    def _has_ended(self) -> bool:
        """Whether the launcher has ended. In a sandbox all of the node's processes end with it."""
        return self._tree.exit is not None

    def _run_loop(self) -> None:
        """Handle events until the launcher has ended."""
        while not self._has_ended:
            for key, _events in self._selector.select(self._timeout()):
                self._handle(key.data)
            self._handle_timers()

    # Starting

    def _start(self, ranks: Sequence[int], listener: Optional[int], launch_plan: LaunchPlan) -> None:
        """Start the launcher, and send it `launch_plan` with the descriptors of the outputs and `listener` added.

        `ranks` are the global ranks of this node. `listener` is the socket on which node 0 listens for the other
        launchers; None on other nodes. Raises OSError.
        """
        self._output.mask = self._mask = Mask(launch_plan.get("secrets", {}).values())
        supervisor_end, launcher_end = socket.socketpair()
        # A launcher that reads nothing for so long counts as silent, so sending need not block longer.
        supervisor_end.settimeout(SILENCE_SECONDS)
        limit_bytes = int(self._plan["log_limit_bytes"])
        outputs = [self._output.open_rank(rank, limit_bytes) for rank in ranks]
        launcher_output = self._output.open_launcher(self._node)
        inherited = outputs if listener is None else [*outputs, listener]
        extra_fields = self._start_launcher(launcher_end.fileno(), launcher_output, inherited)
        # Only the launcher's side keeps these open. A pipe thus reaches its end once all of the node's processes ended.
        for descriptor in [launcher_output, *inherited]:
            os.close(descriptor)
        launcher_end.close()
        self._link = Link(supervisor_end)
        self._selector.register(self._link, selectors.EVENT_READ, self._link)
        self._send({**launch_plan, "outputs": outputs, "listener": listener, **extra_fields})

    def _start_launcher(self, launch_plan_fd: int, output_fd: int, inherit_fds: Sequence[int]) -> Message:
        """Start the launcher's process; return fields to add to its launch plan. Raises OSError.

        The launcher reads its plan from the socket `launch_plan_fd`, prints to `output_fd`, and inherits `inherit_fds`.
        """
        raise NotImplementedError

    # Events

    def _handle(self, source: Any) -> None:
        """Handle one ready file: the output of a rank, the launcher, or a file of a subclass."""
        if isinstance(source, RankLog):
            if self._output.pump(source):
                self._record.note_change()
            if self._output.is_live_rank(source):
                self._unreported_output_at = time.time()
        elif isinstance(source, Link):
            self._read_launcher(source)
        else:
            self._handle_own_event(source)

    def _handle_own_event(self, source: Any) -> None:
        """Handle an event of a file that a subclass has registered with the selector."""
        raise NotImplementedError

    def _read_launcher(self, link: Link) -> None:
        try:
            messages = link.receive()
        except ConnectionLost:
            # The launcher is ending, and `_run_loop` returns after it. If its process lives on, it counts as silent.
            self._selector.unregister(link)
            return
        self._limits.note_message()
        for message in messages:
            self._handle_message(message)

    def _handle_message(self, message: Message) -> None:
        """Handle one message of the launcher; `protocol` lists them."""
        kind = message.get("type")
        if kind == "starting":
            self._limits.note_code_started()
        elif kind == "running":
            self._note_running(message)
        elif kind == "cause":
            self._add_cause(self._mask_texts(message["cause"]))
        elif kind == "rank_ended" and message["aborted_late"]:
            self._accept_late_abort(message["rank"])
        elif kind == "members":
            self._record.data["members"].append({name: message[name] for name in ("nodes", "round", "at")})
            self._record.save()
        elif kind == "sample":
            self._record.add_sample(message)
        elif kind == "progress":
            self._record.note_progress(float(message["at"]))
        elif kind == "stacks":
            self._record.add_stacks(int(message["rank"]), self._mask.apply_to_text(str(message["text"])))
        elif kind == "ended":
            self._has_reported_end = True
            if self._is_aborting:
                self._kill()  # the launcher has reported the failure to the other nodes

    def _note_running(self, message: Message) -> None:
        self._limits.note_running({int(pid): rank for pid, rank in message["pids"].items()})
        self._record.data["round"] = message.get("round", 0)
        if not self._record.has_started:
            now = time.time()
            self._record.data.update(phase="running", started_at=now, progress_at=now)
            self._record.delay_notification(_START_NOTIFICATION_SECONDS)
        self._record.save()

    def _mask_texts(self, cause: Message) -> Message:
        """Return a cause with the values of secrets replaced in what customers read.

        A customer may choose a secret such as `code_failed`. So fields that decide the outcome, such as `kind`, stay.
        """
        texts: Message = {
            name: self._mask.apply_to_message(cause[name]) for name in ("message", "data") if name in cause
        }
        return {**cause, **texts}

    def _add_cause(self, cause: Message) -> None:
        """Record a cause. If a limit explains a rank's failure or a lost node, that limit becomes the cause."""
        # A cause that another node reported (`heard`) is not explained by this node's limits.
        verdict = None if cause.get("heard") else self._limits.explain_failure(cause, time.monotonic())
        if verdict is not None:
            explanation: Dict[str, Any] = {"kind": verdict.kind, "code": verdict.code, "message": verdict.message}
            explanation["data"] = dict(verdict.data)
            if cause["kind"] == "node_lost":
                explanation["node"] = self._node  # this node exceeded the limit, so the other one only seemed lost
            cause = {**cause, **explanation}
        self._record.data["causes"].append(cause)

    def _accept_late_abort(self, rank: int) -> None:
        """Note, in the log and the record, that this rank aborted but counts as successful (`Rank.aborted_late`)."""
        sentence = (
            "Rank {}: the script returned from its last line, then its process aborted (SIGABRT) while the "
            "interpreter was shutting down. The run counts as completed."
        ).format(rank)
        self._output.ranks[rank].note(sentence)
        self._record.add_detail(sentence)

    # Time and limits

    def _timeout(self) -> float:
        now = time.monotonic()
        return self._output.timeout(now, min(self._limits.timeout(now), self._record.timeout(now)))

    def _handle_timers(self) -> None:
        """Do the work that is due: SIGTERM, SIGKILL, checks, notifications."""
        now = time.monotonic()
        self._output.handle_timers(now)
        if self._limits.term_at is not None and now >= self._limits.term_at:
            self._end(self._limits.time_limit_verdict())
        if self._limits.kill_at is not None and now >= self._limits.kill_at:
            self._kill()
        if not self._has_ended and self._limits.is_due(now):
            self._check(now)
        self._record.notify_if_due(now)

    def _check(self, now: float) -> None:
        """Write the heartbeat and check the limits."""
        if now >= self._next_heartbeat_at:
            self._next_heartbeat_at = now + self._heartbeat_seconds
            self._record.heartbeat()
        self._check_metrics(now)
        self._report_output(now)
        verdict = None if self._is_aborting else self._limits.check(now)
        if verdict is not None:
            self._fail(verdict)

    def _check_metrics(self, now: float) -> None:
        """On node 0, detect new metrics by the size and the time of METRICS_FILE, which the code writes itself.

        New metrics are reported like output: they are a sign of progress.
        """
        if self._node or now < self._next_metrics_check_at:
            return
        self._next_metrics_check_at = now + self._metrics_seconds
        with contextlib.suppress(OSError):  # there is no file until the code has written metrics
            status = os.lstat(self._metrics_path)
            metrics_state = (status.st_mtime_ns, status.st_size)
            if metrics_state != self._metrics_state:
                self._metrics_state = metrics_state
                self._unreported_output_at = time.time()
                self._record.note_change()

    def _report_output(self, now: float) -> None:
        """Report output to the launcher as progress. The launcher sees none, because ranks write to the supervisor."""
        if self._unreported_output_at is None or now - self._output_reported_at < _OUTPUT_SECONDS:
            return
        self._record.note_progress(self._unreported_output_at)
        self._unreported_output_at = None
        self._output_reported_at = now
        self._send({"type": "output"})

    # Ending

    def _end(self, verdict: Verdict) -> None:
        """Ask the ranks to end, for the reason in `verdict`. A second call changes nothing."""
        self._limits.term_at = None
        if self._record.phase == "stopping":
            return
        if self._record.phase == "starting":
            self._fail(verdict)  # there are no ranks that could save their work
            return
        if self._has_reported_end:
            return  # the ranks have ended by themselves
        self._record.add_cause(verdict)
        self._record.data["phase"] = "stopping"
        self._record.save()
        self._send({"type": "end"})

    def _fail(self, verdict: Verdict) -> None:
        """End the node at once for this reason.

        The other nodes of an elastic run could take the node for lost and go on without it. So in an elastic run the
        launcher first reports the failure to them, unless the verdict is that this node is lost.
        """
        self._record.add_cause(verdict)
        if self._is_elastic and self._record.has_started and verdict.kind != "node_lost":
            self._send({"type": "abort", "cause": self._record.causes[-1]})
            self._is_aborting = True
            self._limits.kill_by(time.monotonic() + _ABORT_SECONDS)
        else:
            self._kill()

    def _send(self, message: Message) -> None:
        if self._link is not None:
            with contextlib.suppress(ConnectionLost):  # as in `_read_launcher`
                self._link.send(message)

    def _kill(self) -> None:
        self._limits.kill_at = self._limits.term_at = None
        self._tree.kill()

    def _add_final_data(self) -> None:
        """After the end of all processes, read the rest of the pipes and complete the record."""
        give_up_at = time.monotonic() + _DRAIN_SECONDS
        while self._link is not None and self._link in self._selector.get_map() and time.monotonic() < give_up_at:
            self._read_launcher(self._link)
        self._output.drain(give_up_at)
        if self._unreported_output_at is not None:
            self._record.note_progress(self._unreported_output_at)
        launcher_exit = self._tree.exit
        if launcher_exit is not None and not self._has_reported_end and not self._record.causes:
            self._explain_exit(launcher_exit)
        self._check_after_end()
        for problem in self._output.problems:
            self._record.add_detail(problem)
        own_causes = [cause for cause in self._record.causes if cause.get("rank") in self._output.ranks]
        for cause in own_causes:
            cause["last_lines"] = self._output.ranks[cause["rank"]].last_lines()
            # If the rank reported no exception, only its output can show that its failure is an echo.
            has_no_exception = cause["code"] == "rank_exited" or cause.get("signal") == "SIGABRT"
            if self._has_peers and has_no_exception and is_echo_in_output(cause["last_lines"]):
                cause["echo"] = True
        # Only the first cause is shown with its output.
        first = first_cause(own_causes)
        for cause in own_causes:
            if cause is not first:
                del cause["last_lines"]

    def _explain_exit(self, launcher_exit: Exit) -> None:
        """Add a cause for the end of a launcher that reported neither a cause nor its end.

        `launcher_exit` says how its process ended.
        """
        raise NotImplementedError

    def _check_after_end(self) -> None:
        """Check the limits for the last time."""
        raise NotImplementedError
