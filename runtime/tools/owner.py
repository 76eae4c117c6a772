"""Start, watch and end the tools of an installation: one process owns them all and answers on a Unix socket.

Each session is one TensorBoard in a bubblewrap sandbox without a network. It inherits the socket that it listens on, so
nothing of the console's is mounted into the sandbox but the interpreter and the session's logs, both read-only. The
tools end with this process, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import socketserver
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.backends import sandbox
from runtime.backends.supervision import cgroups, resource_limits
from runtime.errors import RuntimeFault
from runtime.launcher import seccomp
from runtime.tools.control import CONTROL_SOCKET, RECORD, SESSIONS_FOLDER, SOCKET, SessionRequest

PROGRAM = Path(__file__).with_name("tensorboard_server.py")
PROGRAM_TARGET = "/opt/trainyard/tensorboard_server.py"
LOGS_TARGET, VIEW_TARGET = "/logs", "/view"
"""Where the sandbox has the mounted folders, and the folder of links to the logs in them, which TensorBoard reads."""
MAX_PROCESSES = 128
"""Processes and threads of a tool; TensorBoard needs about 20."""
MAX_FILE_BYTES = 64 * 1024**2
_BACKLOG = 64
"""Requests that wait while the tool starts."""
_MAX_REQUEST_BYTES = 1 << 20
_HANDLER_SECONDS = 5.0
_END_SECONDS = 5.0
_SWEEP_SECONDS = 1.0
_CGROUPS = "cgroups"
LOG = "log"
"""What the tool prints, in its session's folder; it goes with the session."""


@dataclass(frozen=True)
class Limits:
    """How many tools run, for how long when idle, and how large each may be."""

    per_organization: int
    total: int
    idle_seconds: float
    memory_mib: int


@dataclass
class _Running:
    request: SessionRequest
    folder: Path
    process: subprocess.Popen[bytes]


class Owner:
    """The sessions below `root`. For one thread: a tool ends with the thread that started it.

    `url_path` returns the path of the URL that a session is under, by its key.
    """

    def __init__(self, root: Path, limits: Limits, url_path: Callable[[str], str]) -> None:
        self._root, self._limits, self._url_path = root, limits, url_path
        self._sessions: dict[str, _Running] = {}
        self._server: socketserver.UnixStreamServer | None = None

    def serve(self) -> None:
        """Answer until `stop`, then end all tools. Removes what an owner that was killed has left."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._root.chmod(0o700)
        for folder in self._folders():
            _remove(folder)
        control = self._root / CONTROL_SOCKET
        control.unlink(missing_ok=True)
        owner = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = _HANDLER_SECONDS

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the client has left
                    self.wfile.write(json.dumps(owner.answer(self.rfile.readline(_MAX_REQUEST_BYTES))).encode() + b"\n")

        class Server(socketserver.UnixStreamServer):
            def service_actions(self) -> None:
                owner.sweep()

        with Server(str(control), Handler) as self._server:
            try:
                self._server.serve_forever(_SWEEP_SECONDS)
            finally:
                control.unlink(missing_ok=True)
                for key in list(self._sessions):
                    self._end(key)

    def stop(self) -> None:
        """Make `serve` return. Call it in a thread of its own."""
        if self._server is not None:
            self._server.shutdown()

    def answer(self, line: bytes) -> dict[str, str]:
        """Return the answer to a request for a session."""
        try:
            return self._start(SessionRequest.from_data(json.loads(line)))
        except (RuntimeFault, OSError, ValueError, KeyError, TypeError) as error:
            return {"error": str(error) or type(error).__name__}

    def sweep(self) -> None:
        """End sessions that are idle, and forget those whose tool has ended."""
        now = time.time()
        for key, session in list(self._sessions.items()):
            try:
                used_at = (session.folder / RECORD).stat().st_mtime
            except FileNotFoundError:
                used_at = 0.0
            if session.process.poll() is not None or now - used_at > self._limits.idle_seconds:
                self._end(key)

    def _start(self, request: SessionRequest) -> dict[str, str]:
        self.sweep()
        for key, session in self._sessions.items():
            if session.request == request:
                os.utime(session.folder / RECORD)
                return {"key": key}
        of_organization = sum(each.request.organization == request.organization for each in self._sessions.values())
        if of_organization >= self._limits.per_organization or len(self._sessions) >= self._limits.total:
            return {"error": "limit"}
        key = secrets.token_urlsafe(12)  # 96 bits
        folder = self._root / SESSIONS_FOLDER / key
        folder.mkdir(parents=True, mode=0o700)
        try:
            process = self._spawn(key, folder, request)
            (folder / RECORD).write_text(json.dumps({"organization": request.organization, "user": request.user}))
        except BaseException:
            _remove(folder)
            raise
        self._sessions[key] = _Running(request, folder, process)
        return {"key": key}

    def _spawn(self, key: str, folder: Path, request: SessionRequest) -> subprocess.Popen[bytes]:
        memory_bytes = self._limits.memory_mib * 1024**2
        group = cgroups.create(
            f"trainyard-tool-{key}",
            memory_bytes=memory_bytes,
            processes=MAX_PROCESSES,
            cpus=1,
            announce=lambda folders: (folder / _CGROUPS).write_text(json.dumps([str(each) for each in folders])),
        )
        limits = resource_limits.kernel_limits(processes=MAX_PROCESSES, file_bytes=MAX_FILE_BYTES)

        def prepare() -> None:
            resource_limits.apply_limits(limits)
            os.nice(5)
            if group is not None:
                group.join()

        seccomp_fds = _seccomp_fds()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, (folder / LOG).open("ab") as log:
                listener.bind(str(folder / SOCKET))
                listener.listen(_BACKLOG)
                options = _sandbox_arguments(request, memory_bytes)
                for descriptor in seccomp_fds:
                    options += ["--seccomp", str(descriptor)]
                interpreter = str(Path(sys.prefix) / "bin" / "python")
                command = [interpreter, "-I", "-B", PROGRAM_TARGET, str(listener.fileno()), VIEW_TARGET]
                # The only copy of the socket that stays open is the tool's: when it ends, connections are refused.
                return subprocess.Popen(
                    [sandbox.find_bubblewrap(), *options, "--", *command, self._url_path(key)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env={},
                    pass_fds=(listener.fileno(), *seccomp_fds), preexec_fn=prepare,  # noqa: PLW1509  # one thread
                )  # fmt: skip
        finally:
            for descriptor in seccomp_fds:
                os.close(descriptor)

    def _end(self, key: str) -> None:
        session = self._sessions.pop(key)
        session.process.kill()  # the sandbox dies with bubblewrap
        with contextlib.suppress(subprocess.TimeoutExpired):
            session.process.wait(_END_SECONDS)
        _remove(session.folder)

    def _folders(self) -> list[Path]:
        folder = self._root / SESSIONS_FOLDER
        return list(folder.iterdir()) if folder.exists() else []


def _sandbox_arguments(request: SessionRequest, memory_bytes: int) -> list[str]:
    prefix = Path(sys.prefix)
    args = [*sandbox.base_arguments("tensorboard", memory_bytes), "--unshare-net"]
    for path in (*sandbox.interpreter_prefixes(prefix), prefix):
        if not path.is_relative_to("/usr"):
            args += ["--ro-bind", str(path), str(path)]
    args += ["--ro-bind", str(PROGRAM), PROGRAM_TARGET]
    for number, logs in enumerate(request.logs):
        mounted = f"{LOGS_TARGET}/{number}"
        args += ["--ro-bind", logs.folder, mounted]
        args += ["--symlink", f"{mounted}/{logs.below}".rstrip("/"), f"{VIEW_TARGET}/{logs.name}"]
    environment: dict[str, Any] = sandbox.base_environment(prefix, ()) | {"OPENBLAS_NUM_THREADS": "1"}
    return args + sandbox.closing_arguments(environment)


def _seccomp_fds() -> list[int]:
    """Return the descriptor from which bubblewrap reads the filter of system calls; none where there are no filters."""
    program = None if seccomp.unavailable_reason() else seccomp.sandbox_filter()
    if program is None:
        return []
    reader, writer = os.pipe()
    os.write(writer, program)  # does not block: a pipe holds far more
    os.close(writer)
    return [reader]


def _remove(folder: Path) -> None:
    """Remove a session's folder and its control groups. Safe to repeat."""
    with contextlib.suppress(OSError, ValueError):
        cgroups.remove(Path(path) for path in json.loads((folder / _CGROUPS).read_bytes()))
    shutil.rmtree(folder, ignore_errors=True)
