"""One node of a local run: a detached process that starts the launcher in its sandbox and holds it to its limits.

It hides pipes, clocks and kills. Its one rule: it needs nobody. The order comes over stdin once; from then on the
deadline, the memory limit, the log caps and the record of what happened are its own, whether a console lives or not,
and if it dies itself the kernel takes the sandbox with it. Standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from runtime.backends import identity, watchdog
from runtime.backends.ranklog import RankLog
from runtime.launcher.processes import Exit, reap, send_signal, spawn
from runtime.launcher.report import ConnectionLost, Link, first_cause

START_SECONDS = 90.0
SILENCE_SECONDS = 12.0
KILL_MARGIN_SECONDS = 0.25
"""SIGKILL goes out this long before the deadline, so that nothing is left when it is there."""
_TICK_SECONDS = 0.25
_BELL_SECONDS = 0.02
_DRAIN_SECONDS = 5.0
_PLATFORM_LOG_BYTES = 1 << 20


class Supervisor:
    """The node, from the launcher's start to the last line of its record (`nodes/<node>.json`)."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._node: int = order["node"]
        self._folder = Path(order["folder"])
        self._record_path = self._folder / "nodes" / f"{self._node}.json"
        self._stop_path = self._folder / "stop.json"
        self._metrics_path = self._folder / "run" / "metrics.jsonl"
        self._record: dict[str, Any] = {
            "node": self._node,
            "phase": "starting",
            "address": order["launcher"]["plan"]["addresses"][self._node],
            "pid": os.getpid(),
            "start_time": identity.start_time(os.getpid()),
            "started_at": None,
            "finished_at": None,
            "exit_code": None,
            "detail": "",
            "causes": [],
        }
        self._selector = selectors.DefaultSelector()
        self._logs: dict[int, RankLog] = {}
        self._platform_log: RankLog | None = None
        self._link: Link | None = None
        self._ranks_by_pid: dict[int, int] = {}
        self._sandbox: int = 0
        self._init = 0
        self._exit: Exit | None = None
        self._told_end = False
        self._begun = time.monotonic()
        self._heard = self._begun
        self._term_at: float | None = None
        self._kill_at: float | None = None
        self._beat_at = 0.0
        self._ring_at = 0.0
        self._news = False
        self._unsaved = False
        self._metrics_seen: tuple[int, int] = (0, 0)

    def run(self) -> None:
        """Supervise to the end."""
        self._save()
        watchdog.limit_itself(int(self._order["process_limit"]))
        self._catch_signals()
        self._start()
        while self._exit is None:
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
        info_reading, info_writing = os.pipe()
        inherit = [theirs.fileno(), info_writing, *outputs]
        listener: int | None = order["listener"]
        if listener is not None:
            inherit.append(listener)
        arguments = [
            *order["sandbox"][:1],
            "--info-fd",
            str(info_writing),
            *order["sandbox"][1:],
            *order["command"],
            "--socket",
            str(theirs.fileno()),
        ]
        self._sandbox = spawn(arguments, {}, output=platform_writing, inherit=inherit)
        for descriptor in [platform_writing, info_writing, *outputs]:
            os.close(descriptor)
        theirs.close()
        if listener is not None:
            os.close(listener)
        self._link = Link(ours)
        self._selector.register(self._link, selectors.EVENT_READ, self._link)
        with contextlib.suppress(ConnectionLost):
            self._link.send({**order["launcher"], "outputs": outputs, "listener": listener})
        with os.fdopen(info_reading, "rb") as info, contextlib.suppress(ValueError, KeyError):
            self._init = int(json.loads(info.read())["child-pid"])

    def _open_log(self, name: str, reading: int, limit_bytes: int) -> RankLog:
        log = RankLog(self._folder / "logs" / name, reading, limit_bytes)
        self._selector.register(log, selectors.EVENT_READ, log)
        return log

    # What happens

    def _handle(self, ready: Any) -> None:
        if isinstance(ready, RankLog):
            self._news |= ready.pump()
            if not ready.open:
                self._selector.unregister(ready)
        elif isinstance(ready, Link):
            self._listen(ready)
        else:
            with contextlib.suppress(BlockingIOError):
                ready[0].recv(4096)
            for gone in reap():
                if gone.pid == self._sandbox:
                    self._exit = gone
            self._look_for_stop()

    def _listen(self, link: Link) -> None:
        try:
            messages = link.receive()
        except ConnectionLost:
            self._selector.unregister(link)
            return
        self._heard = time.monotonic()
        for message in messages:
            match message.get("type"):
                case "running":
                    self._running(message["pids"])
                case "cause":
                    self._record["causes"].append(message["cause"])
                case "rank_ended" if message["aborted_late"]:
                    self._forgive(message["rank"])
                case "ended":
                    self._told_end = True

    def _running(self, pids: dict[str, int]) -> None:
        self._ranks_by_pid = {int(pid): rank for pid, rank in pids.items()}
        now = time.monotonic()
        deadline = float(self._order["deadline_seconds"])
        grace = min(float(self._order["grace_seconds"]), deadline / 2)
        self._term_at = now + max(0.0, deadline - grace)
        self._kill_at = now + max(0.0, deadline - KILL_MARGIN_SECONDS)
        self._record.update(phase="running", started_at=time.time())
        self._save()

    def _forgive(self, rank: int) -> None:
        sentence = (
            f"Rank {rank}: the script returned from its last line, then its process aborted (SIGABRT) while the "
            "interpreter was shutting down. The run counts as completed."
        )
        self._logs[rank].note(sentence)
        self._record["detail"] = f"{self._record['detail']} {sentence}".strip()

    def _look_for_stop(self) -> None:
        try:
            stop = json.loads(self._stop_path.read_bytes())
        except (OSError, ValueError):
            return
        kill_at = time.monotonic() + stop["at"] + stop["grace_seconds"] - time.time()
        if self._kill_at is None or kill_at < self._kill_at:
            self._kill_at = kill_at
        self._end("stopped", "The run was stopped on request.")

    # Limits

    def _patience(self) -> float:
        now = time.monotonic()
        wait = _TICK_SECONDS
        if self._news:
            wait = min(wait, self._ring_at - now)
        for moment in (self._term_at, self._kill_at):
            if moment is not None:
                wait = min(wait, moment - now)
        return max(0.0, wait)

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self._term_at is not None and now >= self._term_at:
            self._end("time_limit", "The run reached its time limit.")
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()
        if now >= self._beat_at:
            self._beat_at = now + _TICK_SECONDS
            self._watch(now)
        if self._news and now >= self._ring_at:
            self._ring()

    def _watch(self, now: float) -> None:
        if self._exit is not None:
            return
        if self._unsaved:
            self._save()
        else:
            # The record's time of change is this node's last known sign of life.
            with contextlib.suppress(OSError):
                os.utime(self._record_path)
        self._look_for_stop()
        self._look_at_metrics()
        if self._record["started_at"] is None and now - self._begun > START_SECONDS:
            self._blame("platform_error", "The node did not start in time.")
        elif now - self._heard > SILENCE_SECONDS:
            self._blame("node_lost", f"Node {self._node} stopped answering.")
        else:
            if self._record["started_at"] is None:
                self._look_at_siblings()
            self._weigh()

    def _look_at_siblings(self) -> None:
        """Until the launchers have met, none of them can tell that another will not come."""
        for path in self._folder.glob("nodes/*.json"):
            with contextlib.suppress(OSError, ValueError):
                sibling = json.loads(path.read_bytes())
                gone = sibling["phase"] != "ended" and not identity.is_alive(sibling["pid"], sibling["start_time"])
                if gone or sibling["causes"]:
                    self._blame("node_lost", f"Node {sibling['node']} was lost.", node=sibling["node"])
                    return

    def _weigh(self) -> None:
        if not self._init:
            return
        memory, processes = int(self._order["memory_bytes"]), int(self._order["process_limit"])
        # Until the launcher speaks, bubblewrap may still be at work in there, with the host's own /tmp in sight.
        started = self._record["started_at"] is not None
        usage = watchdog.look(self._init, enough_bytes=memory if started else None, enough_processes=processes)
        if usage.processes > processes:
            self._blame("code_failed", f"Node {self._node} ran more than {processes} processes at once.")
        elif usage.memory_bytes > memory:
            used = f"{usage.memory_bytes >> 20} MiB of memory, more than the {memory >> 20} MiB it has."
            rank = self._ranks_by_pid.get(usage.heaviest or 0)
            self._blame("out_of_memory", f"Node {self._node} used {used}", rank=rank)

    def _look_at_metrics(self) -> None:
        """Metrics go past us, from the code into its own file: only whether they changed is looked at."""
        if self._node:
            return
        with contextlib.suppress(OSError):
            state = self._metrics_path.lstat()
            seen = (state.st_mtime_ns, state.st_size)
            self._news |= seen != self._metrics_seen
            self._metrics_seen = seen

    # Ending

    def _end(self, kind: str, message: str) -> None:
        """Ask the ranks to end; the first reason given stays the reason."""
        self._term_at = None
        if self._record["phase"] == "stopping":
            return
        if self._record["phase"] == "starting":
            self._blame(kind, message)
            return
        if self._told_end:
            return
        self._add_cause(kind, message)
        self._record["phase"] = "stopping"
        self._save()
        if self._link is not None:
            with contextlib.suppress(ConnectionLost):
                self._link.send({"type": "end"})

    def _blame(self, kind: str, message: str, *, rank: int | None = None, node: int | None = None) -> None:
        """End the sandbox at once, for this reason."""
        self._add_cause(kind, message, rank=rank, node=node)
        self._kill()

    def _add_cause(self, kind: str, message: str, *, rank: int | None = None, node: int | None = None) -> None:
        where = self._node if node is None else node
        cause = {"kind": kind, "at": time.time(), "node": where, "rank": rank, "message": message}
        self._record["causes"].append(cause)

    def _kill(self) -> None:
        self._kill_at = self._term_at = None
        # The first process takes every other one of its pid namespace with it.
        for pid in (self._init, self._sandbox):
            if pid and self._exit is None:
                send_signal(pid, signal.SIGKILL)

    def _finish(self) -> None:
        """Nothing runs any more: empty the pipes, write the last record, ring once more."""
        give_up_at = time.monotonic() + _DRAIN_SECONDS
        waiting = [log for log in [*self._logs.values(), self._platform_log] if log is not None and log.open]
        if self._link is not None and self._link.fileno() >= 0:
            with contextlib.suppress(KeyError):
                self._listen(self._link)
        while waiting and time.monotonic() < give_up_at:
            for log in waiting:
                log.pump()
            waiting = [log for log in waiting if log.open]
        ended = self._exit
        if ended is not None and not self._told_end and not self._record["causes"]:
            self._explain(ended)
        problems = sorted({log.problem for log in self._logs.values() if log.problem})
        cause = first_cause([cause for cause in self._record["causes"] if cause.get("rank") in self._logs])
        if cause is not None:
            cause["last_lines"] = self._logs[cause["rank"]].last_lines()
        self._record.update(
            phase="ended",
            finished_at=time.time(),
            exit_code=None if ended is None else ended.exit_code,
            detail=" ".join([self._record["detail"], *problems]).strip(),
        )
        for _attempt in range(60):
            self._save()
            if not self._unsaved:
                break
            time.sleep(1)
        self._ring()

    def _explain(self, ended: Exit) -> None:
        """The launcher went without a word: killed from outside, or broken."""
        killed = bool(ended.signal) or (ended.exit_code or 0) > 128  # the shell's convention, bwrap's too
        if killed:
            self._add_cause("node_lost", f"The launcher of node {self._node} was killed.")
            return
        self._add_cause("platform_error", f"Node {self._node} could not be started or broke down.")
        if self._platform_log is not None:
            self._record["detail"] = "\n".join(self._platform_log.last_lines())

    # Telling

    def _save(self) -> None:
        temporary = self._record_path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(self._record))
            temporary.replace(self._record_path)
            self._unsaved = False
        except OSError:
            self._unsaved = True
        self._news = True

    def _ring(self) -> None:
        self._news = False
        self._ring_at = time.monotonic() + _BELL_SECONDS
        with contextlib.suppress(OSError):
            Path(self._order["bell"]).write_bytes(b"!")


def _is_submitted(order: dict[str, Any]) -> bool:
    """Whether this very submission is on record; a later one of the same name has another nonce."""
    try:
        return bool(json.loads((Path(order["folder"]) / "submission.json").read_bytes())["nonce"] == order["nonce"])
    except (OSError, ValueError):
        return False


def main() -> None:
    """Detach, read the order from stdin, and supervise: if the submission is on record, else vanish."""
    if os.fork():
        os._exit(0)
    order = json.loads(sys.stdin.buffer.read() or b"null")
    # End of input: the submitter has written its record, or has died before it could.
    if order is None or not _is_submitted(order):
        return
    for descriptor in order["keep"]:
        os.set_inheritable(descriptor, False)
    Supervisor(order).run()
