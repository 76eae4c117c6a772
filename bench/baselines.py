"""The baselines of `bench.launch` and `bench.training`: torchrun, horovodrun, plain processes and Ray Jobs.

Each runs as its own guide says, without any part of the platform: Ray Jobs in a virtual environment of its own, the
others with the interpreter of a built-in image, whose packages the platform's runs use too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from bench.environment import free_port

RAY = "ray[default]==2.60.0"
TIMEOUT_SECONDS = 180
"""How long a baseline may take. Each takes seconds on an idle machine."""
FIRST_ALL_REDUCE_FILE = "first-all-reduce"
"""The file in RUN_DIR to which rank 0 writes when its first all-reduce was complete (Unix seconds)."""


class PlainLaunches:
    """Starts scripts from a built-in image's interpreter, with `folder` as RUN_DIR."""

    def __init__(self, folder: Path, images_root: Path) -> None:
        self._folder = folder
        self._images_root = images_root

    def torchrun(self, script: Path, nodes: int, workers: int) -> float:
        """Return when rank 0's first all-reduce was complete (Unix seconds), with one agent per node."""
        rendezvous = ["--standalone"]
        if nodes > 1:
            endpoint = f"127.0.0.1:{free_port()}"
            rendezvous = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=bench"]
        command = ["torchrun", *rendezvous, f"--nproc-per-node={workers}", str(script)]
        return self._first_all_reduce([self._start("pytorch", command) for _node in range(nodes)])

    def horovodrun(self, script: Path, workers: int) -> float:
        """Return when rank 0's first all-reduce was complete (Unix seconds), with Horovod's launcher on this host."""
        command = ["horovodrun", "--gloo", "-np", str(workers), "-H", f"localhost:{workers}", "python", str(script)]
        return self._first_all_reduce([self._start("horovod", command)])

    def one_process(self, script: Path) -> None:
        """Run one process with its output in a file."""
        _wait(self._start("pytorch", ["python", "-u", str(script)], output=self._folder / "plain.log"))

    def processes(self, script: Path, workers: int) -> None:
        """Run `workers` processes with only the environment that PyTorch requires, and no launcher.

        They connect over loopback and write unbuffered, as on the platform.
        """
        shared = {
            "WORLD_SIZE": str(workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks = [
            self._start("pytorch", ["python", "-u", str(script)], shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(workers)
        ]
        for rank in ranks:
            _wait(rank)

    def _first_all_reduce(self, processes: list[subprocess.Popen[bytes]]) -> float:
        for process in processes:
            _wait(process)
        return float((self._folder / FIRST_ALL_REDUCE_FILE).read_text())

    def _start(
        self, image: str, command: list[str], variables: dict[str, str] | None = None, output: Path | None = None
    ) -> subprocess.Popen[bytes]:
        programs = self._images_root / image / "bin"
        environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(self._folder),
            "RUN_DIR": str(self._folder),
            "OMP_NUM_THREADS": "1",  # as the platform sets it for a process with one core
            **(variables or {}),
        }
        with (output or self._folder / "baseline.log").open("wb") as log:
            return subprocess.Popen(
                [str(programs / command[0]), *command[1:]], env=environment, stdout=log, stderr=log, cwd=self._folder
            )


class RayJobs:
    """Ray Jobs, in a virtual environment that is created once under `folder`."""

    def __init__(self, folder: Path) -> None:
        self._python = folder / "ray" / "bin" / "python"
        if not self._python.exists():
            print(f"Installing {RAY} as a baseline ...", flush=True)
            venv.create(folder / "ray", with_pip=True)
            subprocess.run([self._python, "-m", "pip", "install", "--quiet", RAY], check=True)

    def trivial_runs(self, runs: int, clients: int) -> float:
        """Return the seconds that this number of trivial runs took, submitted by this number of clients at once."""
        script = Path(__file__).with_name("ray_jobs.py")
        environment = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        result = subprocess.run(
            [self._python, script, str(runs), str(clients)],
            env=environment | {"PATH": f"{self._python.parent}:/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS + runs * 10,  # 10 s for each run is far more than Ray needs
            check=True,
        )
        return float(result.stdout.split()[-1])  # the script prints the seconds last


def _wait(process: subprocess.Popen[bytes]) -> None:
    if process.wait(TIMEOUT_SECONDS):
        sys.exit(f"the baseline {process.args!r} ended with {process.returncode}")
