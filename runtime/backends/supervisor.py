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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.backends import identity, watchdog
from runtime.backends.limits import Limits
from runtime.backends.tree import Tree
from runtime.launcher.node import Node
from runtime.launcher.output import Output
from runtime.launcher.processes import Exit, reap
from runtime.launcher.record import Record, Verdict
from runtime.launcher.report import Message

_QUIET_SECONDS = 3.0
"""Who has told of progress since need not be told of work."""


class Supervisor(Node):
    """The node, from the launcher's start to the last line of its record."""

    _limits: Limits
    _tree: Tree

    def __init__(self, order: dict[str, Any]) -> None:
        folder, node, plan = Path(order["folder"]), order["node"], order["launcher"]["plan"]
        me = {"pid": os.getpid(), "start_time": identity.start_time(os.getpid())}
        record = Record(folder, Path(order["bell"]), node=node, address=plan["addresses"][node], about=me)
        tree = Tree(order, folder / "nodes" / f"{node}.cgroups")
        super().__init__(
            order,
            plan,
            record=record,
            limits=Limits(order, record, tree),
            tree=tree,
            output=Output(selectors.DefaultSelector(), folder / "logs"),
            metrics=str(folder / "run" / "metrics.jsonl"),
        )
        self._stop_path = folder / "stop.json"

    def run(self) -> None:
        """Supervise to the end."""
        self._record.begin()
        watchdog.keep_awake()
        self._catch_signals()
        self._launch(self._order["ranks"], self._order["listener"], self._order["launcher"])
        self._live()
        self._sum_up()
        self._tree.clear()
        ended = self._tree.exit
        self._record.finish(finished_at=time.time(), exit_code=None if ended is None else ended.exit_code)

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

    def _start_launcher(self, order_on: int, output: int, inherit: Sequence[int]) -> Message:
        return {"warm": self._tree.start(order_on, output=output, inherit=inherit)}

    # What happens

    def _hear(self, ready: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            ready[0].recv(4096)
        for gone in reap():
            self._tree.reaped(gone)
        self._look_for_stop()

    def _look(self, now: float) -> None:
        self._look_for_stop()
        super()._look(now)
        if self._limits.works and time.time() - (self._record.data["progress_at"] or 0.0) > _QUIET_SECONDS:
            self._say({"type": "working"})

    def _look_for_stop(self) -> None:
        try:
            stop = json.loads(self._stop_path.read_bytes())
        except (OSError, ValueError):
            return
        self._limits.kill_by(time.monotonic() + stop["at"] + stop["grace_seconds"] - time.time())
        self._end(Verdict("stopped", "stopped", "The run was stopped on request."))

    # Ending

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
        self._record.data["detail"] = "\n".join(self._output.platform_lines)

    def _look_back(self) -> None:
        """Code that failed on a disk which others had filled is not to blame."""
        verdict = self._limits.last_look()
        causes = self._record.data["causes"]
        if verdict is None or not any(cause["kind"] == "code_failed" for cause in causes):
            return
        self._record.add_cause(verdict)
        causes[-1]["at"] = min(float(cause["at"]) for cause in causes) - 0.001
