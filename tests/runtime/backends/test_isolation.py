"""Hostile scripts: a run can read, write, see and call only what its sandbox allows."""

import ast
import fcntl
import os
import signal
import socket
from pathlib import Path

import pytest

from runtime.specs import Outcome
from tests.runtime.backends import hostile
from tests.runtime.backends.hostile import attempts, evaluate
from tests.runtime.conftest import LocalHarness

pytestmark = pytest.mark.late("its runs are real processes, with time limits of seconds")


@pytest.fixture(params=hostile.STARTS)
def harness(harness, request):
    """Both ways to start ranks."""
    return hostile.choose_start(harness, request.param)


# Files and processes


def test_files_sockets_and_processes_of_the_console_are_out_of_sight(harness):
    secret, console = harness.folder / "secret", Path(__file__).resolve().parents[3]
    secret.write_text("key")
    files = [str(secret), str(console / "pyproject.toml"), str(console / "console"), "/root/.bashrc", "/etc/shadow"]
    with socket.socket(socket.AF_UNIX) as server:
        path = str(harness.folder / "s")
        server.bind(path)
        server.listen()
        _linked, is_link_followed, *results = evaluate(
            harness,
            f"os.symlink({str(secret)!r}, 'link')",
            "os.path.exists('link')",
            *attempts("read", *files),
            *attempts("connect", path),
            *attempts("os.listdir", f"/proc/{os.getpid()}", str(harness.folder), "/sys/fs/cgroup"),
            *attempts("read", "/proc/kcore", "/proc/kmsg", "/dev/mem"),
            *attempts("write", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger"),
            *attempts("lambda path: open(path, 'r+')", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe"),
            *("attempt(os.mkdir, '/sys/fs/cgroup/memory/mine')", "attempt(os.setuid, 0)", "attempt(os.chroot, '/')"),
        )
    assert not is_link_followed
    assert set(results[: len(files)]) == {"FileNotFoundError"}
    assert set(results) <= {"FileNotFoundError", "PermissionError", "OSError"}


def test_nothing_can_be_written_but_where_it_is_allowed(harness):
    (harness.dataset / "images").write_text("data")
    image = harness.images_root / "bare"
    refused = [
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
    allowed = [
        "/workspace/a",
        "/trainyard/run/a",
        "/trainyard/checkpoints/a",
        "/trainyard/outputs/a",
        "/tmp/a",
        "/dev/shm/a",
    ]
    results = evaluate(harness, *attempts("write", *refused, *allowed))
    assert set(results[: len(refused)]) <= {"OSError", "PermissionError"}
    assert results[len(refused) :] == ["1"] * 6
    assert (harness.dataset / "images").read_text() == "data"


def test_other_processes_are_out_of_sight(harness):
    harness.start("import signal\nprint('ready')\nsignal.pause()", name="job-2-1")
    pids, kill = evaluate(
        harness, "[name for name in os.listdir('/proc') if name.isdigit()]", f"attempt(os.kill, {os.getpid()}, 0)"
    )
    assert len(pids) == 2, "the launcher and this rank"
    assert kill == "ProcessLookupError"


def test_the_launcher_cannot_be_spied_on_or_killed(harness):
    results = evaluate(
        harness,
        *(
            f"attempt(os.kill, 1, {number:d})"
            for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)
        ),
        *attempts("read", "/proc/1/environ", "/proc/1/mem"),
        *("attempt(os.readlink, '/proc/1/fd/0')", "attempt(os.listdir, '/proc/1/root')"),
        *("ctypes.CDLL(None).ptrace(16, 1, 0, 0)", "ctypes.CDLL(None).syscall(438, os.pidfd_open(1), 4, 0)"),
    )
    assert results == ["PermissionError"] * 8 + [-1, -1]


def test_the_ranks_inherit_no_descriptor_of_the_launchers(harness):
    harness.run(
        "import os\nprint([os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in (0, 1, 2)])\n"
        "print(sum(os.path.exists(f'/proc/self/fd/{n}') for n in range(3, 100)))"
    )
    assert harness.log() == "['/dev/null', 'pipe', 'pipe']\n2\n", "the pipe for notes, the file of steps"


def test_forged_notes_change_no_outcome(harness):
    script = """
    import os, sys
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b"finished 1\\n" * 100 + b"raised x\\nraised 99999999999\\n" + b"z" * 60000)
        except OSError:
            pass
    sys.exit(4)
    """
    assert harness.run_to_failure(Outcome.CODE_FAILED, script).exit_code == 4


def test_nothing_of_the_machines_in_proc_can_be_written_or_is_for_root_alone(harness):
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
    harness.run(script)
    assert harness.log() == "looked\n"


# The network


def test_the_hosts_loopback_and_other_runs_are_out_of_reach(harness):
    name = f"\0trainyard-test-{os.getpid()}-{harness.folder.name}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        listens = """
        import signal, socket
        server = socket.create_server(("0.0.0.0", 45671))
        print("ready", flush=True)
        signal.pause()
        """
        harness.start(listens, name="job-2-1")
        *refused, unreachable, devices = evaluate(
            harness,
            *attempts("connect", name, server.getsockname(), ("127.0.0.1", 45671), ("192.0.2.1", 80)),
            "[line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]",
        )
    assert refused == ["ConnectionRefusedError"] * 3
    assert (unreachable, devices) == ("OSError", ["lo"])


def test_the_setting_gives_runs_the_hosts_network(tmp_path, bare_images):
    shared = LocalHarness(tmp_path, bare_images)
    shared.backend = shared.another(network="host")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        shared.run(
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5).close()\nprint('reached')"
        )
    assert shared.log() == "reached\n"
    assert "shares the network" in (shared.backend.run_folder("job-1-1") / "logs" / "supervisor-0.log").read_text()
    shared.backend.delete("job-1-1")


# Calls of the kernel

ASK = """
    import ctypes, errno, fcntl, os, sys
    libc = ctypes.CDLL(None, use_errno=True)
    def call(*arguments):
        ctypes.set_errno(0)
        return "allowed" if libc.syscall(*arguments) >= 0 else errno.errorcode[ctypes.get_errno()]
    def lease(path, kind):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.fcntl(descriptor, 1024, kind)
            return "allowed"
        except OSError as error:
            return errno.errorcode[error.errno]
        finally:
            os.close(descriptor)
    def spawn(flags):
        pid = libc.syscall(56, flags | 17, 0, 0, 0, 0)
        if not pid: os._exit(0)
        if pid > 0: os.waitpid(pid, 0)
        return "allowed" if pid > 0 else errno.errorcode[ctypes.get_errno()]
"""


@pytest.fixture
def held(harness):
    """A file of the console's own user, on which a lease would be possible."""
    file = harness.dataset / "file"
    file.write_text("data")
    descriptor = os.open(file, os.O_RDONLY)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    os.close(descriptor)
    return file


@pytest.mark.usefixtures("held")
def test_a_run_gets_no_lease_on_a_file(harness):
    """A lease on a file that others open delays each of them for 45 seconds."""
    paths = ["/datasets/digits/file", "/usr/lib/os-release", str(harness.images_root / "bare" / "pyvenv.cfg")]
    script = f"""{ASK}
    print([lease(path, kind) for path in {paths!r} for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK)])
    open("own", "w").close()
    print([lease("own", fcntl.F_WRLCK), fcntl.fcntl(0, fcntl.F_GETFD)])
    """
    harness.run(script)
    first, second = map(ast.literal_eval, harness.log().splitlines())
    assert first == ["EPERM"] * 6
    assert second == ["EPERM", 0], "the console opens the workspace's files; the rest of fcntl is as it was"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the script calls the kernel by its numbers on x86-64")
def test_what_the_kernel_shares_by_user_is_out_of_reach(harness):
    script = f"""{ASK}
    print([
        call(248, b"user", b"name", b"value", 5, -4), call(250, 0, -4, 1), call(249, b"user", b"name", 0, 0),
        call(253), call(294, 0), call(425, 1, 0), call(435, 0, 0),
        libc.unshare(0x10000000), spawn(0x10000000), spawn(0),
        call(165, 0, 0, 0, 0, 0), call(308, 0, 0), call(321, 0, 0, 0), call(298, 0, 0, 0, 0, 0), call(323, 0),
    ])
    print(call(0x40000000 + 39), call(39))
    """
    harness.run(script)
    first, second = harness.log().splitlines()
    assert ast.literal_eval(first) == [
        *("EPERM", "EPERM", "EPERM"),
        *("EMFILE", "EMFILE", "ENOSYS", "ENOSYS"),
        *(-1, "EPERM", "allowed"),
        *("EPERM", "EPERM", "EPERM", "EPERM", "EPERM"),
    ]
    assert second == "ENOSYS allowed"


def test_what_programs_need_is_allowed(harness):
    script = """
    import multiprocessing, os, resource, signal, socket, subprocess, sys, threading
    from multiprocessing import shared_memory
    thread = threading.Thread(target=print, args=("thread",))
    thread.start(); thread.join()
    print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout.strip())
    memory = shared_memory.SharedMemory(create=True, size=1 << 16)
    os.posix_fallocate(memory._fd, 0, 1 << 16)
    memory.close(); memory.unlink()
    with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(abs, [-1, -2]))
    print(os.posix_spawn("/bin/true", ["true"], {}) > 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    os.sched_setaffinity(os.getpid(), cores)
    os.setpriority(os.PRIO_PROCESS, os.getpid(), os.nice(1))
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    signal.signal(signal.SIGUSR1, lambda *_: print("signalled"))
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getppid(), 0)
    pid = os.fork()
    if not pid: signal.pause()
    os.kill(pid, signal.SIGTERM)
    print(os.waitpid(pid, 0)[1] == signal.SIGTERM)
    print(sorted({entry[4][0] for entry in socket.getaddrinfo("localhost", 1)}) != [])
    """
    harness.complete(script)
    assert harness.log().splitlines() == ["thread", "child", "[1, 2]", "True", "signalled", "True", "True"]


def test_sockets_are_of_the_families_that_training_needs_and_no_other(harness):
    """Vsock has no network namespaces: a run could listen on the machine's ports, and other runs could connect."""
    script = """
    import socket
    for family in range(1, 50):
        for protocol in (0, 15) if family == 16 else (0,):
            try: socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_STREAM, protocol).close()
            except OSError: continue
            print(family, protocol)
    one, other = socket.socketpair()
    one.send(b"a pair")
    print(other.recv(10).decode())
    """
    harness.run(script)
    families = harness.log().splitlines()
    assert families.pop() == "a pair"
    assert {"1 0", "2 0", "16 0"} <= set(families) <= {"1 0", "2 0", "10 0", "16 0"}
