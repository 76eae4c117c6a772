"""Pods without a cluster: the real archive as the first process of a PID namespace, with the files of a Pod.

Each has an address of loopback, an /etc/hosts that can be written late, a read-only root, a /tmp and a termination log
of its own, and a user that the system does not know. The test plays the kubelet.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from runtime.backends.kubernetes import launcher_archive
from runtime.backends.sandbox import find_bubblewrap
from runtime.launcher.signed_record import read_record

RUN = "job-7-1"
KEY = "the-records-key"
TOKEN = "the-runs-token"
USER = 10001
PYTHON = str(Path(sys.executable).resolve())
_SYSTEM = ("/usr", "/etc/ld.so.cache", "/etc/ssl/certs", "/etc/alternatives", "/sys/devices/system")
_MERGED = ("bin", "sbin", "lib", "lib64")


def free_port():
    """Return a port that is free on every address."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        return listener.getsockname()[1]


def children(pid):
    """Return the pids of a process's children, as the host sees them."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Pod:
    """A running Pod. `process` is bubblewrap, which ends with the Pod's first process."""

    def __init__(self, cluster, node, pod_plan, python, image):
        self.node = node
        self.address = cluster.addresses[node]
        self.folder = cluster.folder / f"pod-{node}"
        self.folder.mkdir()
        files = {
            "order.json": json.dumps(pod_plan),
            "nsswitch.conf": "hosts: files\n",
            "passwd": "root:x:0:0::/root:/bin/sh\n",
        }
        for name, text in {**files, "termination-log": ""}.items():
            (self.folder / name).write_text(text)
        self.termination, self.stdout = self.folder / "termination-log", self.folder / "stdout"
        self.termination.chmod(0o666)
        environment = {
            "TRAINYARD_NODE": str(node),
            "TRAINYARD_ADDRESS": self.address,
            "TRAINYARD_TOKEN": TOKEN,
            "TRAINYARD_RECORD_KEY": KEY,
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "OF_THE_IMAGE": "kept",
        }
        reading, writing = os.pipe()
        command = [
            *(find_bubblewrap(), "--info-fd", str(writing)),
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

    def _arguments(self, cluster, python, image):
        built = ["--unshare-user", "--uid", str(USER), "--gid", str(USER), "--hostname", f"{RUN}-{self.node}"]
        built += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--as-pid-1", "--die-with-parent", "--new-session"]
        built += ["--cap-drop", "ALL", "--clearenv", "--proc", "/proc", "--dev", "/dev"]
        built += [argument for path in _SYSTEM for argument in ("--ro-bind-try", path, path)]
        for path in (Path("/", name) for name in _MERGED):
            built += ["--symlink", str(path.readlink()), str(path)] if path.is_symlink() else []
        for folder in ("/tmp", "/dev/shm"):
            built += ["--perms", "1777", "--tmpfs", folder]
        prefixes = {Path(python).resolve().parents[1], image} - {None}
        read_only = {str(prefix): prefix for prefix in prefixes if not prefix.is_relative_to("/usr")} | {
            "/etc/passwd": self.folder / "passwd",
            "/etc/nsswitch.conf": self.folder / "nsswitch.conf",
            "/etc/hosts": cluster.hosts,
            "/trainyard/launcher/launcher.pyz": cluster.archive,
            "/trainyard/order/order.json": self.folder / "order.json",
        }
        writable = {
            "/dev/termination-log": self.termination,
            "/trainyard/run-root": cluster.root,
            "/trainyard/run": cluster.root / "run",
            "/trainyard/checkpoints": cluster.root / "checkpoints",
            "/trainyard/outputs": cluster.root / "outputs",
            "/workspace": cluster.workspace,
        }
        for option, binds in (("--ro-bind", read_only), ("--bind", writable)):
            for target, source in binds.items():
                is_replaced = target == "/trainyard/run-root" and cluster.storage
                built += cluster.storage if is_replaced else [option, str(source), target]
        built += ["--dir", "/datasets", "--dir", "/models", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
        return built

    @property
    def launcher(self):
        """The host's pid of the launcher, the only child of the Pod's first process."""
        return children(self.pid)[0]

    def signal(self, number):
        """Send a signal to the Pod's first process, as the kubelet does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, seconds=60):
        """Return the exit code of the Pod's first process."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not in {seconds} s: {self.printed()}") from None

    def printed(self):
        """Return the Pod's own output so far."""
        return self.stdout.read_text("utf-8", "replace") + (self.folder / "stderr").read_text("utf-8", "replace")

    @property
    def record(self):
        """The last record, as a backend reads it."""
        signed = self.termination.read_bytes()
        assert len(signed) <= 4096
        record = read_record(signed, KEY, run_name=RUN, node=self.node)
        assert record is not None, (signed, self.printed())
        return record

    @property
    def causes(self):
        """The kinds and codes of the causes of its end."""
        return [(cause["kind"], cause["code"]) for cause in self.record["causes"]]


class Cluster:
    """The Pods of one run, and the storage that they share."""

    def __init__(self, folder):
        self.folder = folder
        self.root = folder / "run-root"
        self.workspace = folder / "workspace"
        self.hosts = folder / "hosts"
        self.archive = folder / "launcher.pyz"
        self.pods = []
        self.addresses = []
        self.stdout = None
        self.storage = []
        for path in (self.root, self.root / "run", self.root / "checkpoints", self.root / "outputs", self.workspace):
            path.mkdir()
        self.hosts.write_text("127.0.0.1 localhost\n")
        self.archive.write_bytes(launcher_archive.build())

    def start(self, source, nodes=1, *, python=PYTHON, image=None, late_names=False, only=None, plan=None, **changes):
        """Start the script. `changes` are for the Pods' plan. With `late_names`, names resolve only after `publish`."""
        (self.workspace / "train.py").write_text(textwrap.dedent(source))
        place = f"127.{random.randrange(1, 250)}.{random.randrange(250)}"
        self.addresses = [f"{place}.{node + 1}" for node in range(nodes)]
        if not late_names:
            self.publish()
        pod_plan = {**self.pod_plan(nodes, plan or {}), **changes}
        self.pods = [Pod(self, node, pod_plan, python, image) for node in only or range(nodes)]
        return self.pods

    def publish(self):
        """Let the names of all Pods resolve."""
        with self.hosts.open("a") as file:
            for node, address in enumerate(self.addresses):
                file.write(f"{address} {RUN}-{node}.{RUN} {RUN}-{node}\n")

    @staticmethod
    def pod_plan(nodes, plan):
        """Return the plan that a backend writes for the Pods. `plan` changes fields of the run's plan in it."""
        workers = plan.get("workers", 1)
        listening = nodes * workers if plan.get("framework") == "tensorflow" else 0
        full_plan = {
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
            "output_dir": "/trainyard/outputs",
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
            "written": {
                "run": "/trainyard/run",
                "checkpoints": "/trainyard/checkpoints",
                "outputs": "/trainyard/outputs",
            },
            "gpus": 0,
            "python": "",
            "builtin_script": "",
            "environment": {},
            "plan": full_plan,
        }

    def wait(self, seconds=60):
        """Return the exit codes of all Pods."""
        return [pod.wait(seconds) for pod in self.pods]

    def log(self, rank=0):
        """Return a rank's output in the run's folder."""
        path = self.root / "logs" / f"rank-{rank}.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def wait_for(self, condition, seconds=60):
        """Wait until the condition holds."""
        give_up_at = time.monotonic() + seconds
        while not condition():
            logs = {path.name: path.read_text(errors="replace")[-2000:] for path in self.root.glob("logs/*")}
            assert time.monotonic() < give_up_at, f"not in {seconds} s: {logs} {[pod.printed() for pod in self.pods]}"
            time.sleep(0.02)

    def wait_for_text(self, text, rank=0):
        """Wait until a rank has printed the text."""
        self.wait_for(lambda: text in self.log(rank))

    def close(self):
        """Kill all Pods with their processes."""
        for pod in self.pods:
            pod.signal(signal.SIGKILL)
            pod.process.kill()
            pod.process.wait()
