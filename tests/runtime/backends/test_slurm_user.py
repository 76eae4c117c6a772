"""A console that runs as an ordinary user on a real Slurm whose daemons run as root."""

import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.backends import sandbox
from runtime.images import venvs

pytestmark = [
    pytest.mark.rerun_if_late("its runs are real processes, which a controller starts after a second or more"),
    pytest.mark.slow,
]
SERVICE_USER, OTHER_USER = "daemon", "bin"
"""Users without rights that every Debian has. The console runs as the first."""
CONSOLE = """
import json, sys
from pathlib import Path
from runtime.backends.slurm.backend import SlurmBackend
from runtime.backends.slurm.config import SlurmConfig
from runtime.specs import Framework, Image, Mount, Resources, RunPhase, RunSpec

folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
backend = SlurmBackend(
    config=SlurmConfig.from_data("hpc", settings), root=folder / "runs", images_root=folder / "images"
)
workspace = folder / "workspace"
workspace.mkdir()
(workspace / "train.py").write_text("import os; print(len(os.environ['TOKEN']))")
backend.submit(RunSpec(
    name="job-1-1", framework=Framework.PYTORCH, image=Image(builtin="bare"), nodes=2, workers_per_node=1,
    resources=Resources(cpus=2, memory_mib=1024), script="train.py", deadline_seconds=60,
    secrets={"TOKEN": "very-secret"}, mounts=(Mount(str(workspace), "/workspace", read_only=False),),
))
status = backend.describe("job-1-1")
for _names in backend.changes(stop_after_seconds=60):
    status = backend.describe("job-1-1")
    if status.phase is RunPhase.ENDED:
        break
log = (folder / "runs" / "job-1-1" / "logs" / "slurm.log").read_text()
print(json.dumps([status.outcome, backend.logs("job-1-1", 0).text, str(status) + log]))
"""


def run_as(user, arguments, **options):
    """Run a command as this user, with `options` in its environment and bubblewrap on its PATH."""
    found = pwd.getpwnam(user)
    path = f"/usr/bin:/bin:{Path(sandbox.find_bubblewrap()).parent}"
    return subprocess.run(
        arguments, user=found.pw_uid, group=found.pw_gid, extra_groups=[], cwd="/", capture_output=True, text=True,
        check=False, timeout=120, env={"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | options,
    )  # fmt: skip


def interpreter_of_all():
    """Return a Python that every user can execute, as Debian's; "" if there is none that is new enough."""
    for path in (sys._base_executable, "/usr/bin/python3"):
        try:
            if run_as(SERVICE_USER, [path, "-c", "import sys; assert sys.version_info >= (3, 11)"]).returncode == 0:
                return path
        except OSError:  # it is in a private folder
            continue
    return ""


@pytest.fixture
def shared_folder(short_folders):
    """A folder of the service user, with an image that it can execute."""
    folder = short_folders()
    python = interpreter_of_all()
    if not python:
        pytest.skip("No Python 3.11 is accessible to all users: apt-get install python3.")
    subprocess.run([python, "-m", "venv", "--without-pip", folder / "images" / "bare"], check=True)
    venvs.mark_ready(folder / "images" / "bare", "bare")
    folder.parent.chmod(0o711)  # the service user may pass through it
    folder.chmod(0o755)
    shutil.chown(folder, SERVICE_USER)
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="Only root can become another user.")
def test_the_console_needs_no_rights_but_to_submit_and_other_users_cannot_read_its_runs(slurm_cluster, shared_folder):
    slurm_cluster.conf.parent.chmod(0o711)
    settings = {"conf": str(slurm_cluster.conf), "poll_seconds": 1}
    repository = str(Path(venvs.__file__).parents[2])
    python = shared_folder / "images" / "bare" / "bin" / "python"
    console = [python, "-c", CONSOLE, shared_folder, json.dumps(settings)]
    done = run_as(SERVICE_USER, console, PYTHONPATH=repository)
    assert done.returncode == 0, done.stderr + slurm_cluster.logs()
    outcome, output, evidence = json.loads(done.stdout)
    run = shared_folder / "runs" / "job-1-1"
    uid = pwd.getpwnam(SERVICE_USER).pw_uid
    assert (outcome, output) == ("completed", "11\n"), evidence  # 11: the length of the secret
    # Other tests have jobs on this cluster too, as root.
    jobs = slurm_cluster.call("squeue", "--noheader", "--states=all", f"--user={SERVICE_USER}", "--format=%j").split()
    assert len(jobs) == 1
    assert {path.stat().st_uid for path in (run, *run.rglob("*"))} == {uid}
    for path in (shared_folder / "runs", run, run / "logs"):
        assert run_as(OTHER_USER, ["/bin/ls", path]).returncode != 0, path
