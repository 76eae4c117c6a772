"""One node of a run, as the first process of its pid namespace keeps it: see `pod` for what it is told and leaves.

It hides the selector and who is waited for. The one rule: one loop, one thread; whatever happens (a word of the
launcher's, output, a signal, the clock) is handled to its end before the next thing.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from .carried import as_file
from .names import Names
from .node_limits import SILENCE_SECONDS
from .pod_guard import Guard
from .pod_limits import PodLimits
from .pod_output import Output
from .pod_tree import PodTree
from .ranklog import RankLog
from .record import Record, Verdict, open_file
from .report import ConnectionLost, Link, Message, first_cause
from .signals import Signals
from .signed import LONGEST, sign_record
from .speaker import Speaker

if TYPE_CHECKING:
    from .pod import Place

_DRAIN_SECONDS = 5.0
_OUTPUT_SECONDS = 1.0
_BEAT_SECONDS = 5.0
"""Storage that many nodes share is not to be kept busy by signs of life."""
_ABORT_SECONDS = 0.5
_LEAVE_SECONDS = 20.0
_STORE_TRIES = 3
"""For the record in the run's folder; the one that counts goes to the kubelet."""


class PodNode:
    """The node, from the search for the others to the last word of its record."""

    def __init__(self, place: Place, order: Dict[str, Any]) -> None:
        self._place = place
        self._order = order
        self._node = place.node
        self._folder = Path(order.get("folder") or "/trainyard/run-root")
        self._plan: Dict[str, Any] = {**order["plan"], "node": place.node}
        self._metrics_path = os.path.join(self._plan["run_dir"], "metrics.jsonl")
        self._record = Record(
            self._folder,
            None,
            node=place.node,
            address=place.address,
            about={"run": order["run"]},
            encode=lambda data: sign_record(data, place.key),
        )
        self._selector = selectors.DefaultSelector()
        self._signals = Signals()
        self._selector.register(self._signals, selectors.EVENT_READ, self._signals)
        self._output = Output(self._selector, self._folder / "logs")
        self._tree = PodTree()
        self._limits = PodLimits(order, self._record)
        self._guard = Guard(self._tree.kill, self._leave_late)
        self._names: Optional[Names] = None
        self._link: Optional[Link] = None
        self._told_end = False
        self._aborting = False
        self._over = False
        self._code: Optional[int] = None
        self._output_at: Optional[float] = None
        self._output_told_at = 0.0
        self._beat_at = 0.0
        self._metrics_seen = (0, 0)

    def run(self) -> int:
        """Live to the node's end; returns the exit code of this process."""
        self._make_folders()
        self._record.begin()
        nodes = int(self._plan["nodes"])
        self._names = Names(list(self._order["names"])[:nodes], {self._node: self._place.address})
        self._selector.register(self._names, selectors.EVENT_READ, self._names)
        while not self._over:
            for key, _events in self._selector.select(self._patience()):
                self._handle(key.data)
            self._keep_time()
        return self._finish()

    def _make_folders(self) -> None:
        """What the code and this process write to, where nobody has made it. What cannot be made is done without."""
        parts = [str(self._folder / "logs"), str(self._folder / "nodes")]
        for path in [*parts, os.path.join(self._plan["run_dir"], "tensorboard"), self._plan["checkpoint_dir"]]:
            try:
                os.makedirs(path, exist_ok=True)
            except OSError as error:
                self._record.add_detail("The folder {} could not be made: {}.".format(path, error.strerror))

    # Starting

    def _launch(self, addresses: List[str]) -> None:
        """Everybody can be reached: start the launcher."""
        order, plan = self._order, self._plan
        plan["addresses"] = addresses
        if order.get("builtin_script"):
            plan["script"] = as_file("{}.py".format(order["builtin_script"]))
        listener = None if self._node else self._listen(int(order["control_port"]))
        ours, theirs = socket.socketpair()
        ours.settimeout(SILENCE_SECONDS)
        first, limit = self._node * int(plan["workers"]), int(order["log_limit_bytes"])
        outputs = [self._output.open_rank(first + local_rank, limit) for local_rank in range(int(plan["workers"]))]
        writing = self._output.open_platform(self._node)
        given = outputs if listener is None else [*outputs, listener.fileno()]
        environment = {**self._place.environment, **order.get("environment", {})}
        self._tree.start(theirs.fileno(), environment, output=writing, inherit=given)
        for descriptor in [writing, *outputs]:
            os.close(descriptor)
        told = {
            "plan": plan,
            "token": self._place.token,
            "control_port": order["control_port"],
            "listener": None if listener is None else listener.fileno(),
            "outputs": outputs,
            "python": order.get("python") or sys.executable,
            "environment": environment,
            "start_seconds": self._limits.start_seconds,
            "devices": [str(gpu) for gpu in range(int(order.get("gpus", 0)))],
            "alone": self._tree.first,
            "umask": 0o002,
        }
        if listener is not None:
            listener.close()
        theirs.close()
        self._link = Link(ours)
        self._selector.register(self._link, selectors.EVENT_READ, self._link)
        self._say(told)

    def _listen(self, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._place.address else socket.AF_INET
        return socket.create_server((self._place.address, port), family=family, backlog=128)

    # What happens

    def _handle(self, ready: Any) -> None:
        if isinstance(ready, RankLog):
            if self._output.pump(ready):
                self._output_at = time.time()
        elif isinstance(ready, Link):
            self._listen_to(ready)
        elif isinstance(ready, Speaker):
            ready.flush()
        elif isinstance(ready, Names):
            self._take_names(ready)
        else:
            asked = [one.outside for one in self._signals.read() if one.number in self._tree.ends]
            for gone in self._tree.reap():
                self._over |= self._tree.reaped(gone)
            if any(asked):
                self._limits.kill_by(time.monotonic() + float(self._order["grace_seconds"]))
                self._end(Verdict("stopped", "stopped", "The run was stopped on request."))

    def _take_names(self, names: Names) -> None:
        try:
            addresses = names.read()
            if addresses is None:
                return
            self._forget_names()
            self._launch(addresses)
        except OSError as error:
            self._forget_names()
            message = "Node {} could not be started: {}.".format(self._node, error)
            self._blame(Verdict("platform_error", "node_not_started", message))

    def _forget_names(self) -> None:
        if self._names is not None:
            self._selector.unregister(self._names)
            self._names.close()
            self._names = None

    def _listen_to(self, link: Link) -> None:
        try:
            messages = link.receive()
        except ConnectionLost:
            self._selector.unregister(link)
            return
        self._limits.heard()
        for message in messages:
            self._take(message)

    def _take(self, message: Message) -> None:
        """One word of the launcher's; `report` says what there is."""
        kind = message.get("type")
        if kind == "running":
            self._running(message)
        elif kind == "cause":
            self._take_cause(message["cause"])
        elif kind == "rank_ended" and message["aborted_late"]:
            self._forgive(message["rank"])
        elif kind == "members":
            self._record.data["members"].append({name: message[name] for name in ("nodes", "round", "at")})
            self._record.save()
        elif kind == "sample":
            self._record.add_sample(message)
        elif kind == "progress":
            self._record.progress(float(message["at"]))
        elif kind == "stacks":
            self._record.add_stacks(int(message["rank"]), str(message["text"]))
        elif kind == "ended":
            self._told_end = True
            if self._aborting:
                self._kill()

    def _running(self, message: Message) -> None:
        self._limits.running({})
        self._record.data["round"] = message.get("round", 0)
        if not self._record.started:
            self._guard.watch()
            now = time.time()
            self._record.data.update(phase="running", started_at=now, progress_at=now)
        self._record.save()

    def _take_cause(self, found: Dict[str, Any]) -> None:
        """A rank that failed may have met one of the kernel's limits: then that is the cause."""
        verdict = self._limits.explain(found, time.monotonic())
        if verdict is not None:
            told = {"kind": verdict.kind, "code": verdict.code, "message": verdict.message, "data": dict(verdict.data)}
            found = {**found, **told}
        self._record.data["causes"].append(found)

    def _forgive(self, rank: int) -> None:
        sentence = (
            "Rank {}: the script returned from its last line, then its process aborted (SIGABRT) while the "
            "interpreter was shutting down. The run counts as completed."
        ).format(rank)
        self._output.ranks[rank].note(sentence)
        self._record.add_detail(sentence)

    # Time and limits

    def _patience(self) -> float:
        now = time.monotonic()
        return self._output.patience(now, self._limits.patience(now))

    def _keep_time(self) -> None:
        now = time.monotonic()
        self._guard.kill_at = self._limits.kill_at
        self._output.keep_time(now)
        if self._limits.term_at is not None and now >= self._limits.term_at:
            self._end(self._limits.time_is_up())
        if self._limits.kill_at is not None and now >= self._limits.kill_at:
            self._kill()
        if not self._over and self._limits.due(now):
            if now >= self._beat_at:
                self._beat_at = now + _BEAT_SECONDS
                self._record.beat()
            if now - self._output_told_at >= _OUTPUT_SECONDS:
                self._look_at_metrics()
                self._tell_of_output(now)
            verdict = None if self._aborting else self._limits.look(now)
            if verdict is not None:
                self._blame(verdict)

    def _look_at_metrics(self) -> None:
        """Metrics go past us, from the code into its own file: only whether they changed is looked at."""
        if self._node:
            return
        with contextlib.suppress(OSError):
            state = os.lstat(self._metrics_path)
            seen = (state.st_mtime_ns, state.st_size)
            if seen != self._metrics_seen:
                self._metrics_seen = seen
                self._output_at = time.time()

    def _tell_of_output(self, now: float) -> None:
        """Output is a sign of progress, which the launcher, whose ranks write past it, cannot see."""
        if self._output_at is None:
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
        """End the node at once, for this reason. A run that could go on without this node hears of it first."""
        self._record.add_cause(verdict)
        elastic = 0 < int(self._plan.get("min_nodes", 0)) < int(self._plan["nodes"])
        if elastic and self._record.started and self._link is not None:
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
        self._limits.kill_at = self._limits.term_at = self._guard.kill_at = None
        self._guard.leave_at = time.monotonic() + _LEAVE_SECONDS
        self._tree.kill()
        self._over |= not self._tree.launched

    def _finish(self) -> int:
        """The launcher has ended, and now everything has: empty the pipes, write the last record."""
        self._guard.leave_at = time.monotonic() + _LEAVE_SECONDS
        self._forget_names()
        self._tree.end_all()
        finished_at = time.time()
        self._drain()
        if self._output_at is not None:
            self._record.progress(self._output_at)
        ended = self._tree.exit
        if ended is not None and not self._told_end and not self._record.causes:
            self._record.add_cause(self._limits.why(ended))
            self._record.add_detail("\n".join(self._output.platform_lines))
        self._limits.last_look()
        for problem in self._output.problems:
            self._record.add_detail(problem)
        cause = first_cause([cause for cause in self._record.causes if cause.get("rank") in self._output.ranks])
        if cause is not None:
            cause["last_lines"] = self._output.ranks[cause["rank"]].last_lines()
        self._code = self._say_last(finished_at)
        self._output.speaker.finish(_DRAIN_SECONDS)
        self._record.finish(_STORE_TRIES)
        return self._code

    def _drain(self) -> None:
        give_up_at = time.monotonic() + _DRAIN_SECONDS
        while self._link is not None and self._link in self._selector.get_map() and time.monotonic() < give_up_at:
            self._listen_to(self._link)
        self._output.drain(give_up_at)

    def _say_last(self, finished_at: float) -> int:
        """Leave the last record with the kubelet; returns the exit code of this process."""
        exit_code = None if self._tree.exit is None else self._tree.exit.exit_code
        self._record.data.update(phase="ended", finished_at=finished_at, exit_code=exit_code)
        with contextlib.suppress(OSError):
            descriptor = open_file(Path(self._place.termination), os.O_TRUNC)
            try:
                os.write(descriptor, sign_record(self._record.data, self._place.key, LONGEST))
            finally:
                os.close(descriptor)
        return 0 if exit_code == 0 and not self._record.causes else 1

    def _leave_late(self) -> None:
        """Of the guard's thread, while the other one is held by a write: say what is known, and go."""
        if self._code is None:
            if self._tree.exit is None and not self._record.causes:
                self._record.add_cause(self._limits.time_is_up())
            self._record.add_detail("The storage of the run stood still.")
            self._code = self._say_last(time.time())
        os._exit(self._code)
