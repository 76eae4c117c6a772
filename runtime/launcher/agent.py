"""The launcher of one node: starts the ranks once all nodes have met, watches them, and ends at the first failure.

One loop on one thread handles events: a rank's end, a message, a timer. It completes each event before the next. The
launcher of node 0 is the *hub*, to which all others are connected.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from selectors import EVENT_READ, PollSelector
from typing import Any, Iterable, List, Optional, Tuple

from .causes import first_cause
from .elastic import node_list
from .processes import Exit, reap
from .protocol import ConnectionLost, Link, Message, new_cause
from .rendezvous.peers import HEARTBEAT_SECONDS, Peers
from .rendezvous.rounds import Rounds
from .shells import Shells
from .topology import LaunchPlan, Plan
from .warm.client import WarmRanks
from .worker_group import Rank, WorkerGroup

START_SECONDS = 60.0
"""How long the nodes may take to meet, unless the launch plan says otherwise. On an idle machine they take less than a
second; a busy one may need far longer."""
EXPLANATION_SECONDS = 1.0
"""How long an elastic run delays the report of a failure. If the loss of a node caused the failure, the connection to
that node has broken by then, and the run goes on without the node instead."""
ECHO_SECONDS = 5.0
"""How long to delay the report of an echo (`echoes`). The peer that failed first may report its failure only after its
shutdown, which takes seconds."""
WATCH_DELAY_SECONDS = 1.0
"""How long after the start of the ranks `NodeWatch` begins, so that it does not slow the start."""
_POLL_SECONDS = 0.5
"""Maximum interval between two checks of the timers: half of a heartbeat's interval."""


class Agent:
    """The node's launcher. `run` returns the node's exit code: 0 if every rank succeeded.

    `launch_plan` is the whole launch plan, and `plan` its part of the same name: what the run executes, and where.
    `supervisor` is the connection to the supervisor. Without `warm_ranks`, every rank starts cold.
    """

    def __init__(
        self, plan: Plan, launch_plan: LaunchPlan, supervisor: Link, warm_ranks: Optional[WarmRanks] = None
    ) -> None:
        self._plan = plan
        self._supervisor = supervisor
        # poll(2) returns files in the order of registration. The supervisor and SIGCHLD come before the peers, so this
        # node's ended ranks are known before a peer's message is handled.
        self._selector = PollSelector()
        self._peers = Peers(self._selector, plan.node, plan.nodes, launch_plan["token"], plan.addresses[plan.node])
        self._hub_address = (plan.addresses[0], int(launch_plan["control_port"]))
        self._worker_group = WorkerGroup(self._selector, plan, launch_plan, warm_ranks or WarmRanks(None))
        self._rounds = Rounds(plan, self._peers, self._worker_group, self._report, self._reset_failures)
        if plan.controller == "mpi":
            # Imported here because few runs need it.
            from .mpi import Mpi  # noqa: PLC0415

            self._rounds.mpi = Mpi(
                self._selector,
                self._worker_group,
                launch_plan,
                send=self._peers.send,
                on_code_started=self._rounds.report_running,
                on_all_started=self._rounds.note_all_started,
            )
        shells_fd = launch_plan.get("shells")
        if shells_fd is not None:
            token = launch_plan.get("shell_token", "")
            # No attribute is needed: the selector refers to the object.
            Shells(shells_fd, self._selector, self._worker_group, python=launch_plan["python"], token=token)
        # The node's GPUs. In a pod the launch plan names them, in a sandbox CUDA's own variable does.
        visible_devices = launch_plan["environment"].get("CUDA_VISIBLE_DEVICES", "").split(",")
        self._devices = [name for name in launch_plan.get("devices") or visible_devices if name]
        self._start_seconds = float(launch_plan.get("start_seconds") or START_SECONDS)
        self._node_watch: Any = None  # `telemetry.node_watch.NodeWatch`, once ranks run
        self._failures: List[Message] = []  # failures of this node's ranks, as causes, that are not reported yet
        self._report_failures_at: Optional[float] = None  # when to report them (monotonic; None: there are none)
        self._is_ending = False  # the run ends, by a failure or on request: later failures are effects
        self._has_failed = False  # this node has reported a cause
        self._next_heartbeat_at = 0.0
        self._wakeup_pipe: Tuple[int, int] = (-1, -1)  # reading and writing end of a pipe that SIGCHLD makes readable
        # On nodes other than the hub.
        self._has_reported_done = False  # this node has reported to the hub that its ranks have succeeded
        self._hub_has_ended = False  # the hub has ended since this node reported that

    @property
    def _is_hub(self) -> bool:
        return not self._plan.node

    def run(self, listener: Optional[int], early_messages: Iterable[Message] = ()) -> int:
        """Run the node to its last rank's end; return its exit code.

        `listener` is the descriptor on which the hub accepts the other launchers; None on other nodes. If the hub has
        none because it could not be opened, a run of several nodes fails once the time to meet is over.
        `early_messages` are the supervisor's messages that came together with the launch plan.
        """
        self._selector.register(self._supervisor, EVENT_READ, self._supervisor)
        self._catch_sigchld()
        if listener is not None and self._plan.nodes > 1:
            self._peers.listen(socket.socket(fileno=listener))
        elif listener is not None:
            os.close(listener)  # a run with one node has no other launchers
        elif not self._is_hub:
            self._peers.join(self._hub_address)
        self._give_up_at = time.monotonic() + self._start_seconds  # until when the nodes must have met
        for message in early_messages:
            self._handle_message(message)
        while not self._is_over():
            if self._is_hub and not self._rounds.has_started and not self._is_ending and self._peers.is_complete:
                self._rounds.begin_round()
            for key, _events in self._selector.select(self._timeout()):
                self._handle(key.data)
            self._handle_peers(None)  # timers of the connections
            self._handle_timers(time.monotonic())
        if self._node_watch is not None:
            self._node_watch.finish(self._worker_group.ranks)
        self._report({"type": "ended"})
        return 1 if self._has_failed or self._is_ending else 0  # a run that was asked to end has not succeeded

    def _timeout(self) -> float:
        """Return the seconds until the next timer, `_POLL_SECONDS` at most."""
        seconds = self._worker_group.timeout(_POLL_SECONDS)
        if self._report_failures_at is not None:
            seconds = max(0.0, min(seconds, self._report_failures_at - time.monotonic()))
        return seconds if self._node_watch is None else float(self._node_watch.timeout(seconds))

    def _catch_sigchld(self) -> None:
        """Make the loop call `_handle_ended_children` after each SIGCHLD."""
        # Python writes to the pipe only for signals with a handler, so SIGCHLD gets one that does nothing. A full pipe
        # wakes up the loop as well, so it needs no warning.
        self._wakeup_pipe = os.pipe()
        for end in self._wakeup_pipe:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakeup_pipe[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._selector.register(self._wakeup_pipe[0], EVENT_READ, self._handle_ended_children)

    def _handle(self, source: Any) -> None:
        """Handle one ready file, by the data that was registered with it.

        The data is the supervisor's Link, a Rank (for its reports), a function to call, or what `Peers` has
        registered.
        """
        if source is self._supervisor:
            self._handle_supervisor()
        elif isinstance(source, Rank):
            self._worker_group.read_reports(source)
            if source.script_failed_at is not None:
                self._rounds.note_script_failed()
        elif callable(source):
            source()
        else:
            self._handle_peers(source)

    def _handle_ended_children(self) -> None:
        """Collect the children that have ended since the last SIGCHLD, and handle the failures among them."""
        os.read(self._wakeup_pipe[0], 4096)  # one byte per signal, whose number does not matter
        for process_exit in reap():
            self._note_rank_exit(process_exit)
        # Done after all ends are collected, so that ranks which died together each report their own cause.
        if self._failures:
            self._schedule_failure_report(time.monotonic())

    def _schedule_failure_report(self, now: float) -> None:
        """Report the failures now, or set a timer if another node or rank may still report what caused them."""
        # An abort may be an effect too: gloo and NCCL abort the process if they cannot raise an error in the script.
        may_be_effects = all(failure.get("echo") or failure["signal"] == "SIGABRT" for failure in self._failures)
        other_ranks_may_report = self._plan.nodes > 1 or bool(self._worker_group.live_ranks)
        delay_seconds = EXPLANATION_SECONDS if self._plan.elastic else 0.0
        if may_be_effects and other_ranks_may_report:
            delay_seconds = ECHO_SECONDS
        # All failures are reported after the shortest delay, so that none waits longer because others may be effects.
        if self._report_failures_at is None or now + delay_seconds < self._report_failures_at:
            self._report_failures_at = now + delay_seconds
        if now >= self._report_failures_at and not self._is_ending:
            self._fail_for_own_ranks()

    def _handle_timers(self, now: float) -> None:
        """Do the work that is due: heartbeat, delayed reports of failures, the limit for the start, hang detection."""
        if now >= self._next_heartbeat_at:
            self._next_heartbeat_at = now + HEARTBEAT_SECONDS
            self._report({"type": "heartbeat"})
        self._worker_group.handle_timers()
        if self._report_failures_at is not None and now >= self._report_failures_at:
            self._fail_for_own_ranks()
        if self._is_ending:
            return
        if not self._rounds.has_started and now >= self._give_up_at:
            missing_nodes = self._peers.missing if self._is_hub else [0]  # other nodes are connected to the hub only
            message = "Nodes {} did not connect in time.".format(node_list(missing_nodes))
            self._fail(new_cause(kind="platform_error", code="nodes_not_met", node=self._plan.node, message=message))
        cause = self._rounds.handle_timers(now)
        if cause is not None:
            self._fail(cause)
        if self._rounds.started_at is not None and now >= self._rounds.started_at + WATCH_DELAY_SECONDS:
            node_watch, ranks = self._ensure_node_watch(), self._worker_group.live_ranks
            cause = node_watch.handle_timers(self._rounds.number, self._rounds.members, ranks)
            if cause is not None:
                self._fail(cause)

    def _ensure_node_watch(self) -> Any:
        """Return this node's watch, created at the first call."""
        if self._node_watch is None:
            # Imported here because no rank's start needs it.
            from .telemetry.node_watch import NodeWatch  # noqa: PLC0415

            # The local backend starts launchers with the garbage collector off, because a start creates little garbage.
            # The watch runs until the end, so it needs the collector, which can skip the objects that exist by now.
            gc.freeze()
            gc.enable()
            self._node_watch = NodeWatch(self._plan, self._devices, report=self._report, send=self._peers.send)
        return self._node_watch

    def _is_over(self) -> bool:
        """Whether this node is done. Once its own ranks have succeeded, this call also reports that to the hub."""
        if self._is_ending:
            return not self._worker_group.live_ranks
        if self._rounds.started_at is None or self._worker_group.live_ranks or self._failures:
            return False
        if self._rounds.awaits_restart:
            return False
        if len(self._rounds.members) == 1:
            return True  # there is no other node to wait for
        if self._is_hub:
            return self._peers.all_finished(self._rounds.members)
        if not self._has_reported_done:
            self._has_reported_done = True
            self._peers.send({"type": "done"})
        # With MPI this node ends after the hub, because mpirun takes an earlier end of its daemon here for a failure.
        return self._rounds.mpi is None or self._hub_has_ended

    # Messages

    def _handle_supervisor(self) -> None:
        try:
            messages = self._supervisor.receive()
        except ConnectionLost:
            # The supervisor enforces the run's limits, so the run must not continue without it. The end of this process
            # also ends the sandbox.
            os._exit(1)
        for message in messages:
            self._handle_message(message)

    def _handle_message(self, message: Message) -> None:
        """Handle a message of the supervisor; `protocol` lists them."""
        kind = message.get("type")
        if kind == "end":
            self._is_ending = True
            # Not `terminate`, which kills soon after: here the supervisor kills at the end of the grace period.
            self._worker_group.signal(signal.SIGTERM)
        elif kind == "output":
            self._ensure_node_watch().note_output()
        elif kind == "cpu_use":
            if message["is_working"]:
                self._ensure_node_watch().note_cpu_work()
            self._ensure_node_watch().add_cpu_seconds(float(message["seconds"]))
        elif kind == "hub_address":
            # A name server may first give the address of an earlier pod of the hub. So the supervisor in a pod sends
            # each address that it finds, until the nodes have met.
            self._peers.join((str(message["address"]), self._hub_address[1]))
        elif kind == "abort":
            self._peers.send({"type": "abort", "cause": message.get("cause")})
            # The supervisor waits for this answer before it kills the node, so the answer does not wait for the ranks.
            self._report({"type": "ended"})
            self._end_ranks()

    def _handle_peers(self, source: Any) -> None:
        """Handle the other launchers' messages; None as the source handles the timers of the connections.

        `Peers` itself adds the message `lost`, when it has lost the connection to a node.
        """
        for node, message in self._peers.events(source):
            kind = message.get("type")
            if kind == "lost":
                self._handle_lost_node(node, was_silent=bool(message.get("silent")))
            elif kind == "abort" and not self._is_ending:
                self._abort(message.get("cause"))
            elif kind == "done":
                self._peers.note_finished(node)
                self._ensure_node_watch().note_finished(node)
            elif self._is_ending or self._rounds.handle_message(node, message):
                continue  # the message no longer matters, or was about rounds
            elif self._node_watch is not None:
                self._node_watch.handle_message(node, message)

    def _handle_lost_node(self, node: int, *, was_silent: bool) -> None:
        """Continue without a lost node if the run can, else fail.

        `was_silent`: the node sent no more heartbeats, although its connection was still open.
        """
        if self._is_ending:
            return
        if self._has_reported_done:
            # Only nodes other than the hub report `done`, and their only peer is the hub, so the hub has ended.
            self._hub_has_ended = True
            return
        reason = self._rounds.continue_without(node)
        if reason is None:
            return
        message = "Node {} {}{}.".format(node, "stopped answering" if was_silent else "was lost", reason)
        self._fail(
            new_cause(kind="node_lost", code="node_silent" if was_silent else "node_lost", node=node, message=message)
        )

    def _reset_failures(self) -> None:
        """Drop the failures of the previous round: they were effects of the lost node."""
        self._failures = []
        self._report_failures_at = None

    # Ending

    def _note_rank_exit(self, process_exit: Exit) -> None:
        """Report a rank's end, and collect its failure unless the loss of a node explains it."""
        rank = self._worker_group.note_exit(process_exit)
        if rank is None or rank.exit is None:  # `note_exit` has set `exit`; the second check is for type checkers
            if self._rounds.mpi is not None:  # the process may be mpirun or a daemon of it
                self._rounds.mpi.note_exit(process_exit)
            return
        self._report(
            {
                "type": "rank_ended",
                "rank": rank.rank_id,
                "exit_code": rank.exit.exit_code,
                "signal": rank.exit.signal,
                "aborted_late": rank.aborted_late,
                "round": self._rounds.number,
            }
        )
        if self._is_ending:
            return
        is_effect_of_lost_node = self._rounds.note_rank_ended(rank)
        if not is_effect_of_lost_node and not rank.succeeded:
            self._failures.append(self._cause_of(rank))

    def _cause_of(self, rank: Rank) -> Message:
        """Return a rank's failure as a cause. The rank's process may still run."""
        script_failure = rank.script_failure
        if script_failure.exception:
            code = "rank_raised"
        elif rank.failed_by_signal:
            code = "rank_killed"
        else:
            code = "rank_exited"
        cause = new_cause(kind="code_failed", code=code, node=self._plan.node, at=rank.failed_at, rank=rank.rank_id)
        # A rank that still runs, or was killed after its exception, has no exit code of its own. Then the code that it
        # reported counts.
        exit_code = script_failure.exit_code if rank.exit is None or script_failure.exception else rank.exit.exit_code
        cause.update(exit_code=None if rank.failed_by_signal else exit_code, signal=rank.failed_by_signal)
        if script_failure.exception:
            fields = ("exception", "message", "file", "line", "function")
            cause["data"] = {name: getattr(script_failure, name) for name in fields}
        if script_failure.echo and self._plan.world_size > 1:
            cause["echo"] = True
        return cause

    def _fail_for_own_ranks(self) -> None:
        """Fail the run because of this node's rank failures, since no other failure has explained them in time."""
        failures = self._report_failures()
        if failures:
            self._peers.send({"type": "abort", "cause": first_cause(failures)})
            self._end_ranks()

    def _report_failures(self) -> List[Message]:
        """Report the failures of this node's ranks to the supervisor, and return their causes."""
        # Read all reports that have arrived. Until now this node has not ended its ranks, so their failures are causes.
        for rank in self._worker_group.live_ranks:
            self._worker_group.read_reports(rank)
        for process_exit in reap():
            self._note_rank_exit(process_exit)
        failures = self._failures
        if not self._is_ending:
            failures = failures + [self._cause_of(rank) for rank in self._worker_group.live_ranks if rank.is_failing]
        for failure in failures:
            self._report({"type": "cause", "cause": failure})
        self._has_failed |= bool(failures)
        self._failures = []
        self._report_failures_at = None
        return failures

    def _abort(self, reported_cause: Any) -> None:
        """End the run because another node has failed; `reported_cause` is that node's cause, if it sent one."""
        self._report_failures()
        if isinstance(reported_cause, dict):
            # `heard` marks a cause that another node reported.
            self._report({"type": "cause", "cause": {**reported_cause, "heard": True}})
        # The hub passes the abort on, since other nodes are connected only to the hub. The node that reported the abort
        # is ending already, and ignores it.
        self._peers.send({"type": "abort", "cause": reported_cause})
        self._end_ranks()

    def _fail(self, cause: Message) -> None:
        """Fail the run for this cause, or for an earlier failure of this node's ranks."""
        if not self._is_ending:
            rank_failures = self._report_failures()
            self._report({"type": "cause", "cause": cause})
            self._has_failed = True
            self._peers.send({"type": "abort", "cause": first_cause([*rank_failures, cause])})
        self._end_ranks()

    def _end_ranks(self) -> None:
        """End the ranks that are left on this node. Failures from now on are effects, not causes."""
        if self._is_ending:
            return
        self._is_ending = True
        self._worker_group.terminate()

    def _report(self, message: Message) -> None:
        """Send a message to the supervisor."""
        try:
            self._supervisor.send(message)
        except ConnectionLost:
            os._exit(1)  # as in `_handle_supervisor`
