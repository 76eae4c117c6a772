"""The owner of an installation's tools: one process that starts and ends them on request over a Unix socket.

Each session is one TensorBoard in a bubblewrap sandbox without a network. Only the interpreter and the session's logs
are mounted there, both read-only. The tool inherits the socket that it listens on. If this process ends, even by being
killed, the kernel ends all tools.
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
from runtime.backends.supervision.process_tree import read_init_pid
from runtime.errors import RuntimeFault
from runtime.launcher import seccomp
from runtime.tools.control import CONTROL_SOCKET, RECORD, SESSIONS_FOLDER, SOCKET, SessionRequest

PROGRAM = Path(__file__).with_name("tensorboard_server.py")
"""The program that runs inside the sandbox."""
PROGRAM_TARGET = "/opt/trainyard/tensorboard_server.py"
"""The path of the program in the sandbox."""
LOGS_TARGET = "/logs"
"""The folder in the sandbox with the session's logs: each `LogFolder.folder` is mounted below it, under a number."""
VIEW_TARGET = "/view"
"""The folder in the sandbox that TensorBoard reads. It has a link to each of the session's logs, by its name."""
MAX_PROCESSES = 128
"""Processes and threads that a tool may have; TensorBoard needs about 20."""
MAX_FILE_BYTES = 64 * 1024**2
"""The largest file that a tool may write. A tool can write only to its own /tmp and /dev/shm, which use its memory."""
_BACKLOG = 64
"""Connections that may wait while the tool starts: a browser opens several at once."""
_MAX_REQUEST_BYTES = 1 << 20
"""Maximum length of a request that is read. A request lists folders of logs, in far fewer bytes."""
_HANDLER_SECONDS = 5.0
"""How long a client may take to send its request. The owner handles one request at a time, so others wait."""
_END_SECONDS = 5.0
"""How long to wait until a killed tool has ended, which takes milliseconds."""
_CHECK_SECONDS = 1.0
"""Interval of checks for sessions that are idle or whose tool has ended; neither is urgent."""
_CGROUPS = "cgroups"
"""File in a session's folder that lists the tool's control groups, for their removal."""
LOG = "log"
"""File in a session's folder with the tool's output. It is removed with the session."""


@dataclass(frozen=True)
class Limits:
    """How many sessions may exist for one organization and in total, and the limits of each session.

    A session ends after `idle_seconds` without use.
    """

    per_organization: int
    total: int
    idle_seconds: float
    memory_mib: int


@dataclass
class _RunningSession:
    """What the owner keeps of a session. `folder` is the session's own, and `process` is bubblewrap with the tool."""

    request: SessionRequest
    folder: Path
    process: subprocess.Popen[bytes]


class Owner:
    """The sessions below `root`.

    Call `serve` in a thread that lasts: bubblewrap's `--die-with-parent` ends a tool with the thread that started it.
    `url_path` returns the path of a session's URL, by the session's key.
    """

    def __init__(self, root: Path, limits: Limits, url_path: Callable[[str], str]) -> None:
        self._root, self._limits, self._url_path = root, limits, url_path
        self._sessions: dict[str, _RunningSession] = {}
        self._server: socketserver.UnixStreamServer | None = None

    def serve(self) -> None:
        """Handle requests until `stop` is called, then end all tools.

        First removes the sessions of an earlier owner that was killed.
        """
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._root.chmod(0o700)
        for folder in self._session_folders():
            _remove(folder)
        control = self._root / CONTROL_SOCKET
        control.unlink(missing_ok=True)
        owner = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = _HANDLER_SECONDS

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the client has closed the connection, or sent nothing in time
                    answer = owner.handle_request(self.rfile.readline(_MAX_REQUEST_BYTES))
                    self.wfile.write(json.dumps(answer).encode() + b"\n")

        class Server(socketserver.UnixStreamServer):
            # `serve_forever` calls this after each request, and at least every `_CHECK_SECONDS`.
            def service_actions(self) -> None:
                owner.end_unused_sessions()

        with Server(str(control), Handler) as self._server:
            try:
                self._server.serve_forever(_CHECK_SECONDS)
            finally:
                control.unlink(missing_ok=True)
                for key in list(self._sessions):
                    self._end(key)

    def stop(self) -> None:
        """Make `serve` return, and wait for that. Call this in another thread than `serve`."""
        if self._server is not None:
            self._server.shutdown()

    def handle_request(self, line: bytes) -> dict[str, str]:
        """Start the session that `line`, a request in JSON, asks for; return its `key`, or an `error`."""
        try:
            return self._start(SessionRequest.from_data(json.loads(line)))
        except (RuntimeFault, OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
            return {"error": str(error) or type(error).__name__}

    def end_unused_sessions(self) -> None:
        """End sessions that are idle or whose tool has ended, and remove their folders."""
        now = time.time()
        for key, session in list(self._sessions.items()):
            try:
                used_at = (session.folder / RECORD).stat().st_mtime
            except FileNotFoundError:  # without its record, nobody can find the session
                used_at = 0.0
            is_idle = now - used_at > self._limits.idle_seconds
            if is_idle or session.process.poll() is not None:
                self._end(key)

    def _start(self, request: SessionRequest) -> dict[str, str]:
        """Return the `key` of a session for this request, new or existing.

        If a limit is reached, return the `error` "limit" instead.
        """
        self.end_unused_sessions()
        for key, session in self._sessions.items():
            if session.request == request:
                os.utime(session.folder / RECORD)
                return {"key": key}
        organization_ids = [session.request.organization_id for session in self._sessions.values()]
        is_organization_full = organization_ids.count(request.organization_id) >= self._limits.per_organization
        if is_organization_full or len(self._sessions) >= self._limits.total:
            return {"error": "limit"}
        key = secrets.token_urlsafe(12)  # 96 bits
        folder = self._root / SESSIONS_FOLDER / key
        folder.mkdir(parents=True, mode=0o700)
        try:
            # Before the tool starts: if the disk refuses the record, no tool is left running.
            record = {"organization": request.organization_id, "user": request.user_id}
            (folder / RECORD).write_text(json.dumps(record))
            process = self._spawn(key, folder, request)
        except BaseException:
            _remove(folder)
            raise
        self._sessions[key] = _RunningSession(request, folder, process)
        return {"key": key}

    def _spawn(self, key: str, folder: Path, request: SessionRequest) -> subprocess.Popen[bytes]:
        """Start the tool of a session in its sandbox. `folder` is the session's folder."""
        memory_bytes = self._limits.memory_mib * 1024**2
        # None where the kernel refuses control groups: the tool then runs without a limit of its memory.
        group = cgroups.create(
            f"trainyard-tool-{key}",
            memory_bytes=memory_bytes,
            processes=MAX_PROCESSES,
            cpus=1,
            record_folders=lambda groups: (folder / _CGROUPS).write_text(json.dumps([str(group) for group in groups])),
        )
        limits = resource_limits.kernel_limits(processes=MAX_PROCESSES, file_bytes=MAX_FILE_BYTES)

        def prepare() -> None:
            resource_limits.apply_limits(limits)
            os.nice(5)  # the console's own processes come first
            if group is not None:
                group.join()

        info_fd, bubblewrap_info_fd = os.pipe()
        seccomp_fds = _seccomp_fds()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, (folder / LOG).open("ab") as log:
                listener.bind(str(folder / SOCKET))
                listener.listen(_BACKLOG)
                options = [*_sandbox_arguments(request, memory_bytes), "--info-fd", str(bubblewrap_info_fd)]
                for descriptor in seccomp_fds:
                    options += ["--seccomp", str(descriptor)]
                interpreter = str(Path(sys.prefix) / "bin" / "python")
                command = [interpreter, "-I", "-B", PROGRAM_TARGET, str(listener.fileno()), VIEW_TARGET]
                # This process closes its copy of the socket. So when the tool ends, connections are refused.
                process = subprocess.Popen(
                    [sandbox.find_bubblewrap(), *options, "--", *command, self._url_path(key)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env={},
                    pass_fds=(listener.fileno(), bubblewrap_info_fd, *seccomp_fds),
                    preexec_fn=prepare,  # noqa: PLW1509  # one thread
                )  # fmt: skip
        except BaseException:
            os.close(info_fd)
            raise
        finally:
            for descriptor in (bubblewrap_info_fd, *seccomp_fds):
                os.close(descriptor)
        try:
            # `prepare` cannot set the limit of processes: it must count the sandbox's processes, not the user's.
            if init_pid := read_init_pid(info_fd):
                resource_limits.limit_processes(init_pid, limits)
        except BaseException:
            process.kill()  # a tool without its limits must not go on
            process.wait()
            raise
        return process

    def _end(self, key: str) -> None:
        session = self._sessions.pop(key)
        session.process.kill()  # the sandbox dies with bubblewrap
        with contextlib.suppress(subprocess.TimeoutExpired):  # Python then reaps it before it starts the next process
            session.process.wait(_END_SECONDS)
        _remove(session.folder)

    def _session_folders(self) -> list[Path]:
        folder = self._root / SESSIONS_FOLDER
        return list(folder.iterdir()) if folder.exists() else []


def _sandbox_arguments(request: SessionRequest, memory_bytes: int) -> list[str]:
    """Return bubblewrap's arguments for a session's sandbox, without the program to run."""
    prefix = Path(sys.prefix)
    args = [*sandbox.base_arguments("tensorboard", memory_bytes), "--unshare-net"]
    for path in (*sandbox.interpreter_prefixes(prefix), prefix):
        if not path.is_relative_to("/usr"):
            args += ["--ro-bind", str(path), str(path)]
    args += ["--ro-bind", str(PROGRAM), PROGRAM_TARGET]
    for number, logs in enumerate(request.logs):
        mount_target = f"{LOGS_TARGET}/{number}"
        args += ["--ro-bind", logs.folder, mount_target]
        args += ["--symlink", f"{mount_target}/{logs.subpath}".rstrip("/"), f"{VIEW_TARGET}/{logs.name}"]
    # By default, NumPy's OpenBLAS starts a thread for each core of the machine, which may be more than MAX_PROCESSES.
    environment: dict[str, Any] = sandbox.base_environment(prefix, ()) | {"OPENBLAS_NUM_THREADS": "1"}
    return args + sandbox.closing_arguments(environment)


def _seccomp_fds() -> list[int]:
    """Return the descriptor from which bubblewrap reads the seccomp filter; none where the kernel has no filters."""
    program = None if seccomp.unavailable_reason() else seccomp.sandbox_filter()
    if program is None:
        return []
    reader, writer = os.pipe()
    os.write(writer, program)  # does not block, since a pipe can hold far more bytes
    os.close(writer)
    return [reader]


def _remove(folder: Path) -> None:
    """Remove a session's folder and its control groups. Safe to repeat."""
    with contextlib.suppress(OSError, ValueError):  # there are none, or an owner was killed as it wrote the file
        cgroups.remove(Path(path) for path in json.loads((folder / _CGROUPS).read_bytes()))
    shutil.rmtree(folder, ignore_errors=True)
