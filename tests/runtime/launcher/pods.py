"""Pods without a cluster: the real archive as first process of a real pid namespace, with a pod's files around it.

Each has an address of loopback, an /etc/hosts that can be written late, a read-only root, a /tmp and a termination log
of its own, and a user that the system does not know. What is outside plays the kubelet.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.backends import zipapp
from runtime.launcher.signed import read_record

RUN = "job-7-1"
KEY = "the-records-key"
TOKEN = "the-runs-token"
USER = 10001
PYTHON = str(Path(sys.executable).resolve())
_SYSTEM = ("/usr", "/etc/ld.so.cache", "/etc/ssl/certs", "/etc/alternatives", "/sys/devices/system")
_MERGED = ("bin", "sbin", "lib", "lib64")


def free_port() -> int:
    """A port that was free a moment ago, on every address."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        return int(listener.getsockname()[1])


class Pod:
    """One pod that runs; `process` is bubblewrap, which ends as the pod's first process does."""

    def __init__(self, cluster: Cluster, node: int, order: dict[str, Any], python: str, image: Path | None) -> None:
        self.node = node
        self.address = cluster.addresses[node]
        self.folder = cluster.folder / f"pod-{node}"
        self.folder.mkdir()
        self.termination = self.folder / "termination-log"
        self.termination.touch()
        self.termination.chmod(0o666)
        (self.folder / "order.json").write_text(json.dumps(order))
        (self.folder / "nsswitch.conf").write_text("hosts: files\n")
        (self.folder / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
        self.stdout = self.folder / "stdout"
        reading, writing = os.pipe()
        environment = {
            "TRAINYARD_NODE": str(node),
            "TRAINYARD_ADDRESS": self.address,
            "TRAINYARD_TOKEN": TOKEN,
            "TRAINYARD_RECORD_KEY": KEY,
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "OF_THE_IMAGE": "kept",
            **cluster.image_environment,
        }
        command = [
            *("bwrap", "--info-fd", str(writing)),
            *self._arguments(cluster, python, image),
            *(argument for item in environment.items() for argument in ("--setenv", *item)),
            *(python, "-I", "-S", "/trainyard/launcher/launcher.pyz", "--pod"),
        ]
        with self.stdout.open("wb") as file, (self.folder / "stderr").open("wb") as errors:
            stdout = file if cluster.stdout is None else cluster.stdout
            self.process = subprocess.Popen(command, pass_fds=[writing], stdout=stdout, stderr=errors)
        os.close(writing)
        with os.fdopen(reading, "rb") as info:
            self.pid = int(json.loads(info.read())["child-pid"])

    def _arguments(self, cluster: Cluster, python: str, image: Path | None) -> list[str]:
        built = ["--unshare-user", "--uid", str(USER), "--gid", str(USER), "--hostname", f"{RUN}-{self.node}"]
        built += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--as-pid-1", "--die-with-parent", "--new-session"]
        built += ["--cap-drop", "ALL", "--clearenv", "--proc", "/proc", "--dev", "/dev"]
        for source in _SYSTEM:
            built += ["--ro-bind-try", source, source]
        for name in _MERGED:
            path = Path("/", name)
            built += ["--symlink", str(path.readlink()), str(path)] if path.is_symlink() else []
        for folder in ("/tmp", "/dev/shm"):
            built += ["--perms", "1777", "--tmpfs", folder]
        prefixes = {Path(python).resolve().parents[1], *([image] if image else [])}
        for prefix in prefixes:
            if not prefix.is_relative_to("/usr"):
                built += ["--ro-bind", str(prefix), str(prefix)]
        for name in ("passwd", "nsswitch.conf"):
            built += ["--ro-bind", str(self.folder / name), f"/etc/{name}"]
        built += ["--ro-bind", str(cluster.hosts), "/etc/hosts"]
        built += ["--ro-bind", str(cluster.archive), "/trainyard/launcher/launcher.pyz"]
        built += ["--ro-bind", str(self.folder / "order.json"), "/trainyard/order/order.json"]
        built += ["--bind", str(self.termination), "/dev/termination-log"]
        built += cluster.storage or ["--bind", str(cluster.root), "/trainyard/run-root"]
        built += ["--bind", str(cluster.root / "run")]
        built += ["/trainyard/run", "--bind", str(cluster.root / "checkpoints"), "/trainyard/checkpoints"]
        built += ["--bind", str(cluster.workspace), "/workspace", "--dir", "/datasets"]
        if cluster.control_group is not None:
            built += ["--ro-bind", str(cluster.control_group), "/sys/fs/cgroup"]
        return [*built, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the pod's first process, as the kubelet does: from outside."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, seconds: float = 60) -> int:
        """The exit code of the pod's first process."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not in {seconds} s: {self.printed()}") from None

    def printed(self) -> str:
        """The pod's own output so far."""
        return self.stdout.read_text("utf-8", "replace") + (self.folder / "stderr").read_text("utf-8", "replace")

    @property
    def record(self) -> dict[str, Any]:
        """The last record, as a backend reads it."""
        signed = self.termination.read_bytes()
        assert len(signed) <= 4096
        record = read_record(signed, KEY, run=RUN, node=self.node)
        assert record is not None, (signed, self.printed())
        return record

    @property
    def causes(self) -> list[tuple[str, str]]:
        """The kinds and codes of what went wrong."""
        return [(cause["kind"], cause["code"]) for cause in self.record["causes"]]


class Cluster:
    """A few pods of one run, and the storage that they share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "run-root"
        self.workspace = folder / "workspace"
        self.hosts = folder / "hosts"
        self.archive = folder / "launcher.pyz"
        self.pods: list[Pod] = []
        self.addresses: list[str] = []
        self.image_environment: dict[str, str] = {}
        self.stdout: int | None = None
        self.storage: list[str] = []
        self.control_group: Path | None = None
        for path in (self.root, self.root / "run", self.root / "checkpoints", self.workspace):
            path.mkdir()
        self.hosts.write_text("127.0.0.1 localhost\n")
        self.archive.write_bytes(zipapp.build().data)

    def start(
        self,
        source: str,
        nodes: int = 1,
        *,
        python: str = PYTHON,
        image: Path | None = None,
        late_names: bool = False,
        only: Sequence[int] | None = None,
        plan: dict[str, Any] | None = None,
        **changes: Any,
    ) -> list[Pod]:
        """Start the script on so many nodes; `changes` are the order's. `late_names`: nobody is known yet."""
        (self.workspace / "train.py").write_text(textwrap.dedent(source))
        place = f"127.{random.randrange(1, 250)}.{random.randrange(250)}"
        self.addresses = [f"{place}.{node + 1}" for node in range(nodes)]
        if not late_names:
            self.publish()
        order = {**self.order(nodes, plan or {}), **changes}
        self.pods = [Pod(self, node, order, python, image) for node in only or range(nodes)]
        return self.pods

    def publish(self) -> None:
        """Let the names of all pods be known."""
        with self.hosts.open("a") as file:
            for node, address in enumerate(self.addresses):
                file.write(f"{address} {RUN}-{node}.{RUN} {RUN}-{node}\n")

    @staticmethod
    def order(nodes: int, plan: dict[str, Any]) -> dict[str, Any]:
        """What a backend would write for so many nodes."""
        workers = plan.get("workers", 1)
        listening = nodes * workers if plan.get("framework") == "tensorflow" else 0
        told = {
            "run_id": RUN,
            "nodes": nodes,
            "workers": workers,
            "framework": "pytorch",
            "backend": "gloo",
            "master_port": free_port(),
            "script": "/workspace/train.py",
            "arguments": [],
            "epochs": 3,
            "lr": "0.1",
            "batch_size": 16,
            "datasets": ["mnist"],
            "datasets_path": "/datasets",
            "workspace": "/workspace",
            "run_dir": "/trainyard/run",
            "checkpoint_dir": "/trainyard/checkpoints",
            "restart_count": 0,
            "omp_threads": 1,
            "interface": "",
            "worker_ports": [free_port() for _ in range(listening)],
            "spare_ports": [free_port() for _ in range(nodes)] if plan.get("min_nodes") else [],
            **plan,
        }
        return {
            "run": RUN,
            "names": [f"{RUN}-{node}.{RUN}" for node in range(nodes)],
            "folder": "/trainyard/run-root",
            "control_port": free_port(),
            "start_seconds": 60,
            "deadline_seconds": 120,
            "grace_seconds": 10,
            "log_limit_bytes": 1 << 20,
            "memory_bytes": 1 << 30,
            "disk_bytes": 0,
            "written": {"run": "/trainyard/run", "checkpoints": "/trainyard/checkpoints"},
            "gpus": 0,
            "python": "",
            "builtin_script": "",
            "environment": {},
            "plan": told,
        }

    def wait(self, seconds: float = 60) -> list[int]:
        """The exit codes of all pods."""
        return [pod.wait(seconds) for pod in self.pods]

    def log(self, rank: int = 0) -> str:
        """What a rank printed, as the run's folder has it."""
        path = self.root / "logs" / f"rank-{rank}.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def wait_for(self, condition: Callable[[], object], seconds: float = 60) -> None:
        """Wait until the condition holds."""
        give_up_at = time.monotonic() + seconds
        while not condition():
            logs = {path.name: path.read_text(errors="replace")[-2000:] for path in self.root.glob("logs/*")}
            assert time.monotonic() < give_up_at, f"not in {seconds} s: {logs} {[pod.printed() for pod in self.pods]}"
            time.sleep(0.02)

    def wait_for_text(self, text: str, rank: int = 0) -> None:
        """Wait until a rank has printed the text."""
        self.wait_for(lambda: text in self.log(rank))

    def close(self) -> None:
        """End what runs; the kernel takes each pod's processes along."""
        for pod in self.pods:
            pod.signal(signal.SIGKILL)
            pod.process.kill()
            pod.process.wait()


def has_bubblewrap() -> bool:
    """Whether pods can be had here."""
    return shutil.which("bwrap") is not None
