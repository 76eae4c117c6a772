"""Runs on a real Slurm on this machine, with the helpers of `RunHarness`."""

import contextlib
import json
import os
import signal
from pathlib import Path

from runtime.backends.slurm.backend import SlurmBackend
from runtime.backends.slurm.config import SlurmConfig
from runtime.specs import Resources
from tests.runtime.conftest import processes_below
from tests.runtime.run_harness import RunHarness


class SlurmHarness(RunHarness):
    """A backend with a workspace and a dataset on a `tests.slurm.cluster.SlurmCluster`."""

    keeps_output = True
    late_seconds = 1.0
    resources = Resources(cpus=2, memory_mib=1024)

    def __init__(self, cluster, folder, images_root, **settings):
        self.cluster = cluster
        self.folder = folder
        self.images_root = images_root
        self.settings = settings
        self.workspace = folder / "workspace"
        self.dataset = folder / "digits"
        for path in (self.workspace, self.dataset):
            path.mkdir()
        (self.dataset / "three").write_text("3")
        self.backend = self.new_backend()

    def config(self, **changes):
        """Return the settings that a console has for the cluster."""
        data = {"conf": str(self.cluster.conf), "poll_seconds": 1, "start_seconds": 60, **self.settings, **changes}
        return SlurmConfig.from_data("hpc", data)

    def new_backend(self, **changes):
        """Return a backend as another process of the console would have it."""
        return SlurmBackend(config=self.config(**changes), root=self.folder / "runs", images_root=self.images_root)

    def job_id(self, name="job-1-1"):
        """Return the id of a run's job."""
        return json.loads((self.folder / "runs" / name / "submission.json").read_bytes())["job_id"]

    def machine(self, node, name="job-1-1"):
        """Return the machine on which a node of a run was started."""
        return json.loads(self.record_path(node, name).read_bytes())["machine"]

    def record_path(self, node, name="job-1-1"):
        """Return the path of a node's record. Its modification time is that of the supervisor's last heartbeat."""
        return self.folder / "runs" / name / "nodes" / f"{node}.json"

    def kill_supervisor(self, name="job-1-1"):
        """Kill the supervisor of a run of one node, so that it writes no last record."""
        folder = os.fsencode(self.folder / "runs" / name)
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # the process has ended
                arguments = path.read_bytes().split(b"\0")
                # srun has these arguments too, but its first one is not the interpreter.
                if folder in arguments and arguments[0].endswith(b"/python"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    return
        raise AssertionError(f"no supervisor of {name}\n{self.all_logs(name)}")

    def lose_node(self, node, name="job-1-1"):
        """Have Slurm consider the machine of a node as failed."""
        self.cluster.lose(self.machine(node, name))

    def all_logs(self, name):
        """Return the queue and all logs of a run, for the message of a failed test."""
        folder = self.folder / "runs" / name
        queue = [self.cluster.call("squeue", "--states=all"), self.cluster.call("sinfo", "--Node", "--long")]
        paths = sorted([*folder.glob("logs/*"), *folder.glob("nodes/*.json"), *folder.glob("*.json")])
        return "\n".join([*queue, *(f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in paths)])

    def left_behind(self):
        """Return what deleted runs have left: folders, and processes of their sandboxes."""
        runs = self.folder / "runs"
        left = [path.name for path in runs.iterdir() if not path.name.startswith(".")]
        left += [path.name for name in (".active", ".changes", ".trash") for path in (runs / name).glob("*")]
        return left + processes_below(runs / "job-")  # the prefix of all run folders

    def close(self):
        """Delete every run, check that nothing is left, and return lost machines to service."""
        for name in self.backend.names():
            self.backend.delete(name)
        assert self.left_behind() == []
        self.cluster.recover()
