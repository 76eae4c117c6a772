"""The warm pool's daemon: forks the supervisors of new runs, and keeps a fork server for each image.

    python -I -S -c "..." < settings

The settings are DaemonSettings as JSON. If the daemon dies, runs only start more slowly. Runs that it has started
continue, since each has a session of its own. Its fork servers die with it, and the next submission starts cold. Each
root folder of runs has at most one daemon, which holds `.warm_pool/lock`. It ends after `idle_seconds` without
requests. Imports no installed package, so that its forks are small.
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
from pathlib import Path
from typing import TypedDict

from runtime import pids
from runtime.backends.local.warm_pool import protocol, starter
from runtime.backends.local.warm_pool.protocol import ForkServer
from runtime.launcher.processes import reap, spawn

STATE_FILE = "daemon.json"
"""The file in the pool's folder that holds the daemon's DaemonState while it runs."""
_POLL_SECONDS = 1.0
"""Interval at which an idle daemon reaps children and checks whether to end; neither is urgent."""
_LOCK_SECONDS = 3.0
"""How long to wait for the lock. A daemon of another version that was asked to end may still hold it for a moment."""
_LOCK_RETRY_SECONDS = 0.05
"""Interval between attempts to get the lock: short, so that the daemon's start is hardly delayed."""
_RESTART_SECONDS = 60.0
"""Pause before a fork server that has ended is started again. Without it, a fork server whose imports fail would be
started at every request."""
_MAX_MESSAGE_BYTES = 1 << 18
"""Maximum length of a message about a fork server: more than the kernel lets a process send by default (about 200 KiB,
`net.core.wmem_default`), so none is cut off. A usual message has about 1 KiB."""
_FORK_SERVER = Path(__file__).resolve().parents[3] / "launcher" / "warm" / "forkserver.py"
"""The program of a fork server. The image's Python runs it by its path, since an image does not have this package."""


class DaemonSettings(TypedDict):
    """The daemon's input. `root` is the folder of runs. `version` is our code's: clients replace an old daemon.

    The daemon ends after `idle_seconds` without requests. `fork_server` is the first fork server to start; None: none.
    """

    root: str
    version: str
    idle_seconds: float
    fork_server: ForkServer | None


class DaemonState(TypedDict):
    """The running daemon, in `STATE_FILE`: its pid, its `pids.start_time`, and the version of the code that it runs."""

    pid: int
    start_time: int | None
    version: str


def main() -> None:
    """Detach, read the settings from stdin, and serve."""
    # The client has started this process in a session of its own, and waits for its end. The fork becomes the daemon.
    if os.fork():
        os._exit(0)
    settings: DaemonSettings = json.loads(sys.stdin.buffer.read())
    folder = Path(settings["root"]) / protocol.FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if _acquire(lock_fd):
        Daemon(folder, settings, lock_fd).run()


def _acquire(lock_fd: int) -> bool:
    """Lock the file with this descriptor; return False if another daemon keeps the lock."""
    give_up_at = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up_at:
                return False
            time.sleep(_LOCK_RETRY_SECONDS)  # flock(2) has no timeout
        else:
            return True


class Daemon:
    """Forks supervisors for requests, and fork servers for the images that the requests name."""

    def __init__(self, folder: Path, settings: DaemonSettings, lock_fd: int) -> None:
        self._folder = folder
        self._settings = settings
        self._lock_fd = lock_fd
        self._fork_servers: dict[int, str] = {}
        """Names of the fork servers that run, by pid."""
        self._ended_at: dict[str, float] = {}
        """When a fork server last ended (monotonic), by name."""
        # The daemon starts the fork servers. Its forks receive the requests for them, and pass the requests on through
        # this socket pair. Unlike a pipe, a SOCK_SEQPACKET socket never mixes or splits the messages of several forks.
        self._fork_server_reader, self._fork_server_writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._fork_server_reader.setblocking(False)
        self._is_stopping = False

    def run(self) -> None:
        """Serve until SIGTERM, or until there was no request for `idle_seconds`."""
        # All paths are relative to the pool's folder, since the address of a Unix socket has at most 107 bytes.
        os.chdir(self._folder)
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        listener = socket.socket(socket.AF_UNIX)
        Path(protocol.SOCKET).unlink(missing_ok=True)
        listener.bind(protocol.SOCKET)
        listener.listen(64)  # submissions that may wait while the daemon forks, which takes milliseconds
        start_time = pids.start_time(os.getpid())
        state: DaemonState = {"pid": os.getpid(), "start_time": start_time, "version": self._settings["version"]}
        # A rename, so that readers never see half a file.
        Path(f"{STATE_FILE}.new").write_text(json.dumps(state))
        Path(f"{STATE_FILE}.new").rename(STATE_FILE)
        signal.signal(signal.SIGTERM, self._stop)
        # The garbage collector no longer writes to these objects, so forks share their memory pages.
        gc.collect()
        gc.freeze()
        if self._settings["fork_server"] is not None:
            self._start_fork_server(self._settings["fork_server"])
        self._serve(listener)
        for name in (STATE_FILE, protocol.SOCKET):
            Path(name).unlink(missing_ok=True)
        for pid in self._fork_servers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for name in self._fork_servers.values():  # a fork server's socket has the same name
            Path(name).unlink(missing_ok=True)

    def _serve(self, listener: socket.socket) -> None:
        """Handle requests and reap children until the daemon is stopped or idle for too long."""
        last_request_at = time.monotonic()
        while not self._is_stopping and time.monotonic() - last_request_at < self._settings["idle_seconds"]:
            ready, _, _ = select.select([listener, self._fork_server_reader], [], [], _POLL_SECONDS)
            self._reap()
            if self._fork_server_reader in ready:
                self._start_needed_fork_servers()
            if listener in ready and not self._is_stopping:
                last_request_at = time.monotonic()
                self._accept(listener)

    def _stop(self, _number: int, _frame: object) -> None:
        self._is_stopping = True

    def _reap(self) -> None:
        for process_exit in reap():
            name = self._fork_servers.pop(process_exit.pid, None)
            if name is not None:
                Path(name).unlink(missing_ok=True)
                self._ended_at[name] = time.monotonic()

    # Supervisors

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection, and handle its request in a fork, so that the daemon never waits for a submitter."""
        with contextlib.suppress(OSError):  # the submitter gets no answer, and starts the run cold
            connection, _address = listener.accept()
            with connection:
                if not os.fork():
                    listener.close()
                    self._handle_request(connection)

    def _handle_request(self, connection: socket.socket) -> None:
        """In a fork of the daemon: receive a request, and become the supervisors of the run that it starts."""
        try:
            # A second fork, so that init adopts the supervisor and the daemon need not reap it.
            if os.fork():
                os._exit(0)
            os.close(self._lock_fd)  # a run must not keep the next daemon from getting the lock
            self._fork_server_reader.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            os.chdir("/")
            request = protocol.receive_request(connection)
            if request["fork_server"] is not None:
                self._fork_server_writer.sendall(json.dumps(request["fork_server"]).encode())
            self._fork_server_writer.close()
            connection.sendall(protocol.ACCEPTED)
            # The input ends when the submitter has recorded the submission, or has died. So this wait needs no limit.
            connection.settimeout(None)
            while connection.recv(1):
                pass
            connection.close()
            start = request["start"]  # None: the request only prepares a fork server
            if start is not None and starter.is_submitted(start):
                starter.supervise(start)
        except BaseException as error:  # this process must never return into the daemon's loop
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(0)

    # Fork servers

    def _start_needed_fork_servers(self) -> None:
        """Start the fork servers that requests need, except those that run or ended less than _RESTART_SECONDS ago."""
        with contextlib.suppress(BlockingIOError):  # all messages are read
            while message := self._fork_server_reader.recv(_MAX_MESSAGE_BYTES):
                fork_server: ForkServer = json.loads(message)
                name = fork_server["name"]
                ended_at = self._ended_at.get(name)
                is_running = name in self._fork_servers.values()
                if not is_running and (ended_at is None or time.monotonic() >= ended_at + _RESTART_SECONDS):
                    self._start_fork_server(fork_server)

    def _start_fork_server(self, fork_server: ForkServer) -> None:
        idle_seconds = str(self._settings["idle_seconds"])
        arguments = [fork_server["python"], "-u", str(_FORK_SERVER), fork_server["name"], idle_seconds]
        arguments += fork_server["modules"]
        environment = fork_server["environment"]
        pid = spawn(arguments, environment, output_fd=2, folder=str(self._folder), new_session=True)
        self._fork_servers[pid] = fork_server["name"]
