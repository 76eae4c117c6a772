"""`manage.py up`: start, supervise and stop all processes of the console on one machine, with supervisord.

Each process has the mark of its installation in its command line (`_installation_mark`). If `up` is killed, processes
may be left over. The next `up` finds them by this mark, since a stored pid may belong to another process by then. Their
own children (Celery's pool, uvicorn's workers) end with them. Runs continue, because the supervisors of their nodes are
not children of these processes and do not have the mark.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
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
from django.db import connection, connections

from console.environment import neighbouring_port

TASK_PROCESSES = 2
"""How many processes run tasks if there is one cluster. Copying checkpoints may keep one of them busy for long, and the
other then runs all other tasks. `programs` adds more."""
DISPATCH_PROCESSES = 2
"""How many dispatcher processes there are for each cluster. A cluster occupies at most two: one that dispatches, and
one that waits for its lock (`jobs.locks.dispatch_lock`). So a slow cluster leaves processes for the others."""
READY_SECONDS = 180.0
"""How long the console may take to answer /readyz after its start. An idle machine needs a few seconds, and one that is
busy with other work more than a minute."""
STOP_SECONDS = 45.0
"""How long supervisord may take to stop all programs, one after the other. Then it is killed, and `end_leftovers` ends
the rest. Most programs end within a second, so 45 is less than the sum of their `stop_seconds`, but leaves room for the
two workers, the slowest programs."""
LEFTOVER_SECONDS = 15.0
"""How long left-over processes may take to end after SIGTERM, and again after SIGKILL. The slowest is a worker with an
unfinished task (see `programs`): it needs about 13 seconds."""
LOG_BYTES = 10 * 1024**2
"""The size at which supervisord rotates a program's log. It keeps three older files: 40 MiB for each program."""
MAX_RESTARTS = 1000
"""After this many failed starts in a row supervisord gives a program up. It waits a second longer after each, so this
takes days, and a program outlasts a long outage of PostgreSQL."""


class UpError(Exception):
    """The console cannot be started; the message says why and what to do."""


@dataclass(frozen=True)
class Program:
    """One program that supervisord keeps running."""

    name: str
    arguments: tuple[str, ...]
    """The arguments of the Python interpreter."""
    purpose: str
    """The program's work in a few words, which the operator sees."""
    priority: int
    """Programs with a lower number start earlier and stop later."""
    stop_seconds: int = 10
    """How long it may take to end after SIGTERM before it is killed."""


def programs() -> list[Program]:
    """Return the programs, in start order."""
    # Without Django's checks, which load every page: `up` and `prepare` run these checks once for all programs.
    celery = ("-m", "celery", "-A", "console.celery", "--skip-checks")
    # One process more for each kind of work that can occupy a process for long: reconciling each further cluster,
    # copying uploads out of the bucket, importing datasets.
    additional_clusters = len(settings.TRAINYARD_CLUSTERS) - 1
    concurrency = (
        TASK_PROCESSES + additional_clusters + bool(settings.UPLOAD_BUCKET) + bool(settings.DATASET_IMPORT_HOSTS)
    )
    # Without the messages between workers (mingle, gossip), which nothing here uses and which delay each start.
    worker = ("worker", "--without-mingle", "--without-gossip", "-l", "INFO", "--hostname")
    tasks = (*worker, "worker@%h", "--queues", "celery", "--concurrency", str(concurrency))
    dispatchers = str(DISPATCH_PROCESSES * len(settings.TRAINYARD_CLUSTERS))
    dispatcher = (*worker, "dispatcher@%h", "--queues", "dispatch", "--concurrency", dispatchers)
    # Without a pid file: a killed beat leaves it behind. If another process has that pid by then, the next beat refuses
    # to start.
    beat = ("beat", "--schedule", str(settings.VAR_DIR / "beat.db"), "--pidfile", "", "-l", "INFO")
    # web has 15 seconds to stop, because uvicorn lets open requests continue for 10 (`server.STOP_SECONDS`). Celery's
    # workers have 20: SIGTERM goes to the whole process group (`stopasgroup`), so it also ends the processes of their
    # pools. A worker then waits 10 seconds (Celery's worker_lost_wait) for the results of unfinished tasks, and returns
    # their messages to the broker. If it were killed before, the broker would deliver them again only after an hour
    # (`visibility_timeout`).
    selected_programs = [
        Program("web", ("-m", "console.serving.server"), "pages, API and live views", priority=30, stop_seconds=15),
        Program("worker", (*celery, *tasks), "tasks", priority=40, stop_seconds=20),
        Program("dispatcher", (*celery, *dispatcher), "starts jobs", priority=40, stop_seconds=20),
        Program("beat", (*celery, *beat), "sends periodic tasks", priority=50),
        Program("watcher", ("manage.py", "watch_runs"), "follows runs as they happen", priority=60),
    ]
    if None in settings.TRAINYARD_CLUSTERS.values():  # this machine is a cluster, so it has sandboxes
        selected_programs.append(Program("tools", ("manage.py", "run_tools"), "TensorBoard", priority=35))
    if settings.EMBEDDED_DATABASE or settings.EMBEDDED_REDIS:
        # Starts a server again after it has died. `manage.py up` stops the servers, after all programs.
        services = Program(
            "services", ("-m", "console.supervision.services"), "embedded PostgreSQL and Redis", priority=10
        )
        selected_programs.append(services)
    if settings.PAYMENTS_SANDBOX:
        sandbox = Program("sandbox", ("manage.py", "payments_sandbox"), "payments without Stripe", priority=35)
        selected_programs.append(sandbox)
    return sorted(selected_programs, key=lambda program: program.priority)


def start_services() -> None:
    """Start the embedded servers that the settings use. Safe to repeat. Raises embedded.ServiceError."""
    settings.EMBEDDED.start(database=settings.EMBEDDED_DATABASE, broker=settings.EMBEDDED_REDIS)


def prepare() -> None:
    """Prepare the database and the static files. Safe to repeat.

    Start the embedded servers, migrate the database, fill an empty catalogue and collect static files.
    """
    start_services()
    call_command("migrate", interactive=False, verbosity=0)
    call_command("seed_catalogue", verbosity=0)
    if settings.EMBEDDED_DATABASE:
        # Without a checkpoint now, a server that is killed would spend seconds on recovery at its next start.
        with connection.cursor() as cursor:
            cursor.execute("CHECKPOINT")
    connections.close_all()  # `up` runs for long, and does not use the database again
    _collect_static()


def _collect_static() -> None:
    """Collect and compress static files if they changed, one process at a time. A file stores the last fingerprint."""
    folder: Path = settings.STATIC_ROOT
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint_path, fingerprint = folder.with_name(f"{folder.name}.stamp"), _static_fingerprint()
    with fingerprint_path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if fingerprint_path.read_text() != fingerprint:
            call_command("collectstatic", interactive=False, verbosity=0)
            fingerprint_path.write_text(fingerprint)


@contextmanager
def up_lock() -> Iterator[None]:
    """Hold the lock of this installation's `up`; the kernel releases it with the process. Raises AlreadyRunning."""
    settings.VAR_DIR.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (settings.VAR_DIR / "up.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(_read_pid(lock)) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


class AlreadyRunning(UpError):
    """Another `up` of this installation is running, as the process `pid`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        super().__init__(f"Trainyard is up already (process {pid}).")


class Supervisord:
    """The supervisord that runs the programs, as a child of this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start supervisord."""
        config = settings.VAR_DIR / "supervisord.conf"
        config.write_text(supervisord_config())
        config.chmod(0o600)
        command = [*_parent_death_prefix(), *_python_command(), "-m", "supervisor.supervisord", "-n", "-c", str(config)]
        # In a new session, so that Ctrl-C reaches only `up`, which stops everything in order.
        self._process = subprocess.Popen(command, cwd=settings.BASE_DIR, start_new_session=True)

    def is_running(self) -> bool:
        """Return whether supervisord runs."""
        return self._process is not None and self._process.poll() is None

    def wait_until_ready(self, stop: Event) -> None:
        """Wait until the console is ready or `stop` is set.

        Raises UpError after READY_SECONDS, or if supervisord ends.
        """
        deadline = time.monotonic() + READY_SECONDS
        while self.is_running() and time.monotonic() < deadline:
            if is_ready() or stop.wait(0.1):
                return
        raise UpError(f"The console did not get ready. See the logs in {settings.EMBEDDED.log_dir}.")

    def stop(self) -> None:
        """Stop all programs and supervisord. Safe to repeat."""
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
    """Return whether the console on this machine answers /readyz with 200."""
    try:
        response = _readiness_client().get(f"http://{settings.WEB_BIND}/readyz", headers=_proxy_headers())
    except httpx.HTTPError:
        return False
    return response.status_code == httpx.codes.OK


@functools.cache
def _readiness_client() -> httpx.Client:
    """Return the HTTP client of all polls. `httpx.get` would load the machine's certificates each time: 40 ms of CPU.

    As with `httpx.get`, each poll has a connection of its own.
    """
    return httpx.Client(timeout=5, headers={"Connection": "close"})


def end_leftovers() -> None:
    """End the processes left over from a killed `up`: supervisord first, because it would restart the others."""
    _end_processes([process for process in _marked_processes() if _is_supervisord(process)])
    _end_processes(_marked_processes())


def _end_processes(processes: list[psutil.Process]) -> None:
    """Terminate processes, and kill those that do not end in time."""
    for process in processes:
        _send_signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=LEFTOVER_SECONDS)
    for process in alive:
        _send_signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=LEFTOVER_SECONDS)


def supervisord_config() -> str:
    """Return the text of supervisord's configuration file."""
    var, log_dir, sockets = settings.VAR_DIR, settings.EMBEDDED.log_dir, settings.EMBEDDED.socket_dir
    control_socket = sockets / "supervisor.sock"
    sections: dict[str, dict[str, object]] = {
        "supervisord": {
            "logfile": log_dir / "supervisord.log",
            "logfile_maxbytes": LOG_BYTES,
            "logfile_backups": 3,
            "pidfile": var / "supervisord.pid",
            "directory": settings.BASE_DIR,
            "childlogdir": log_dir,
            "silent": "true",
            # Without this setting, supervisord warns that it runs as root.
            **({"user": "root"} if os.geteuid() == 0 else {}),
        },
        "unix_http_server": {"file": control_socket, "chmod": "0700"},
        "supervisorctl": {"serverurl": f"unix://{control_socket}"},
        "rpcinterface:supervisor": {
            "supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"
        },
    }
    for program in programs():
        sections[f"program:{program.name}"] = {
            "command": shlex.join([*_parent_death_prefix(), *_python_command(), *program.arguments]),
            "priority": program.priority,
            "autorestart": "true",
            "startretries": MAX_RESTARTS,
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
        # supervisord expands %(name)s, so a percent sign must be doubled.
        lines += [f"{name} = {str(value).replace('%', '%%')}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _python_command() -> list[str]:
    """Return the interpreter's command with the mark as an `-X` option: Python ignores unknown ones."""
    return [sys.executable, "-X", _installation_mark()]


def _installation_mark() -> str:
    """Return the word that marks the processes of this installation in their command lines."""
    return f"trainyard={settings.VAR_DIR}"


def _parent_death_prefix() -> list[str]:
    """Return words to put before a command, so that the kernel ends it with its parent; none without setpriv."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []


def _marked_processes() -> list[psutil.Process]:
    """Return the processes with this installation's mark, except this process and those that started it."""
    own_pids = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if _installation_mark() in (process.info["cmdline"] or ()) and process.pid not in own_pids
    ]


def _is_supervisord(process: psutil.Process) -> bool:
    """Return whether a process of `_marked_processes` is supervisord."""
    return "supervisor.supervisord" in (process.info["cmdline"] or ())


def _send_signal(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process, if it still exists. Raises UpError if it belongs to another user."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied as error:
        raise UpError(
            f"Process {process.pid} is left over from an earlier start by another user. End it, or start as that user."
        ) from error


def require_free_ports() -> None:
    """Raise UpError if another process uses a port that the console needs, or if two of its servers need the same."""
    web_host, _, web_port = settings.WEB_BIND.rpartition(":")
    addresses = [(web_host.strip("[]"), int(web_port), "TRAINYARD_URL")]
    if settings.PAYMENTS_SANDBOX:
        if int(web_port) == settings.SANDBOX_PORT:
            raise UpError(
                f"SANDBOX_PORT is {web_port}, the port of the console itself. Choose another port, for example: "
                f"SANDBOX_PORT={neighbouring_port(int(web_port))} make up"
            )
        addresses.append(("127.0.0.1", settings.SANDBOX_PORT, "SANDBOX_PORT"))
    for host, port, variable in addresses:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as test_socket:
            # The servers set this option too. Without it, old connections of a stopped server make the port seem used.
            test_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                test_socket.bind((host, port))
            except OSError as error:
                other_port = neighbouring_port(port, 100)
                example = f"http://127.0.0.1:{other_port}" if variable == "TRAINYARD_URL" else str(other_port)
                raise UpError(
                    f"Port {port} of {host} can't be used ({error.strerror}). Stop the program that uses it, or "
                    f"choose another port with {variable}, for example: {variable}={example} make up"
                ) from error


def _proxy_headers() -> dict[str, str]:
    """Return the headers that a proxy would add. With them a console with an https:// URL does not redirect."""
    parts = urlsplit(settings.TRAINYARD_URL)
    return {"Host": parts.netloc, "X-Forwarded-Proto": parts.scheme}


def _static_fingerprint() -> str:
    """Return a digest of the names, sizes and times of all static files."""
    digest = hashlib.sha256()
    for finder in get_finders():
        for name, storage in finder.list([]):
            status = Path(storage.path(name)).stat()
            digest.update(f"{name}:{status.st_size}:{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _read_pid(lock: IO[str]) -> int:
    """Return the process id that the holder wrote to its lock file; 0 if it has not yet."""
    lock.seek(0)
    return int(lock.read().strip() or 0)
