"""The backend's side of the warm pool: start a run's supervisors through the daemon or cold, and keep a daemon running.

If the daemon does not confirm a request in time, the run starts cold under another nonce. If the daemon then handles
the request after all, it finds no submission with the request's nonce, and starts nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from runtime import pids
from runtime.backends.local.warm_pool import protocol
from runtime.backends.local.warm_pool.daemon import STATE_FILE, DaemonSettings, DaemonState
from runtime.backends.local.warm_pool.protocol import ForkServer, StartRequest
from runtime.errors import RuntimeFault

_SOURCE_ROOT = Path(__file__).resolve().parents[4]  # the folder that contains the package `runtime`
_PACKAGE = _SOURCE_ROOT / "runtime"  # the package whose files' times `code_version` hashes
# Python code that runs `main` of a module of `runtime.backends`; the module's name is filled in later.
_COMMAND = f"import sys; sys.path.insert(0, {str(_SOURCE_ROOT)!r}); from runtime.backends.{{}} import main; main()"
_END_SECONDS = 10.0
"""How long the daemon may take to end its fork servers. Killing a fork server with a GPU library takes about a second.
"""


class WarmPool:
    """Starts runs under one root. `idle_seconds`: how long a daemon without requests stays; 0: every start is cold."""

    def __init__(self, root: Path, *, idle_seconds: float) -> None:
        self._root = root
        self._folder = root / protocol.FOLDER
        self._idle_seconds = idle_seconds
        self._version = code_version()

    @contextlib.contextmanager
    def starting(self, request: StartRequest, fork_server: ForkServer | None, log: Path) -> Iterator[str]:
        """Yield a nonce, under which the `with` block must record the run; start the run at the end of the block.

        `fork_server` is to fork the run's ranks; None: they are not forked. `log` is for the output of a cold start.
        """
        if self._idle_seconds and self._is_running():
            with protocol.sending_request(self._root, {"fork_server": fork_server, "start": request}) as accepted:
                if accepted:  # the daemon starts the run when this block ends, which closes the connection
                    yield request["nonce"]
                    return
        # Another nonce, so that a daemon that handles the request late does not start this run a second time.
        request["nonce"] = secrets.token_hex(16)
        with self._starting_cold(request, log):
            yield request["nonce"]
        if self._idle_seconds:
            self.prepare(fork_server)  # for the next run

    def prepare(self, fork_server: ForkServer | None) -> None:
        """Start the daemon and this fork server (None: only the daemon) in the background, unless they run."""
        if self._is_running():
            with protocol.sending_request(self._root, {"fork_server": fork_server, "start": None}):
                return  # even if it was not accepted: the next submission sends the fork server again
        settings: DaemonSettings = {
            "root": str(self._root),
            "version": self._version,
            "idle_seconds": self._idle_seconds,
            "fork_server": fork_server,
        }
        process, stdin = _start_module("local.warm_pool.daemon", json.dumps(settings))
        stdin.close()
        # `process` forks the daemon and ends at once, and must be reaped.
        threading.Thread(target=process.wait, daemon=True).start()

    def socket_path(self, fork_server: ForkServer) -> Path:
        """Return the path of this fork server's socket, which exists while it accepts requests."""
        return self._folder / fork_server["name"]

    def fork_server_name(self, image: str, built_at: int) -> str:
        """Return the name of an image's fork server, which is also its socket's name.

        It differs for each build of the image (`built_at`, ns) and each version of this code.
        """
        # 16 digits only, since the address of a Unix socket has at most 107 bytes.
        return hashlib.sha256(f"{self._version}-{image}-{built_at}".encode()).hexdigest()[:16]

    def stop(self) -> None:
        """End the daemon and its fork servers. Runs continue."""
        state = self._daemon_state()
        if state is not None and pids.send(state["pid"], state["start_time"], signal.SIGTERM):
            pids.wait_for_end(state["pid"], state["start_time"], _END_SECONDS)

    def _is_running(self) -> bool:
        """Return whether a daemon of this version of the code runs. A daemon of another version is asked to end."""
        state = self._daemon_state()
        if state is None:
            return False
        if state["version"] != self._version:
            pids.send(state["pid"], state["start_time"], signal.SIGTERM)
            return False
        return pids.is_alive(state["pid"], state["start_time"])

    def _daemon_state(self) -> DaemonState | None:
        """Return the state that the last daemon has written; None if there is none."""
        try:
            state: DaemonState = json.loads((self._folder / STATE_FILE).read_bytes())
        except (OSError, ValueError):
            return None
        return state

    @contextlib.contextmanager
    def _starting_cold(self, request: StartRequest, log: Path) -> Iterator[None]:
        """Start the run without the daemon, when the `with` block ends."""
        process, stdin = _start_module("local.warm_pool.starter", json.dumps(request), log, request["locks"])
        try:
            yield
        finally:
            # `process` has forked the starter, which waits for the end of its input. `process` itself ends at once.
            stdin.close()
            process.wait()


def _start_module(
    module: str, text: str, log: Path | None = None, inherit_fds: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a module of `runtime.backends` and write this text to its stdin; return the process and the open stdin."""
    with log.open("ab") if log is not None else contextlib.nullcontext(subprocess.DEVNULL) as output:
        process = subprocess.Popen(
            # -I and -S: Python searches no other folders for modules, so it starts faster.
            [sys.executable, "-I", "-S", "-c", _COMMAND.format(module)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd="/",
            env={"LANG": "C.UTF-8"},  # the console's environment contains secrets
            pass_fds=inherit_fds,
            start_new_session=True,  # Ctrl-C in the console's terminal does not end the process
        )
    if process.stdin is None:
        raise RuntimeFault("a process was started without a stdin")
    process.stdin.write(text.encode())
    process.stdin.flush()
    return process, process.stdin


def network_gap() -> str:
    """Return why runs on this machine cannot have a network of their own; "" if they can.

    A process cannot return from a network namespace that it has entered, so a new process tries to enter one.
    """
    command = [sys.executable, "-I", "-S", "-c", _COMMAND.format("network")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if not result.returncode else "The process that tries it failed."


def code_version() -> str:
    """Return the version of this code: a hash of the interpreter's path and the source files' times.

    A daemon keeps running the code that it has loaded, so a daemon of another version must be replaced.
    """
    digest = hashlib.sha256(sys.executable.encode())
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(f"{path}{path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()
