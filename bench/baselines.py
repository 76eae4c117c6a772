"""What ours is measured beside: torchrun, horovodrun and Ray Jobs, each from an environment of its own.

The one rule: a baseline runs bare, as its own guide says, with nothing of ours in between.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import venv
from pathlib import Path

RAY = "ray[default]==2.60.0"
SECONDS = 180


class Bare:
    """Scripts started by hand from a built-in image's interpreter. `folder` is where they write."""

    def __init__(self, folder: Path, images_root: Path) -> None:
        self._folder = folder
        self._images_root = images_root

    def torchrun(self, script: Path, nodes: int, workers: int) -> float:
        """When rank 0's all-reduce was done (Unix seconds), with one agent for each node."""
        agents = []
        meeting = ["--standalone"]
        if nodes > 1:
            endpoint = f"127.0.0.1:{_free_port()}"
            meeting = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=bench"]
        for _node in range(nodes):
            command = ["torchrun", *meeting, f"--nproc-per-node={workers}", str(script)]
            agents.append(self._start("pytorch", command))
        return self._noted(agents)

    def horovodrun(self, script: Path, workers: int) -> float:
        """The same, by Horovod's own launcher on this host."""
        command = ["horovodrun", "--gloo", "-np", str(workers), "-H", f"localhost:{workers}", "python", str(script)]
        return self._noted([self._start("horovod", command)])

    def plain(self, script: Path) -> None:
        """One process, as anybody would start it."""
        _wait(self._start("pytorch", ["python", "-u", str(script)], output=self._folder / "plain.log"))

    def pair(self, script: Path, workers: int) -> None:
        """`workers` processes with just the environment that PyTorch asks for: no launcher at all.

        They meet over loopback, as they do inside, and write unbuffered.
        """
        port = str(_free_port())
        started = []
        for rank in range(workers):
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "MASTER_ADDR": "127.0.0.1"}
            told["GLOO_SOCKET_IFNAME"] = "lo"
            environment = {name: str(value) for name, value in told.items()} | {"MASTER_PORT": port}
            started.append(self._start("pytorch", ["python", "-u", str(script)], environment))
        for process in started:
            _wait(process)

    def _noted(self, started: list[subprocess.Popen[bytes]]) -> float:
        for process in started:
            _wait(process)
        return float((self._folder / "first-all-reduce").read_text())

    def _start(
        self, image: str, command: list[str], more: dict[str, str] | None = None, output: Path | None = None
    ) -> subprocess.Popen[bytes]:
        programs = self._images_root / image / "bin"
        environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(self._folder),
            "RUN_DIR": str(self._folder),
            "OMP_NUM_THREADS": "1",
            **(more or {}),
        }
        with (output or self._folder / "bare.log").open("wb") as log:
            return subprocess.Popen(
                [str(programs / command[0]), *command[1:]], env=environment, stdout=log, stderr=log, cwd=self._folder
            )


class RayJobs:
    """Ray Jobs, in a virtual environment that is made once under `root`."""

    def __init__(self, root: Path) -> None:
        self._python = root / "ray" / "bin" / "python"
        if not self._python.exists():
            print(f"Installing {RAY} to measure beside it ...", flush=True)
            venv.create(root / "ray", with_pip=True)
            subprocess.run([self._python, "-m", "pip", "install", "--quiet", RAY], check=True)

    def seconds(self, runs: int, clients: int) -> float:
        """How long so many trivial runs took, by so many clients at once."""
        script = Path(__file__).with_name("ray_jobs.py")
        environment = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        result = subprocess.run(
            [self._python, script, str(runs), str(clients)],
            env=environment | {"PATH": f"{self._python.parent}:/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS + runs * 10,
            check=True,
        )
        return float(result.stdout.split()[-1])


def _wait(process: subprocess.Popen[bytes]) -> None:
    if process.wait(SECONDS):
        sys.exit(f"the baseline {process.args!r} ended with {process.returncode}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
