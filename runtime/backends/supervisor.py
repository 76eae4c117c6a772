"""One node of a local run: a detached process that starts the launcher in its sandbox and holds it to its limits.

It hides pipes, clocks and kills. Its one rule: it needs nobody. It is given its order once; from then on the deadline,
the limits, the log caps and the record of what happened are its own, whether a console lives or not, and if it dies
itself the kernel takes the sandbox with it. Standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from pathlib import Path
from typing import Any

from runtime.backends import identity, watchdog
from runtime.backends.limits import Limits
from runtime.backends.tree import Tree
from runtime.launcher.node_limits import SILENCE_SECONDS
from runtime.launcher.processes import Exit, reap
from runtime.launcher.ranklog import RankLog
from runtime.launcher.record import Record, Verdict
from runtime.launcher.report import ConnectionLost, Link, Message, first_cause

_DRAIN_SECONDS = 5.0
_PLATFORM_LOG_BYTES = 1 << 20
_OUTPUT_SECONDS = 1.0
_START_SECONDS = 0.1
"""The start of the ranks is told this much later, with what they have done by then: many have ended."""
_ABORT_SECONDS = 0.5


class Supervisor:
    """The node, from the launcher's start to the last line of its record."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._node: int = order["node"]
        folder = Path(order["folder"])
        self._folder = folder
        self._stop_path = folder / "stop.json"
        self._metrics_path = folder / "run" / "metrics.jsonl"
        address = order["launcher"]["plan"]["addresses"][self._node]
        me = {"pid": os.getpid(), "start_time": identity.start_time(os.getpid())}
        self._record = Record(folder, Path(order["bell"]), node=self._node, address=address, about=me)
        self._tree = Tree(order, folder / "nodes" / f"{self._node}.cgroups")
        self._limits = Limits(order, self._record, self._tree)
        self._selector = selectors.DefaultSelector()
        self._logs: dict[int, RankLog] = {}
        self._platform_log: RankLog | None = None
        self._resting: list[RankLog] = []
        self._link: Link | None = None
        self._told_end = False
        self._aborting = False
        self._output_at: float | None = None
        self._output_told_at = 0.0
        self._metrics_seen: tuple[int, int] = (0, 0)

    def run(self) -> None:
        """Supervise to the end."""
        self._record.begin()
        watchdog.keep_awake()
        self._catch_signals()
        self._start()
        while self._tree.exit is None:
            for key, _events in self._selector.select(self._patience()):
                self._handle(key.data)
            self._keep_time()
        self._finish()

    # Starting

    def _catch_signals(self) -> None:
        reading, writing = socket.socketpair()
        for end in (reading, writing):
            end.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        # SIGTERM only says "look for stop.json now"; without one it is not for us.
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda _number, _frame: None)
        self._selector.register(reading, selectors.EVENT_READ, (reading, writing))

    def _start(self) -> None:
        order = self._order
        ours, theirs = socket.socketpair()
        ours.settimeout(SILENCE_SECONDS)
        outputs = []
        for rank in order["ranks"]:
            reading, writing = os.pipe()
            self._logs[rank] = self._open_log(f"rank-{rank}.log", reading, order["log_limit_bytes"])
            outputs.append(writing)
        platform_reading, platform_writing = os.pipe()
        self._platform_log = self._open_log(f"node-{self._node}.log", platform_reading, _PLATFORM_LOG_BYTES)
        listener: int | None = order["listener"]
        given = outputs if listener is None else [*outputs, listener]
        warm = self._tree.start(theirs.fileno(), output=platform_writing, inherit=given)
        for descriptor in [platform_writing, *given]:
            os.close(descriptor)
        theirs.close()
        self._link = Link(ours)
        self._selector.register(self._link, selectors.EVENT_READ, self._link)
        self._say({**order["launcher"], "outputs": outputs, "listener": listener, "warm": warm})

    def _open_log(self, name: str, reading: int, limit_bytes: int) -> RankLog:
        log = RankLog(self._folder / "logs" / name, reading, limit_bytes)
        self._selector.register(log, selectors.EVENT_READ, log)
        return log

    # What happens

    def _handle(self, ready: Any) -> None:
        if isinstance(ready, RankLog):
            self._pump(ready)
        elif isinstance(ready, Link):
            self._listen(ready)
        else:
            with contextlib.suppress(BlockingIOError):
                ready[0].recv(4096)
            for gone in reap():
                self._tree.reaped(gone)
            self._look_for_stop()

    def _pump(self, log: RankLog) -> None:
        if log.pump():
            self._record.news()
        if log.open and log is not self._platform_log:
            self._output_at = time.time()
        if not log.open or log.rest_until is not None:
            self._selector.unregister(log)
        if log.open and log.rest_until is not None:
            self._resting.append(log)

    def _wake_logs(self, now: float) -> None:
        for log in [log for log in self._resting if log.rest_until is None or log.rest_until <= now]:
            self._resting.remove(log)
            self._selector.register(log, selectors.EVENT_READ, log)

    def _listen(self, link: Link) -> None:
        try:
            messages = link.receive()
        except ConnectionLost:
            self._selector.unregister(link)
            return
        self._limits.heard()
        for message in messages:
            self._take(message)

    def _take(self, message: Message) -> None:
        """One word of the launcher's; `runtime.launcher.report` says what there is."""
        match message.get("type"):
            case "running":
                self._running(message)
            case "cause":
                self._take_cause(message["cause"])
            case "rank_ended" if message["aborted_late"]:
                self._forgive(message["rank"])
            case "members":
                self._record.data["members"].append({name: message[name] for name in ("nodes", "round", "at")})
                self._record.save()
            case "sample":
                self._record.add_sample(message)
            case "progress":
                self._record.progress(float(message["at"]))
            case "stacks":
                self._record.add_stacks(int(message["rank"]), str(message["text"]))
            case "ended":
                self._told_end = True
                if self._aborting:
                    self._kill()

    def _running(self, message: Message) -> None:
        self._limits.running({int(pid): rank for pid, rank in message["pids"].items()})
        self._record.data["round"] = message.get("round", 0)
        if not self._record.started:
            now = time.time()
            self._record.data.update(phase="running", started_at=now, progress_at=now)
            self._record.rest_the_bell(_START_SECONDS)
        self._record.save()

    def _take_cause(self, cause: dict[str, Any]) -> None:
        """A rank that failed may have met one of the kernel's limits: then that is the cause."""
        verdict = self._limits.explain(cause, time.monotonic())
        if verdict is not None:
            told = {"kind": verdict.kind, "code": verdict.code, "message": verdict.message, "data": verdict.data}
            cause = {**cause, **told}
        self._record.data["causes"].append(cause)

    def _forgive(self, rank: int) -> None:
        sentence = (
            f"Rank {rank}: the script returned from its last line, then its process aborted (SIGABRT) while the "
            "interpreter was shutting down. The run counts as completed."
        )
        self._logs[rank].note(sentence)
        self._record.add_detail(sentence)

    def _look_for_stop(self) -> None:
        try:
            stop = json.loads(self._stop_path.read_bytes())
        except (OSError, ValueError):
            return
        self._limits.kill_by(time.monotonic() + stop["at"] + stop["grace_seconds"] - time.time())
        self._end(Verdict("stopped", "stopped", "The run was stopped on request."))

    # Time and limits

    def _patience(self) -> float:
        now = time.monotonic()
        rests = (log.rest_until - now for log in self._resting if log.rest_until is not None)
        return max(0.0, min(self._limits.patience(now), self._record.patience(now), *rests))

    def _keep_time(self) -> None:
        now = time.monotonic()
        self._wake_logs(now)
        if self._limits.term_at is not None and now >= self._limits.term_at:
            self._end(self._limits.time_is_up())
        if self._limits.kill_at is not None and now >= self._limits.kill_at:
            self._kill()
        if self._tree.exit is None and self._limits.due(now):
            self._record.beat()
            self._look_for_stop()
            self._look_at_metrics()
            self._tell_of_output(now)
            verdict = None if self._aborting else self._limits.look(now)
            if verdict is not None:
                self._blame(verdict)
        self._record.ring_if_due(now)

    def _look_at_metrics(self) -> None:
        """Metrics go past us, from the code into its own file: only whether they changed is looked at."""
        if self._node:
            return
        with contextlib.suppress(OSError):
            state = self._metrics_path.lstat()
            seen = (state.st_mtime_ns, state.st_size)
            if seen != self._metrics_seen:
                self._metrics_seen = seen
                self._output_at = time.time()
                self._record.news()

    def _tell_of_output(self, now: float) -> None:
        """Output is a sign of progress, which the launcher, whose ranks write past it, cannot see."""
        if self._output_at is None or now - self._output_told_at < _OUTPUT_SECONDS:
            return
        self._record.progress(self._output_at)
        self._output_at = None
        self._output_told_at = now
        self._say({"type": "output"})

    # Ending

    def _end(self, verdict: Verdict) -> None:
        """Ask the ranks to end; the first reason given stays the reason."""
        self._limits.term_at = None
        if self._record.phase == "stopping":
            return
        if self._record.phase == "starting":
            self._blame(verdict)
            return
        if self._told_end:
            return
        self._record.add_cause(verdict)
        self._record.data["phase"] = "stopping"
        self._record.save()
        self._say({"type": "end"})

    def _blame(self, verdict: Verdict) -> None:
        """End the sandbox at once, for this reason. A run that could go on without this node hears of it first."""
        self._record.add_cause(verdict)
        if self._order["elastic"] and self._record.started and verdict.kind != "node_lost":
            self._say({"type": "abort"})
            self._aborting = True
            self._limits.kill_by(time.monotonic() + _ABORT_SECONDS)
        else:
            self._kill()

    def _say(self, message: Message) -> None:
        if self._link is not None:
            with contextlib.suppress(ConnectionLost):
                self._link.send(message)

    def _kill(self) -> None:
        self._limits.kill_at = self._limits.term_at = None
        self._tree.kill()

    def _finish(self) -> None:
        """Nothing runs any more: empty the pipes, write the last record, ring once more."""
        give_up_at = time.monotonic() + _DRAIN_SECONDS
        waiting = [log for log in [*self._logs.values(), self._platform_log] if log is not None and log.open]
        while self._link is not None and self._link in self._selector.get_map() and time.monotonic() < give_up_at:
            self._listen(self._link)
        while waiting and time.monotonic() < give_up_at:
            for log in waiting:
                log.pump()
            waiting = [log for log in waiting if log.open]
        if self._output_at is not None:
            self._record.progress(self._output_at)
        ended = self._tree.exit
        if ended is not None and not self._told_end and not self._record.causes:
            self._explain(ended)
        self._tree.clear()
        self._blame_the_disk(self._limits.last_look())
        for problem in sorted({log.problem for log in self._logs.values() if log.problem}):
            self._record.add_detail(problem)
        cause = first_cause([cause for cause in self._record.causes if cause.get("rank") in self._logs])
        if cause is not None:
            cause["last_lines"] = self._logs[cause["rank"]].last_lines()
        self._record.finish(finished_at=time.time(), exit_code=None if ended is None else ended.exit_code)

    def _explain(self, ended: Exit) -> None:
        """The launcher went without a word: killed from outside, or broken."""
        killed = bool(ended.signal) or (ended.exit_code or 0) > 128  # the shell's convention, bwrap's too
        node = self._node
        memory = self._limits.killed_for_memory() if killed else None
        if memory is not None:
            self._record.add_cause(memory)
            return
        if killed:
            message = f"The launcher of node {node} was killed."
            self._record.add_cause(Verdict("node_lost", "node_lost", message))
            return
        message = f"Node {node} could not be started or broke down."
        self._record.add_cause(Verdict("platform_error", "platform_error", message))
        if self._platform_log is not None:
            self._record.data["detail"] = "\n".join(self._platform_log.last_lines())

    def _blame_the_disk(self, verdict: Verdict | None) -> None:
        """Code that failed on a disk which others had filled is not to blame."""
        causes = self._record.data["causes"]
        if verdict is None or not any(cause["kind"] == "code_failed" for cause in causes):
            return
        self._record.add_cause(verdict)
        causes[-1]["at"] = min(float(cause["at"]) for cause in causes) - 0.001
