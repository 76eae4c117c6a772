"""The nursery of one root of runs: a process that is ready to be a run's supervisors, and keeps images' zygotes.

    python -I -S -c "..." < settings

It hides forks. The one rule: it may die at any moment, and nothing but speed is lost. Runs that it started go on
without it (they are sessions of their own); what it keeps ready (`runtime.launcher.zygote`) dies with it, and a
submission that finds nobody starts cold. There is one for a root, the holder of `.nursery/lock`; it goes by itself when
nothing was submitted for long. Standard library only, so that what it forks is small.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.backends import identity, starter, warmstart
from runtime.launcher.processes import reap, spawn

SETTINGS = "nursery.json"
_TICK_SECONDS = 1.0
_ORDER_SECONDS = 10.0
_LOCK_SECONDS = 3.0
_LOCK_PAUSE_SECONDS = 0.05
_AGAIN_SECONDS = 60.0
_MOST_DESCRIPTORS = 250
_ZYGOTE = Path(__file__).resolve().parents[1] / "launcher" / "zygote.py"


def main() -> None:
    """Detach, read the settings from stdin, and serve."""
    if os.fork():
        os._exit(0)
    settings = json.loads(sys.stdin.buffer.read())
    folder = Path(settings["root"]) / warmstart.FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if _is_ours(lock):
        Nursery(folder, settings, lock).run()


def _is_ours(lock: int) -> bool:
    """Whether no other nursery stays. One that was sent away may need a moment to go."""
    give_up_at = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up_at:
                return False
            time.sleep(_LOCK_PAUSE_SECONDS)  # flock(2) waits for ever or not at all
        else:
            return True


class Nursery:
    """Forks supervisors for orders, and zygotes for the images that the orders name."""

    def __init__(self, folder: Path, settings: dict[str, Any], lock: int) -> None:
        self._folder = folder
        self._settings = settings
        self._lock = lock
        self._idle = float(settings["idle_seconds"])
        self._zygotes: dict[int, str] = {}
        self._gone_at: dict[str, float] = {}
        self._wishes, self._wishing = os.pipe()
        os.set_blocking(self._wishes, False)
        self._end = False

    def run(self) -> None:
        """Serve until nobody has asked for long, or SIGTERM."""
        os.chdir(self._folder)
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        listener = socket.socket(socket.AF_UNIX)
        Path(warmstart.SOCKET).unlink(missing_ok=True)
        listener.bind(warmstart.SOCKET)
        listener.listen(64)
        started = identity.start_time(os.getpid())
        known = {"pid": os.getpid(), "start_time": started, "version": self._settings["version"]}
        Path(f"{SETTINGS}.new").write_text(json.dumps(known))
        Path(f"{SETTINGS}.new").rename(SETTINGS)
        signal.signal(signal.SIGTERM, self._stop)
        gc.collect()
        gc.freeze()
        if self._settings["wish"] is not None:
            self._start_zygote(self._settings["wish"])
        asked = time.monotonic()
        while not self._end and time.monotonic() - asked < self._idle:
            ready, _, _ = select.select([listener.fileno(), self._wishes], [], [], _TICK_SECONDS)
            self._take_away_the_dead()
            if self._wishes in ready:
                self._fulfil()
            if listener.fileno() in ready and not self._end:
                asked = time.monotonic()
                self._take_an_order(listener)
        for name in (SETTINGS, warmstart.SOCKET):
            Path(name).unlink(missing_ok=True)
        for pid in self._zygotes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for name in self._zygotes.values():
            _forget(name)

    def _stop(self, _number: int, _frame: object) -> None:
        self._end = True

    def _take_away_the_dead(self) -> None:
        for gone in reap():
            name = self._zygotes.pop(gone.pid, None)
            if name is not None:
                _forget(name)
                self._gone_at[name] = time.monotonic()

    # Supervisors

    def _take_an_order(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _address = listener.accept()
            with connection:
                if not os.fork():
                    listener.close()
                    self._be_supervisors(connection)

    def _be_supervisors(self, connection: socket.socket) -> None:
        """In a fork: what the starter does that was executed for one submission."""
        try:
            # Forked once more, so that nobody is this process's child: it waits for none of them.
            if os.fork():
                os._exit(0)
            os.close(self._lock)
            os.close(self._wishes)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            os.chdir("/")
            order = _receive(connection)
            if order["wish"] is not None:
                os.write(self._wishing, json.dumps(order["wish"]).encode() + b"\n")
            os.close(self._wishing)
            connection.sendall(warmstart.ACCEPTED)
            connection.settimeout(None)
            # End of input: the submitter has written its record, or has died before it could.
            while connection.recv(1):
                pass
            connection.close()
            if order["nodes"] and starter.is_submitted(order):
                starter.supervise(order)
        except BaseException as error:  # nothing of a fork may return to where the nursery waits
            sys.stderr.write(f"a submission was not started: {error!r}\n")
        finally:
            os._exit(0)

    # Zygotes

    def _fulfil(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self._wishes, 1 << 16).splitlines():
                wish = json.loads(line)
                name = wish["name"]
                again_at = self._gone_at.get(name, -_AGAIN_SECONDS) + _AGAIN_SECONDS
                if name not in self._zygotes.values() and time.monotonic() >= again_at:
                    self._start_zygote(wish)

    def _start_zygote(self, wish: dict[str, Any]) -> None:
        arguments = [wish["python"], "-u", str(_ZYGOTE), wish["name"], str(self._idle), *wish["modules"]]
        pid = spawn(arguments, wish["environment"], output=2, folder=str(self._folder), new_session=True)
        self._zygotes[pid] = wish["name"]


def _forget(zygote: str) -> None:
    for name in (zygote, zygote + warmstart.PLAIN):
        Path(name).unlink(missing_ok=True)


def _receive(connection: socket.socket) -> dict[str, Any]:
    """One order, its locks being descriptors of this process. Raises OSError, ValueError."""
    connection.settimeout(_ORDER_SECONDS)
    head, locks, _flags, _address = socket.recv_fds(connection, warmstart.LENGTH.size, _MOST_DESCRIPTORS)
    left = warmstart.LENGTH.unpack(head)[0]
    pieces = []
    while left:
        piece = connection.recv(min(left, 1 << 20))
        if not piece:
            raise ConnectionResetError("half an order")
        pieces.append(piece)
        left -= len(piece)
    order: dict[str, Any] = json.loads(b"".join(pieces))
    order["locks"] = _in_order(locks, len(order["nodes"]))
    return order


def _in_order(locks: Sequence[int], nodes: int) -> list[int]:
    if len(locks) != nodes:
        raise ValueError("locks are missing")
    return list(locks)
