"""One node of a run as its keeper sees it, wherever it runs: what the launcher says, time, output, first to last word.

It hides the selector, and what is the same for a local node (`runtime.backends.supervisor`) and a pod (`pod_node`). The
one rule: one loop, one thread; whatever happens (a word of the launcher's, output, a signal, the clock) is handled to
its end before the next thing.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time

from .node_limits import SILENCE_SECONDS
from .ranklog import RankLog
from .record import Verdict
from .report import ConnectionLost, Link, first_cause

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Dict, Mapping, Optional, Protocol, Sequence

    from .node_limits import NodeLimits
    from .output import Output
    from .processes import Exit
    from .record import Record
    from .report import Message

    class Tree(Protocol):
        """All processes of the node. `exit` says how the launcher ended, None before."""

        exit: Optional[Exit]

        def kill(self) -> None:
            """End everything, now."""


_DRAIN_SECONDS = 5.0
_OUTPUT_SECONDS = 1.0
_START_SECONDS = 0.1
"""The start of the ranks is told this much later, with what they have done by then: many have ended."""
_ABORT_SECONDS = 0.5


class Node:
    """The node, from its launcher's start to the last line of its record.

    `order` is what it is held to, `plan` what its launcher is told of the run, `metrics` the file that its code reports
    numbers to.
    """

    _beat_seconds = 0.0
    _metrics_seconds = 0.0

    def __init__(
        self,
        order: Mapping[str, Any],
        plan: Mapping[str, Any],
        *,
        record: Record,
        limits: NodeLimits,
        tree: Tree,
        output: Output,
        metrics: str,
    ) -> None:
        self._order = order
        self._elastic = 0 < int(plan.get("min_nodes", 0)) < int(plan["nodes"])
        self._node = record.node
        self._record = record
        self._limits = limits
        self._tree = tree
        self._output = output
        self._selector = output.selector
        self._link: Optional[Link] = None
        self._told_end = False
        self._aborting = False
        self._beat_at = 0.0
        self._output_at: Optional[float] = None
        self._output_told_at = 0.0
        self._metrics_path = metrics
        self._metrics_at = 0.0
        self._metrics_seen = (0, 0)

    @property
    def _over(self) -> bool:
        return self._tree.exit is not None

    def _live(self) -> None:
        """To the end of the launcher, and of all that it started."""
        while not self._over:
            for key, _events in self._selector.select(self._patience()):
                self._handle(key.data)
            self._keep_time()

    # Starting

    def _launch(self, ranks: Sequence[int], listener: Optional[int], told: Message) -> None:
        """Start the launcher. It is told `told`, and where its ranks write; `listener` is the hub's, on node 0."""
        ours, theirs = socket.socketpair()
        ours.settimeout(SILENCE_SECONDS)
        limit = int(self._order["log_limit_bytes"])
        outputs = [self._output.open_rank(rank, limit) for rank in ranks]
        writing = self._output.open_platform(self._node)
        given = outputs if listener is None else [*outputs, listener]
        more = self._start_launcher(theirs.fileno(), writing, given)
        for descriptor in [writing, *given]:
            os.close(descriptor)
        theirs.close()
        self._link = Link(ours)
        self._selector.register(self._link, selectors.EVENT_READ, self._link)
        self._say({**told, "outputs": outputs, "listener": listener, **more})

    def _start_launcher(self, order_on: int, output: int, inherit: Sequence[int]) -> Message:
        """Start its process; what it is to be told besides. Raises OSError."""
        raise NotImplementedError

    # What happens

    def _handle(self, ready: Any) -> None:
        if isinstance(ready, RankLog):
            if self._output.pump(ready):
                self._record.news()
            if self._output.is_of_a_rank(ready):
                self._output_at = time.time()
        elif isinstance(ready, Link):
            self._listen(ready)
        else:
            self._hear(ready)

    def _hear(self, ready: Any) -> None:
        """What else was registered with the selector has something to say."""
        raise NotImplementedError

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
        self._limits.running({int(pid): rank for pid, rank in message["pids"].items()})
        self._record.data["round"] = message.get("round", 0)
        if not self._record.started:
            now = time.time()
            self._record.data.update(phase="running", started_at=now, progress_at=now)
            self._record.rest_the_bell(_START_SECONDS)
        self._record.save()

    def _take_cause(self, found: Message) -> None:
        """A rank that failed, or a node that others lost, may have met one of its limits: then that is the cause."""
        verdict = self._limits.explain(found, time.monotonic())
        if verdict is not None:
            told: Dict[str, Any] = {"kind": verdict.kind, "code": verdict.code, "message": verdict.message}
            told["data"] = dict(verdict.data)
            if found["kind"] == "node_lost":
                told["node"] = self._node
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
        return self._output.patience(now, min(self._limits.patience(now), self._record.patience(now)))

    def _keep_time(self) -> None:
        now = time.monotonic()
        self._output.keep_time(now)
        if self._limits.term_at is not None and now >= self._limits.term_at:
            self._end(self._limits.time_is_up())
        if self._limits.kill_at is not None and now >= self._limits.kill_at:
            self._kill()
        if not self._over and self._limits.due(now):
            self._look(now)
        self._record.ring_if_due(now)

    def _look(self, now: float) -> None:
        """A few times a second: show that this process lives, and look whether something is wrong."""
        if now >= self._beat_at:
            self._beat_at = now + self._beat_seconds
            self._record.beat()
        self._look_at_metrics(now)
        self._tell_of_output(now)
        verdict = None if self._aborting else self._limits.look(now)
        if verdict is not None:
            self._blame(verdict)

    def _look_at_metrics(self, now: float) -> None:
        """Metrics go past us, from the code into its own file: only whether they changed is looked at."""
        if self._node or now < self._metrics_at:
            return
        self._metrics_at = now + self._metrics_seconds
        with contextlib.suppress(OSError):
            state = os.lstat(self._metrics_path)
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
        """End the node at once, for this reason. A run that could go on without this node hears of it first."""
        self._record.add_cause(verdict)
        if self._elastic and self._record.started and verdict.kind != "node_lost":
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

    def _sum_up(self) -> None:
        """Nothing runs any more: empty the pipes, and bring all that is known into the record."""
        give_up_at = time.monotonic() + _DRAIN_SECONDS
        while self._link is not None and self._link in self._selector.get_map() and time.monotonic() < give_up_at:
            self._listen(self._link)
        self._output.drain(give_up_at)
        if self._output_at is not None:
            self._record.progress(self._output_at)
        ended = self._tree.exit
        if ended is not None and not self._told_end and not self._record.causes:
            self._explain(ended)
        self._look_back()
        for problem in self._output.problems:
            self._record.add_detail(problem)
        cause = first_cause([cause for cause in self._record.causes if cause.get("rank") in self._output.ranks])
        if cause is not None:
            cause["last_lines"] = self._output.ranks[cause["rank"]].last_lines()

    def _explain(self, ended: Exit) -> None:
        """The launcher went without a word: put down why."""
        raise NotImplementedError

    def _look_back(self) -> None:
        """A last look at what the node was held to."""
        raise NotImplementedError
