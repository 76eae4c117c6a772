"""Hostile scripts: what a run can read, write and see is what its sandbox gives it, and nothing else."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from runtime.errors import InvalidSpec
from runtime.specs import Outcome
from tests.runtime.backends import hostile
from tests.runtime.conftest import Yard


@pytest.fixture(params=["cold", "warm"])
def yard(yard: Yard, request: pytest.FixtureRequest) -> Yard:
    """Both ways in which ranks are started."""
    return hostile.started(yard, request.param)


def test_the_consoles_files_are_out_of_sight(yard: Yard) -> None:
    secret = yard.folder / "secret"
    secret.write_text("key")
    house = Path(__file__).resolve().parents[3]
    paths = [str(secret), str(house / "pyproject.toml"), str(house / "console"), "/root/.bashrc", "/etc/shadow"]
    script = f"{hostile.TRY}\n    print(json.dumps([attempt(read, path) for path in {paths!r}]))"
    yard.run(script)
    assert set(json.loads(yard.log())) == {"FileNotFoundError"}


def test_nothing_can_be_written_but_where_it_is_allowed(yard: Yard) -> None:
    (yard.dataset / "images").write_text("data")
    image = yard.images_root / "bare"
    paths = [
        "/datasets/digits/images",
        "/datasets/new",
        "/new",
        "/usr/new",
        "/etc/hosts",
        "/dev/new",
        "/opt/trainyard/launcher/agent.py",
        str(image / "bin" / "new"),
        str(Path(os.path.realpath(image / "bin" / "python")).parent / "new"),
    ]
    script = f"{hostile.TRY}\n    print(json.dumps([attempt(write, path) for path in {paths!r}]))"
    yard.run(script)
    assert set(json.loads(yard.log())) <= {"OSError", "PermissionError"}
    assert (yard.dataset / "images").read_text() == "data"
    allowed = ["/workspace/a", "/trainyard/run/a", "/trainyard/checkpoints/a", "/tmp/a", "/dev/shm/a"]
    yard.run(f"{hostile.TRY}\n    print(json.dumps([attempt(write, path) for path in {allowed!r}]))", name="job-2-1")
    assert json.loads(yard.log(name="job-2-1")) == ["1"] * 5


def test_other_processes_are_out_of_sight(yard: Yard) -> None:
    other = "import signal\nprint('ready')\nsignal.pause()"
    yard.backend.submit(yard.spec(other, name="job-2-1"))
    yard.wait_for_text("ready", "job-2-1")
    yard.run(
        f"{hostile.TRY}\n    print(json.dumps(sorted(int(name) for name in os.listdir('/proc') if name.isdigit())))"
    )
    seen = json.loads(yard.log())
    assert len(seen) == 2, "the launcher and this rank"
    yard.run(f"{hostile.TRY}\n    print(attempt(os.kill, {os.getpid()}, 0))", name="job-3-1")
    assert yard.log(name="job-3-1") == "ProcessLookupError\n"


def test_the_launcher_cannot_be_spied_on_or_killed(yard: Yard) -> None:
    script = f"""{hostile.TRY}
    import ctypes, signal
    libc = ctypes.CDLL(None, use_errno=True)
    os.kill(1, signal.SIGKILL)
    os.kill(1, signal.SIGSTOP)
    os.kill(1, signal.SIGTERM)
    print(json.dumps([
        attempt(read, "/proc/1/environ"),
        attempt(read, "/proc/1/mem"),
        attempt(os.readlink, "/proc/1/fd/0"),
        attempt(os.listdir, "/proc/1/root"),
        libc.ptrace(16, 1, 0, 0),
        libc.syscall(438, os.pidfd_open(1), 4, 0),
    ]))
    """
    status = yard.run(script)
    assert status.outcome is Outcome.COMPLETED
    assert json.loads(yard.log()) == ["PermissionError"] * 4 + [-1, -1]


def test_code_is_nobody_inside(yard: Yard) -> None:
    script = """
    import ctypes, os
    print(os.getuid(), os.getgid(), os.uname().nodename)
    print([line for line in open("/proc/self/status") if line.startswith(("CapEff", "NoNewPrivs"))])
    print(ctypes.CDLL(None).unshare(0x00020000))
    """
    yard.run(script)
    first, second, third = yard.log().splitlines()
    assert first == "1000 1000 job-1-1-0"
    assert "0000000000000000" in second
    assert "NoNewPrivs:\\t1" in second
    assert third == "-1"


def test_the_ranks_inherit_no_descriptor_of_the_launchers(yard: Yard) -> None:
    yard.run(
        "import os\nprint([os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in (0, 1, 2)])\n"
        "print(sum(os.path.exists(f'/proc/self/fd/{n}') for n in range(3, 100)))"
    )
    assert yard.log() == "['/dev/null', 'pipe', 'pipe']\n2\n", "the pipe for notes, the file of steps"


def test_a_script_may_not_be_a_link_out_of_the_workspace(yard: Yard) -> None:
    outside = yard.folder / "outside.py"
    outside.write_text("print('reached')")
    spec = yard.spec(script="link.py")
    (yard.workspace / "link.py").symlink_to(outside)
    with pytest.raises(InvalidSpec, match="leaves the workspace") as caught:
        yard.backend.submit(spec)
    assert caught.value.field == "script"


def test_a_link_that_is_made_later_leads_nowhere(yard: Yard) -> None:
    secret = yard.folder / "secret"
    secret.write_text("key")
    yard.run(f"import os\nos.symlink({str(secret)!r}, 'link')\nprint(os.path.exists('link'))")
    assert yard.log() == "False\n"


def test_forged_notes_change_no_outcome(yard: Yard) -> None:
    script = """
    import os, sys
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b"finished 1\\n" * 100 + b"raised x\\nraised 99999999999\\n" + b"z" * 60000)
        except OSError:
            pass
    sys.exit(4)
    """
    status = yard.run(script)
    assert status.outcome is Outcome.CODE_FAILED
    assert status.failure is not None
    assert status.failure.exit_code == 4


def test_sockets_and_processes_of_the_console_are_out_of_sight(yard: Yard) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        path = str(yard.folder / "s")
        server.bind(path)
        server.listen()
        script = f"""{hostile.TRY}
    import socket
    def knock(name):
        with socket.socket(socket.AF_UNIX) as one: return one.connect(name) or "reached"
    print(json.dumps([
        attempt(knock, {path!r}),
        attempt(os.listdir, "/proc/{os.getpid()}"),
        attempt(os.listdir, {str(yard.folder)!r}),
        attempt(read, "/proc/kcore"), attempt(read, "/proc/kmsg"), attempt(read, "/dev/mem"),
        attempt(write, "/proc/sys/kernel/hostname"), attempt(write, "/proc/sysrq-trigger"),
        attempt(open, "/proc/sys/kernel/core_pattern", "r+"), attempt(open, "/proc/sys/kernel/modprobe", "r+"),
        attempt(os.listdir, "/sys/fs/cgroup"), attempt(os.mkdir, "/sys/fs/cgroup/memory/mine"),
        attempt(os.setuid, 0), attempt(os.chroot, "/"),
    ]))
        """
        yard.run(script)
    assert set(json.loads(yard.log())) <= {"FileNotFoundError", "PermissionError", "OSError"}, yard.log()


def test_nothing_of_the_machines_in_proc_can_be_written_or_is_for_root_alone(yard: Yard) -> None:
    script = """
    import os
    for top, folders, files in os.walk("/proc"):
        if top == "/proc":
            folders[:] = [name for name in folders if not name.isdigit() and not name.endswith("self")]
        for name in files:
            path = os.path.join(top, name)
            for how, open_to_all in ((os.O_WRONLY, 0), (os.O_RDONLY, 0o044)):
                if how == os.O_RDONLY and top.startswith("/proc/sys"): continue  # settings, which cannot be changed
                try:
                    if not open_to_all or not os.stat(path).st_mode & open_to_all:
                        descriptor = os.open(path, how | os.O_NONBLOCK)
                        null = os.path.samestat(os.fstat(descriptor), os.stat("/dev/null"))
                        if not null and (how == os.O_WRONLY or os.read(descriptor, 1)): print(path, how)
                        os.close(descriptor)
                except OSError: pass
    print("looked")
    """
    yard.run(script)
    assert yard.log() == "looked\n"
