"""The whole console on one machine: what `manage.py up` starts, watches, and stops.

Hides supervisord, the order of starting, and what a crash leaves behind. The one rule: whatever dies, the rest ends or
is started again by one owner. Every process carries the mark of its installation in its command line, dies when its
parent is killed, and is looked for by that mark (never by a stored pid) before a new start. Runs are not touched: the
supervisors of their nodes are no children of ours and carry no mark.
"""

from __future__ import annotations

import fcntl
import hashlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import IO
from urllib.parse import urlsplit

import httpx
import psutil
from django.conf import settings
from django.contrib.staticfiles.finders import get_finders
from django.core.management import call_command
from django.db import connections

WEB_WORKERS = 2
WEB_THREADS = 8
TASK_PROCESSES = 2
READY_SECONDS = 60.0
STOP_SECONDS = 45.0
LEFTOVER_SECONDS = 15.0
LOG_BYTES = 10 * 1024**2
RESTARTS = 1000


class UpError(Exception):
    """The console can't be started; the text says why and what to do."""


@dataclass(frozen=True)
class Program:
    """One program that supervisord keeps running; lower `priority` starts earlier and stops later."""

    name: str
    arguments: tuple[str, ...]
    purpose: str
    priority: int
    stop_seconds: int = 10


def programs() -> list[Program]:
    """What runs, in the order of starting."""
    celery = ("-m", "celery", "-A", "console.celery")
    gunicorn = (
        "-m", "gunicorn", "console.wsgi", "--worker-class", "console.live.StreamPassingWorker",
        "--workers", str(WEB_WORKERS), "--threads", str(WEB_THREADS), "--bind", settings.WEB_BIND,
        "--keep-alive", "15", "--graceful-timeout", "10", "--no-control-socket",
        "--logger-class", "console.operations.gunicorn_lines.GunicornLines",
    )  # fmt: skip
    # A cluster that answers slowly keeps one process busy: there is one more for each.
    concurrency = TASK_PROCESSES + len(settings.TRAINYARD_CLUSTERS) - 1
    worker = ("worker", "--concurrency", str(concurrency), "--without-mingle", "--without-gossip", "-l", "INFO")
    beat = ("beat", "--schedule", str(settings.VAR_DIR / "beat.db"), "--pidfile", "", "-l", "INFO")
    chosen = [
        Program("live", ("manage.py", "live"), "event streams", 20),
        Program("web", gunicorn, "pages and API", 30, stop_seconds=15),
        Program("worker", (*celery, *worker), "tasks", 40, stop_seconds=20),
        Program("beat", (*celery, *beat), "the clock of the sweeps", 50),
        Program("watcher", ("manage.py", "watch_runs"), "follows runs as they happen", 60),
    ]
    if settings.EMBEDDED_DATABASE or settings.EMBEDDED_REDIS:
        chosen.append(Program("services", ("manage.py", "hold_services"), "embedded PostgreSQL and Redis", 10))
    if settings.PAYMENTS_SANDBOX:
        chosen.append(Program("sandbox", ("manage.py", "payments_sandbox"), "payments without Stripe", 35))
    return sorted(chosen, key=lambda program: program.priority)


def clear_the_way() -> None:
    """End what an earlier `up` left running, and see that the ports are free. Raises UpError."""
    end_leftovers()
    _require_free_ports()


def start_services() -> None:
    """Start the embedded servers that the settings use. Safe to repeat. Raises services.ServiceError."""
    settings.EMBEDDED.start(database=settings.EMBEDDED_DATABASE, broker=settings.EMBEDDED_REDIS)


def prepare() -> None:
    """Bring an empty or older installation to where it can be served: servers, schema, static files."""
    start_services()
    call_command("migrate", interactive=False, verbosity=0)
    call_command("seed_catalogue", verbosity=0)
    connections.close_all()
    _collect_static()


def _collect_static() -> None:
    """Copy and compress the pages' files, where they are not there as they are now; one process at a time."""
    folder: Path = settings.STATIC_ROOT
    folder.mkdir(parents=True, exist_ok=True)
    stamp, wanted = folder.with_name(f"{folder.name}.stamp"), _static_fingerprint()
    with stamp.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if stamp.read_text() != wanted:
            call_command("collectstatic", interactive=False, verbosity=0)
            stamp.write_text(wanted)


@contextmanager
def only_one() -> Iterator[None]:
    """Hold the lock of this installation's `up`. Raises AlreadyUp. It falls with its holder, however that ends."""
    settings.VAR_DIR.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (settings.VAR_DIR / "up.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyUp(_read_pid(lock)) from None
        lock.truncate(0)
        lock.write(str(psutil.Process().pid))
        lock.flush()
        yield


class AlreadyUp(UpError):
    """Another `up` of this installation runs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        super().__init__(f"Trainyard is up already (process {pid}).")


class Supervised:
    """supervisord with the programs, as a child of this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start supervisord."""
        config = settings.VAR_DIR / "supervisord.conf"
        config.write_text(supervisor_config())
        config.chmod(0o600)
        command = [*_dying_with_parent(), *_python(), "-m", "supervisor.supervisord", "-n", "-c", str(config)]
        # A session of its own: Ctrl-C reaches `up` alone, which then stops everything in order.
        self._process = subprocess.Popen(  # a command of our own
            command, cwd=settings.BASE_DIR, start_new_session=True
        )

    def runs(self) -> bool:
        """Whether supervisord is there."""
        return self._process is not None and self._process.poll() is None

    def wait_until_ready(self, stop: Event) -> None:
        """Wait until the console answers that it is ready. Raises UpError."""
        for _ in range(int(READY_SECONDS * 10)):
            if is_ready() or stop.wait(0.1):
                return
            if not self.runs():
                break
        raise UpError(f"The console did not get ready. See the logs in {settings.EMBEDDED.log_dir}.")

    def stop(self) -> None:
        """End all programs and supervisord. Safe to repeat."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_leftovers()


def is_ready() -> bool:
    """Whether the console answers /readyz with yes."""
    try:
        return httpx.get(f"http://{settings.WEB_BIND}/readyz", timeout=5, headers=_proxy_headers()).status_code == 200
    except httpx.HTTPError:
        return False


def end_leftovers() -> None:
    """End what a killed `up` of this installation left running, supervisord first: it would start the others again."""
    for only_supervisor in (True, False):
        left = [process for process in _marked() if not only_supervisor or _is_supervisord(process)]
        for process in left:
            _signal(process, signal.SIGTERM)
        _, alive = psutil.wait_procs(left, timeout=LEFTOVER_SECONDS)
        for process in alive:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=LEFTOVER_SECONDS)


def supervisor_config() -> str:
    """The configuration file of supervisord."""
    var, log_dir, sockets = settings.VAR_DIR, settings.EMBEDDED.log_dir, settings.EMBEDDED.socket_dir
    control = sockets / "supervisor.sock"
    sections: dict[str, dict[str, object]] = {
        "supervisord": {
            "logfile": log_dir / "supervisord.log",
            "logfile_maxbytes": LOG_BYTES,
            "logfile_backups": 3,
            "pidfile": var / "supervisord.pid",
            "directory": settings.BASE_DIR,
            "childlogdir": log_dir,
            "silent": "true",
            **({"user": "root"} if psutil.Process().uids().effective == 0 else {}),
        },
        "unix_http_server": {"file": control, "chmod": "0700"},
        "supervisorctl": {"serverurl": f"unix://{control}"},
        "rpcinterface:supervisor": {
            "supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"
        },
    }
    for program in programs():
        sections[f"program:{program.name}"] = {
            "command": shlex.join([*_dying_with_parent(), *_python(), *program.arguments]),
            "priority": program.priority,
            "autorestart": "true",
            "startretries": RESTARTS,
            "stopasgroup": "true",
            "killasgroup": "true",
            "stopwaitsecs": program.stop_seconds,
            "redirect_stderr": "true",
            "stdout_logfile": log_dir / f"{program.name}.log",
            "stdout_logfile_maxbytes": LOG_BYTES,
            "stdout_logfile_backups": 3,
        }
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        # supervisord expands %(names)s
        lines += [f"{name} = {str(value).replace('%', '%%')}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _python() -> list[str]:
    """Our interpreter, with the mark of this installation, which Python itself ignores."""
    return [sys.executable, "-X", _mark()]


def _mark() -> str:
    return f"trainyard={settings.VAR_DIR}"


def _dying_with_parent() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []


def _marked() -> list[psutil.Process]:
    mine = {psutil.Process().pid, *(parent.pid for parent in psutil.Process().parents())}
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if _mark() in (process.info["cmdline"] or ()) and process.pid not in mine
    ]


def _is_supervisord(process: psutil.Process) -> bool:
    return "supervisor.supervisord" in (process.info["cmdline"] or ())


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _require_free_ports() -> None:
    """Raise UpError for a port that somebody else listens on: better one sentence now than a log full of retries."""
    host, _, port = settings.WEB_BIND.rpartition(":")
    wanted = [(host, int(port), "TRAINYARD_URL")]
    if settings.PAYMENTS_SANDBOX:
        wanted.append(("127.0.0.1", settings.SANDBOX_PORT, "SANDBOX_PORT"))
    for address, number, variable in wanted:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, number))
            except OSError as error:
                example = f"http://127.0.0.1:{number + 100}" if variable == "TRAINYARD_URL" else str(number + 100)
                raise UpError(
                    f"Port {number} of {address} can't be used ({error.strerror}). Stop the program that uses it, or "
                    f"choose another port with {variable}, for example: {variable}={example} make up"
                ) from error


def _proxy_headers() -> dict[str, str]:
    """What a proxy in front would say, so that a console behind HTTPS answers and does not redirect."""
    parts = urlsplit(settings.TRAINYARD_URL)
    return {"Host": parts.netloc, "X-Forwarded-Proto": parts.scheme}


def _static_fingerprint() -> str:
    """Changes when any static file of any app does."""
    digest = hashlib.sha256()
    for finder in get_finders():
        for name, storage in finder.list([]):
            found = Path(storage.path(name)).stat()
            digest.update(f"{name}:{found.st_size}:{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _read_pid(lock: IO[str]) -> int:
    lock.seek(0)
    return int(lock.read().strip() or 0)
