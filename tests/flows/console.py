"""A whole console of real processes on a port of its own, a customer of its API, and how to break it.

The one rule: a test kills only what was started here, which the mark `trainyard=FOLDER` in a process's command line or
a record in the installation's folder shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import psycopg
from rich.console import Console as Screen

from console.supervision.embedded import Embedded
from jobs.demo import Customer
from runtime import pids
from tests.console.processes import free_port, wait_for
from tests.migrations import copy_migrated_database

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 240
"""How long a console may take to start on a busy machine."""
PATIENCE_SECONDS = 240
"""How long a customer waits for a job's state."""
PASSWORD = "correct horse battery"
BARE_IMAGE = "horovod"
"""The built-in image that is an interpreter and nothing else in these consoles, so that its runs start fast."""
SLURM_SPEC = "small"
"""The node spec whose runs go to Slurm where a console has one."""
ACCOUNT = """
from console.accounts.models import User
from console.accounts.services import create_organization, create_token
user = User.objects.create_user("{email}", "{password}")
print("token", create_token(membership=create_organization(user=user, name="Flow"), name="flow")[1])
"""
WAIT = """
import os, pathlib, sys, time
workspace = pathlib.Path(os.environ["WORKSPACE"])
print("began", os.environ["RESTART_COUNT"], flush=True)
while not (workspace / f"go-{sys.argv[1]}").exists():
    time.sleep(0.02)
print("epoch 1/1 loss 0.5", flush=True)
"""
"""A script that runs until its test creates the file `go-<tag>` in the workspace, by `Console.release`."""


class Console:
    """An installation in a folder of its own. `process` is its `manage.py up`.

    To save time, its first start finds a migrated database. `make demo` begins with an empty one, and migrates it.
    """

    def __init__(self, var: Path, images_root: Path, **environment: str) -> None:
        self.var, self.settings = var, environment
        self.embedded = Embedded(var)
        self.port, self.sandbox_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINYARD_", "DJANGO_"))}
        self.environment = clean | {
            "TRAINYARD_VAR": str(var),
            "TRAINYARD_URL": self.url,
            "SANDBOX_PORT": str(self.sandbox_port),
            "TRAINYARD_IMAGES_ROOT": str(images_root),
            # The folder of `make up` and `make demo`: compressing the pages' files takes ten seconds of a core.
            "TRAINYARD_STATIC_ROOT": str(ROOT / "var" / "static"),
            # Each process takes two seconds of a core to start, and no flow needs two of these.
            "WEB_PROCESSES": "1",
            **environment,
        }
        self.output = var / "up.log"
        self.process: subprocess.Popen[bytes] | None = None
        # One client for all polls: `httpx.get` reads the machine's certificates each time, which keeps a core busy.
        self._visitor = httpx.Client(headers={"Connection": "close"}, timeout=5)

    # Up and down

    def up(self) -> None:
        """Start everything, and wait until it is ready."""
        self.var.mkdir(parents=True, exist_ok=True)
        if not self.embedded.data_dir.exists():
            copy_migrated_database(self.var)
        with self.output.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", "up"], cwd=ROOT, env=self.environment, stdout=log, stderr=log
            )
        self.wait_until_ready()

    def manage(self, *words: Any, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `manage.py` on this installation."""
        return subprocess.run(
            [sys.executable, "manage.py", *map(str, words)],
            cwd=ROOT, env=self.environment | environment, check=False, text=True, capture_output=True,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Wait for /readyz, and notice an `up` that ended instead."""
        running = self.process
        assert running is not None
        wait_for(lambda: running.poll() is not None or self.is_ready(), READY_SECONDS)
        assert running.poll() is None, self.output.read_text()

    def is_ready(self) -> bool:
        """Return whether the console says that it is ready."""
        try:
            return self._visitor.get(f"{self.url}/readyz").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def down(self) -> None:
        """Stop everything as Ctrl-C does."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(90) == 0, self.output.read_text()

    def remove(self) -> None:
        """End all processes that are left, and remove the folders. Works after any failure."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        _kill(set(self.processes()))
        for pid, started in self.supervisors():
            pids.send(pid, started, signal.SIGKILL)
        for pid in self.warm_pool_daemon():
            os.kill(pid, signal.SIGTERM)  # not SIGKILL: it must still end its fork servers
        for folder in (self.embedded.socket_dir, self.var):
            shutil.rmtree(folder, ignore_errors=True)

    # What runs, and what is left of it

    def programs(self, *words: str) -> list[psutil.Process]:
        """The processes of this console whose command line has these words."""
        mark = f"trainyard={self.var}"
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if mark in (line := process.info["cmdline"] or []) and set(words) <= set(line)
        ]

    def processes(self) -> list[psutil.Process]:
        """Every process of the console, its servers included; runs are not among them."""
        return self.programs() + self.embedded.processes()

    def supervisors(self) -> list[tuple[int, int]]:
        """(pid, start time) of every live supervisor of a node of a run."""
        supervisors = []
        for path in self.var.glob("runs/*/nodes/*.json"):
            with contextlib.suppress(FileNotFoundError):  # the run has just been deleted
                record = json.loads(path.read_bytes())
                supervisors.append((record["pid"], record["start_time"]))
        return [supervisor for supervisor in supervisors if pids.is_alive(*supervisor)]

    def left_behind(self) -> dict[str, Any]:
        """Return processes, mounts and sockets that should have ended with the console; empty if none is left."""
        inside = str(self.var)
        lines = [
            " ".join(process.info["cmdline"] or [])
            for process in psutil.process_iter(["cmdline"])
            if inside in " ".join(process.info["cmdline"] or [])
        ]
        mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if inside in line]
        sockets = [str(path) for path in self.embedded.socket_dir.glob("**/*") if path.is_socket() and _answers(path)]
        ports = [port for port in (self.port, self.sandbox_port) if _is_taken(port)]
        found = {"processes": lines, "supervisors": self.supervisors(), "mounts": mounts}
        found |= {"sockets": sockets, "ports": ports, "warm pool": self.warm_pool_daemon(), "cgroups": self.cgroups()}
        return {name: what for name, what in found.items() if what}

    def warm_pool_daemon(self) -> list[int]:
        """The pid of the warm pool's daemon, if it runs."""
        try:
            known = json.loads((self.var / "runs" / ".warm_pool" / "daemon.json").read_bytes())
        except OSError:
            return []
        return [known["pid"]] if pids.is_alive(known["pid"], known["start_time"]) else []

    def cgroups(self) -> list[str]:
        """Control groups of runs that have ended. Each name ends with 8 characters of the run's nonce."""
        ended = [path for path in self.var.glob("runs/*/submission.json") if not _is_live(path.parent)]
        nonces = [json.loads(path.read_bytes())["nonce"][:8] for path in ended]
        groups = Path("/sys/fs/cgroup").glob("**/trainyard-*")
        return [str(group) for group in groups if group.name.rpartition("-")[2] in nonces]

    def kill(self, *processes: psutil.Process) -> None:
        """SIGKILL these processes and all their children at once; wait until they have ended."""
        _kill({child for process in processes for child in (process, *_children(process))})

    def kill_all(self) -> None:
        """SIGKILL of the whole console at once: `up`, supervisord, every program, PostgreSQL, Redis. Runs go on."""
        assert self.process is not None
        self.process.kill()
        # More than once: a parent may start another process before it is killed itself.
        while processes := self.processes():
            _kill(set(processes))
        self.process.wait()

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        address = {"host": str(self.embedded.socket_dir), "user": "postgres", "dbname": "trainyard"}
        with psycopg.connect(**address, autocommit=True) as connection:
            cursor = connection.execute(sql, values)
            return cursor.fetchall() if cursor.description else []

    def workspace(self) -> Path:
        """Return the folder of the `Buyer`'s workspace, the only one with `wait.py`. Other tests create more."""
        (script,) = (self.var / "storage" / "workspaces").glob("*/wait.py")
        return script.parent

    def release(self, tag: str) -> None:
        """Let a run of WAIT end, whether any console lives or not."""
        (self.workspace() / f"go-{tag}").touch()

    def create_account(self, email: str) -> str:
        """Create a customer's account with PASSWORD. Return its API token."""
        script = ACCOUNT.format(email=email, password=PASSWORD)
        done = self.manage("shell", "-v", "0", "-c", script)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("token ")[1].strip()


class Buyer(Customer):
    """A customer of the API who reconnects when the console restarts."""

    patience_seconds = PATIENCE_SECONDS

    def __init__(self, console: Console) -> None:
        self.email = f"flow-{uuid4().hex[:8]}@example.com"
        super().__init__(console.url, console.create_account(self.email), Screen(quiet=True))
        self.started: list[int] = []  # jobs for `cancel_unfinished_jobs`
        self.activate()
        self.top_up()
        for name in ("wait.py", "quick.py"):
            source = WAIT if name == "wait.py" else "print('done')\n"
            self.call("PUT", f"workspaces/main/files/{name}", content=source.encode())

    def form(self, tag: str = "", **changes: Any) -> dict[str, Any]:
        """Return the body of a request for a quote: a run of WAIT, which `Console.release(tag)` ends.

        With another script in `changes`, the run needs no tag.
        """
        return {
            "product": "metered", "framework": "pytorch", "image": BARE_IMAGE, "workspace": "main",
            "code_path": "wait.py", "arguments": [tag], "epochs": 1, "lr": "0.01", "batch_size": 32,
            "node_spec": "nano", "nodes": 2, "workers_per_node": 1, "max_seconds": 600,
            "on_hang": "ignore",  # WAIT shows no progress while a slow machine starts a console
        } | changes  # fmt: skip

    def start(self, tag: str = "", **changes: Any) -> int:
        """Buy the run of `form(tag, **changes)`. Return the job's id."""
        quote = self.call("POST", "quotes/", json=self.form(tag, **changes))["id"]
        order = self.call("POST", "orders/", json={"quote": quote}, headers={"Idempotency-Key": quote})
        self.started.append(int(order["job"]))
        return self.started[-1]

    def job(self, job: int) -> Any:
        """The job."""
        return self.call("GET", f"jobs/{job}/")

    def until(self, job: int, happened: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first state of a job that meets the condition. Reads its live stream, and reconnects."""
        deadline, last = time.monotonic() + self.patience_seconds, None
        while time.monotonic() < deadline:
            try:
                for name, data in self._stream(f"jobs/{job}/stream/"):
                    if name == "state":
                        last = data
                        if happened(data):
                            return dict(data)
                    if time.monotonic() > deadline:
                        break
            except Exception as error:  # the test killed the console; connect again, as a browser would
                last = last or error
            time.sleep(0.1)
        raise AssertionError(f"waited {self.patience_seconds} s without the expected state; last seen: {last}")

    def running(self, job: int) -> dict[str, Any]:
        """The job once it runs."""
        return self.until(job, lambda data: data["state"] == "running")

    def ended(self, job: int) -> dict[str, Any]:
        """The job once it has ended."""
        return self.until(job, lambda data: data["finished_at"] is not None)

    def close(self) -> None:
        """Close its connections."""
        self.http.close()

    def cancel_unfinished_jobs(self) -> None:
        """Free the cluster for the next test, or for the second try of one that failed halfway."""
        while self.started:
            job = self.started.pop()
            if self.job(job)["finished_at"] is None:
                self.call("POST", f"jobs/{job}/cancel/")
                self.ended(job)

    def log(self, job: int, rank: int = 0, attempt: int = 1) -> str:
        """All that a rank printed."""
        return str(self.call("GET", f"jobs/{job}/logs/", params={"rank": rank, "attempt": attempt})["text"])

    def bill(self, job: int) -> dict[str, Any]:
        """The receipt, its lines by rule."""
        receipt = self.call("GET", f"jobs/{job}/receipt/")
        return {**receipt, "lines": {line["rule"]: line for line in receipt["lines"]}}


def _kill(processes: set[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its parent
            process.kill()
    psutil.wait_procs(processes, timeout=20)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def served(console: Console) -> Iterator[Console]:
    """Start the console. At the end stop it, check that it leaves nothing behind, and remove it."""
    try:
        console.up()
        yield console
        console.down()
        assert console.left_behind() == {}
    finally:
        console.remove()


def _is_live(run: Path) -> bool:
    """Return whether a run goes on, by its mark in the folder `.active`."""
    return (run.parent / ".active" / run.name).exists()
