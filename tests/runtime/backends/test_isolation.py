"""Hostile scripts: what a run can read, write and see is what its sandbox gives it, and nothing else."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from runtime.backends import cgroups
from runtime.errors import InvalidSpec
from runtime.specs import FailureCode, Outcome, Resources
from tests.console.processes import wait_for
from tests.runtime.conftest import MAY_IMPORT_ANYTHING, Yard


@pytest.fixture(params=["cold", "warm"])
def yard(yard: Yard, request: pytest.FixtureRequest) -> Yard:
    """Ranks that are started by the interpreter's start, and ranks that are forked from one that is ready."""
    if request.param == "warm":
        warm(yard)
    return yard


def warm(yard: Yard) -> None:
    """From here on runs start warm: the nursery is there, and the image's zygote in it."""
    yard.backend = yard.another(warm_seconds=600)
    yard.preface = MAY_IMPORT_ANYTHING
    image = yard.spec().image
    yard.backend.prepare(image)
    wait_for(lambda: yard.backend.is_prepared(image), 30)


TRY = """
    import json, os
    def attempt(action, *arguments):
        try:
            return str(action(*arguments))
        except OSError as error:
            return type(error).__name__
    def read(path):
        with open(path, "rb") as file: return file.read(100)
    def write(path):
        with open(path, "w") as file: return file.write("x")
"""


def test_the_consoles_files_are_out_of_sight(yard: Yard) -> None:
    secret = yard.folder / "secret"
    secret.write_text("key")
    house = Path(__file__).resolve().parents[3]
    paths = [str(secret), str(house / "pyproject.toml"), str(house / "console"), "/root/.bashrc", "/etc/shadow"]
    script = f"{TRY}\n    print(json.dumps([attempt(read, path) for path in {paths!r}]))"
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
    script = f"{TRY}\n    print(json.dumps([attempt(write, path) for path in {paths!r}]))"
    yard.run(script)
    assert set(json.loads(yard.log())) <= {"OSError", "PermissionError"}
    assert (yard.dataset / "images").read_text() == "data"
    allowed = ["/workspace/a", "/trainyard/run/a", "/trainyard/checkpoints/a", "/tmp/a", "/dev/shm/a"]
    yard.run(f"{TRY}\n    print(json.dumps([attempt(write, path) for path in {allowed!r}]))", name="job-2-1")
    assert json.loads(yard.log(name="job-2-1")) == ["1"] * 5


def test_other_processes_are_out_of_sight(yard: Yard) -> None:
    other = "import signal\nprint('ready')\nsignal.pause()"
    yard.backend.submit(yard.spec(other, name="job-2-1"))
    yard.wait_for_text("ready", "job-2-1")
    yard.run(f"{TRY}\n    print(json.dumps(sorted(int(name) for name in os.listdir('/proc') if name.isdigit())))")
    seen = json.loads(yard.log())
    assert len(seen) == 2, "the launcher and this rank"
    yard.run(f"{TRY}\n    print(attempt(os.kill, {os.getpid()}, 0))", name="job-3-1")
    assert yard.log(name="job-3-1") == "ProcessLookupError\n"


def test_the_launcher_cannot_be_spied_on_or_killed(yard: Yard) -> None:
    script = f"""{TRY}
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


def test_a_warm_rank_is_held_like_a_cold_one(tmp_path: Path, bare_images: Path) -> None:
    told = """
    import json, os, resource, signal, socket, sys
    def lines(path, *names):
        return {n: l.split(":")[1].strip() for l in open(path) for n in names if l.startswith(n + ":")}
    print(json.dumps({
        "status": lines("/proc/self/status", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb",
                        "NoNewPrivs", "Seccomp", "Umask", "SigBlk", "SigIgn", "SigCgt", "PPid", "NSpid", "NSsid",
                        "NSpgid"),
        "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
        "group": open("/proc/self/cgroup").read(),
        "oom": open("/proc/self/oom_score_adj").read(),
        "nice": [os.nice(0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in range(50)
                              if os.path.exists(f"/proc/self/fd/{n}")),
        "environment": {n: v for n, v in os.environ.items() if n != "MASTER_PORT"},
        "place": [os.getcwd(), os.readlink("/proc/self/root"), sorted(os.listdir("/")), sys.path, sys.argv,
                  sys.executable, list(sys.flags), sys.dont_write_bytecode],
        "main": sorted(vars(sys.modules["__main__"])),
        "host": socket.gethostname(),
        "signal": str(signal.getsignal(signal.SIGINT)).split(" at ")[0],
    }, sort_keys=True))
    """
    yards = {}
    for kind in ("cold", "warm"):
        (tmp_path / kind).mkdir()
        yards[kind] = Yard(tmp_path / kind, bare_images)
        yards[kind].preface = MAY_IMPORT_ANYTHING
    warm(yards["warm"])
    try:
        for made in yards.values():
            assert made.run(told, arguments=("--depth", "3")).outcome is Outcome.COMPLETED, made.all_logs("job-1-1")
        cold, hot = (json.loads(made.log()) for made in yards.values())
        # A session is led by its own process in both; its number is what the pid happens to be.
        for status in (cold["status"], hot["status"]):
            assert status.pop("NSpid") == status.pop("NSsid") == status.pop("NSpgid")
        assert hot == cold
        assert cold["status"]["NoNewPrivs"] == "1"
        assert {cold["status"][name] for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    finally:
        for made in yards.values():
            made.backend.delete("job-1-1")
            made.backend.retire()


def test_a_warm_rank_was_warm(yard: Yard) -> None:
    """So that the tests above say what they seem to: a forked rank still bears its zygote's command line."""
    yard.run("print(open('/proc/self/cmdline').read().split(chr(0))[2].rsplit('/', 1)[-1])")
    expected = "zygote.py" if (yard.folder / "runs" / ".nursery").exists() else "rank.py"
    assert yard.log() == f"{expected}\n"


def test_nothing_of_one_run_is_seen_in_the_next(yard: Yard) -> None:
    leave = """
    import builtins, os, random, sys
    secret = "".join(reversed("drowssap-eht-si-siht"))
    kept = [secret.encode() * 1000 for _ in range(1000)]
    os.environ["LEFT"] = builtins.LEFT = secret
    sys.modules["left"] = sys
    random.seed(7)
    for folder in ("/tmp", "/dev/shm", os.environ["RUN_DIR"], os.environ["CHECKPOINT_DIR"]):
        open(folder + "/left", "w").write(secret)
    print(random.SystemRandom().random(), flush=True)
    """
    look = """
    import builtins, glob, json, os, random, re, sys
    secret = "".join(reversed("drowssap-eht-si-siht")).encode()
    parts = {secret[at:at + 8] for at in (0, 4)}
    found = 0
    with open("/proc/self/mem", "rb", 0) as memory:
        for line in open("/proc/self/maps"):
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if line.split()[1][0] != "r" or "[v" in line: continue
            memory.seek(start)
            try: found += memory.read(end - start).count(secret * 3)
            except OSError: pass
    print(json.dumps([
        found, hasattr(builtins, "LEFT"), "left" in sys.modules, "LEFT" in os.environ,
        [path for folder in ("/tmp", "/dev/shm", os.environ["RUN_DIR"], os.environ["CHECKPOINT_DIR"])
         for path in glob.glob(folder + "/left")],
    ]))
    """
    assert yard.run(leave).outcome is Outcome.COMPLETED
    assert yard.run(look, name="job-2-1").outcome is Outcome.COMPLETED, yard.all_logs("job-2-1")
    assert json.loads(yard.log(name="job-2-1")) == [0, False, False, False, []]


def test_chance_is_different_everywhere(yard: Yard) -> None:
    script = """
    import multiprocessing.process, random, tempfile, uuid
    key = multiprocessing.process.current_process().authkey
    print(random.random(), uuid.uuid4(), tempfile.mktemp(), key.hex())
    """
    seen: list[str] = []
    for name in ("job-1-1", "job-2-1"):
        yard.run(script, name=name, workers_per_node=2)
        seen += [word for rank in range(2) for word in yard.log(rank, name).split()]
    assert len(seen) == 16
    assert len(set(seen)) == 16


def test_the_hosts_loopback_and_other_runs_are_out_of_reach(yard: Yard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0trainyard-test-" + yard.folder.name)
        abstract.listen()
        serve = """
        import os, signal, socket
        server = socket.create_server(("0.0.0.0", 45671))
        print("ready", flush=True)
        signal.pause()
        """
        yard.backend.submit(yard.spec(serve, name="job-2-1"))
        yard.wait_for_text("ready", "job-2-1")
        script = f"""{TRY}
    import socket
    def dial(*address):
        with socket.create_connection(address, timeout=2): return "reached"
    def knock(name):
        with socket.socket(socket.AF_UNIX) as one: return one.connect(name) or "reached"
    print(json.dumps([
        attempt(dial, "127.0.0.1", {ours.getsockname()[1]}),
        attempt(dial, "127.0.0.1", 45671),
        attempt(dial, "192.0.2.1", 80),
        attempt(knock, "\\0trainyard-test-{yard.folder.name}"),
        [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line],
    ]))
        """
        yard.run(script)
    assert json.loads(yard.log()) == [
        "ConnectionRefusedError",
        "ConnectionRefusedError",
        "OSError",
        "ConnectionRefusedError",
        ["lo"],
    ]


def test_nodes_of_one_run_reach_each_other(yard: Yard) -> None:
    script = """
    import os, socket, time
    port = int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        with socket.create_server(("0.0.0.0", port), reuse_port=False) as server:
            server.accept()[0].sendall(b"met")
    else:
        while True:
            try:
                print(socket.create_connection((os.environ["MASTER_ADDR"], port)).recv(3).decode())
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
    """
    assert yard.run(script, nodes=2).outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
    assert yard.log(1) == "met\n"


def test_the_setting_gives_runs_the_hosts_network(tmp_path: Path, bare_images: Path) -> None:
    made = Yard(tmp_path, bare_images)
    made.backend = made.another(network="host")
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        made.run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5).close()\nprint('reached')")
    assert made.log() == "reached\n"
    assert "shares the network" in (made.backend.run_folder("job-1-1") / "logs" / "supervisor-0.log").read_text()
    made.backend.delete("job-1-1")


def test_sockets_and_processes_of_the_console_are_out_of_sight(yard: Yard) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        path = str(yard.folder / "s")
        server.bind(path)
        server.listen()
        script = f"""{TRY}
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


def test_limits_are_lowered_and_never_raised(yard: Yard) -> None:
    script = """
    import resource
    for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CORE"):
        hard = resource.getrlimit(getattr(resource, name))[1]
        try:
            resource.setrlimit(getattr(resource, name), (hard, hard + 1))
            print("raised", name)
        except (OSError, ValueError):
            resource.setrlimit(getattr(resource, name), (0, hard))
    print("lowered")
    """
    assert yard.run(script, workers_per_node=2).outcome is Outcome.COMPLETED
    assert yard.log(1) == "lowered\n"


def test_a_run_that_writes_too_much_is_ended(yard: Yard) -> None:
    script = """
    import os, time
    for number in range(10 ** 6):
        with open(os.path.join(os.environ["RUN_DIR"], str(number)), "wb") as file: file.write(bytes(1 << 20))
        time.sleep(0.02)
    """
    status = yard.run(script, resources=Resources(cpus=1, memory_mib=512, disk_mib=20))
    assert status.outcome is Outcome.DISK_FULL
    assert status.failure is not None
    assert status.failure.code is FailureCode.DISK_FULL
    assert status.failure.data["limit_mib"] == 20
    assert status.failure.data["used_mib"] > 20


def test_one_file_cannot_outgrow_the_limit(yard: Yard) -> None:
    script = """
    import os
    try:
        with open("big", "wb") as file:
            for _ in range(600): file.write(bytes(1 << 20))
    except OSError as error:
        print(error.strerror)
    os.unlink("big")
    """
    yard.run(script, resources=Resources(cpus=1, memory_mib=512, disk_mib=512))
    assert yard.log() == "File too large\n"


def test_the_kernel_holds_cpu_memory_and_processes(yard: Yard) -> None:
    if cgroups.why_not():
        pytest.fail("the tests need control groups: run them as root")
    yard.backend.submit(yard.spec("import signal\nprint('ready')\nsignal.pause()", resources=Resources(0.5, 300)))
    yard.wait_for_text("ready")
    note = yard.backend.run_folder("job-1-1") / "nodes" / "0.cgroups"
    folders = [Path(folder) for folder in json.loads(note.read_bytes())]
    limits = {
        path.name: path.read_text().strip()
        for folder in folders
        for path in folder.iterdir()
        if path.name in {"memory.limit_in_bytes", "memory.max", "pids.max", "cpu.cfs_quota_us", "cpu.max"}
    }
    assert str(300 << 20) in limits.values()
    assert limits["pids.max"] == "2048"
    assert {"52000", "52000 100000"} & set(limits.values())
    inside = {pid for folder in folders for pid in (folder / "cgroup.procs").read_text().split()}
    assert len(inside) == 3, "bubblewrap, the launcher and the rank, all in every group"
    yard.backend.stop("job-1-1", 0)
    yard.wait_for_end()
    assert not any(folder.exists() for folder in folders)
