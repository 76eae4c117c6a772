"""One node of a run, as the first process of its pid namespace keeps it: see `pod` for what it is told and leaves.

It hides who is waited for, and whose word is asked last. The one rule is `node`'s: one loop, one thread.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

from .carried import as_file
from .names import Names
from .node import Node
from .pod_guard import Guard
from .pod_limits import PodLimits
from .pod_output import PodOutput
from .pod_tree import PodTree
from .processes import Exit
from .record import Record, Verdict, open_file
from .report import Message
from .signals import Signals
from .signed import LONGEST, STOP_FILE, read_stop, sign_record
from .speaker import Speaker

if TYPE_CHECKING:
    from .pod import Place

_SAFE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_SPEAK_SECONDS = 5.0
_LEAVE_SECONDS = 20.0
_STORE_TRIES = 3
"""For the record in the run's folder; the one that counts goes to the kubelet."""


class PodNode(Node):
    """The node, from the search for the others to the last word of its record."""

    _limits: PodLimits
    _tree: PodTree
    _output: PodOutput
    # Storage that many nodes share is not to be kept busy by signs of life.
    _beat_seconds = 5.0
    _metrics_seconds = 1.0

    def __init__(self, place: Place, order: Dict[str, Any]) -> None:
        self._place = place
        self._folder = Path(order.get("folder") or "/trainyard/run-root")
        self._plan: Dict[str, Any] = {**order["plan"], "node": place.node}
        record = Record(
            self._folder,
            None,
            node=place.node,
            address=place.address,
            about={"run": order["run"]},
            encode=lambda data: sign_record(data, place.key),
        )
        super().__init__(
            order,
            self._plan,
            record=record,
            limits=PodLimits(order, record),
            tree=PodTree(),
            output=PodOutput(selectors.DefaultSelector(), self._folder / "logs"),
            metrics=os.path.join(self._plan["run_dir"], "metrics.jsonl"),
        )
        self._signals = Signals()
        self._selector.register(self._signals, selectors.EVENT_READ, self._signals)
        self._guard = Guard(self._tree.kill, self._leave_late)
        self._names: Optional[Names] = None
        self._never = False
        self._hurried = b""
        self._code: Optional[int] = None

    @property
    def _over(self) -> bool:
        return self._never or super()._over

    def run(self) -> int:
        """Live to the node's end; returns the exit code of this process."""
        self._make_folders()
        self._record.begin()
        nodes = int(self._plan["nodes"])
        self._names = Names(list(self._order["names"])[:nodes], {self._node: self._place.address})
        self._selector.register(self._names, selectors.EVENT_READ, self._names)
        self._live()
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

    def _meet(self, addresses: List[str]) -> None:
        """Everybody can be reached: start the launcher."""
        order, plan = self._order, self._plan
        plan["addresses"] = addresses
        if order.get("builtin_script"):
            plan["script"] = as_file("{}.py".format(order["builtin_script"]))
        told = {
            "plan": plan,
            "token": self._place.token,
            "control_port": order["control_port"],
            "python": order.get("python") or sys.executable,
            "environment": self._environment,
            "devices": [str(gpu) for gpu in range(int(order.get("gpus", 0)))],
            "alone": self._tree.first,
            "umask": 0o002,
        }
        workers = int(plan["workers"])
        first = self._node * workers
        listener = None if self._node else self._open_hub(int(order["control_port"]))
        self._launch(range(first, first + workers), listener, told)

    def _start_launcher(self, order_on: int, output: int, inherit: Sequence[int]) -> Message:
        self._tree.start(order_on, self._environment, output=output, inherit=inherit)
        return {"start_seconds": self._limits.start_seconds}

    @property
    def _environment(self) -> Dict[str, str]:
        return {**self._place.environment, **self._order.get("environment", {})}

    def _open_hub(self, port: int) -> int:
        family = socket.AF_INET6 if ":" in self._place.address else socket.AF_INET
        return socket.create_server((self._place.address, port), family=family, backlog=128).detach()

    # What happens

    def _hear(self, ready: Any) -> None:
        if isinstance(ready, Speaker):
            ready.flush()
        elif isinstance(ready, Names):
            self._take_names(ready)
        else:
            asked = [one.outside for one in self._signals.read() if one.number in self._tree.ends]
            for gone in self._tree.reap():
                self._tree.reaped(gone)
            if any(asked):
                self._limits.kill_by(time.monotonic() + float(self._order["grace_seconds"]))
                self._end(Verdict("stopped", "stopped", "The run was stopped on request."))

    def _take_names(self, names: Names) -> None:
        try:
            addresses = names.read()
            if addresses is None:
                return
            self._forget_names()
            self._meet(addresses)
        except OSError as error:
            self._forget_names()
            message = "Node {} could not be started: {}.".format(self._node, error)
            self._blame(Verdict("platform_error", "node_not_started", message))

    def _look(self, now: float) -> None:
        super()._look(now)
        if self._record.phase == "stopping":
            self._look_for_haste()

    def _look_for_haste(self) -> None:
        """The kubelet has told us to end, once; who wants it sooner by now can only leave word in the run's folder."""
        try:
            descriptor = os.open(self._folder / "nodes" / STOP_FILE, _SAFE)
        except OSError:
            return
        try:
            data = os.read(descriptor, LONGEST)
        except OSError:
            return
        finally:
            os.close(descriptor)
        if data == self._hurried:
            return
        self._hurried = data
        within = read_stop(data, self._place.key, run=self._order["run"])
        if within is not None:
            self._limits.kill_by(time.monotonic() + within)

    def _forget_names(self) -> None:
        if self._names is not None:
            self._selector.unregister(self._names)
            self._names.close()
            self._names = None

    def _running(self, message: Message) -> None:
        if not self._record.started:
            self._guard.watch()
        super()._running(message)

    def _keep_time(self) -> None:
        self._guard.kill_at = self._limits.kill_at
        super()._keep_time()

    # Ending

    def _kill(self) -> None:
        self._guard.kill_at = None
        self._guard.leave_at = time.monotonic() + _LEAVE_SECONDS
        super()._kill()
        self._never = not self._tree.launched

    def _finish(self) -> int:
        """The launcher has ended, and now everything has: empty the pipes, write the last record."""
        self._guard.leave_at = time.monotonic() + _LEAVE_SECONDS
        self._forget_names()
        self._tree.end_all()
        finished_at = time.time()
        self._sum_up()
        self._code = self._say_last(finished_at)
        self._output.speaker.finish(_SPEAK_SECONDS)
        self._record.finish(_STORE_TRIES)
        return self._code

    def _explain(self, ended: Exit) -> None:
        self._record.add_cause(self._limits.why(ended))
        self._record.add_detail("\n".join(self._output.platform_lines))

    def _look_back(self) -> None:
        self._limits.last_look()

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
