"""Hostile scripts: a run can read, write, see and call only what its sandbox allows."""

import ast
import fcntl
import os
import socket
from pathlib import Path

import pytest

from runtime.specs import Outcome
from tests.runtime.backends import hostile
from tests.runtime.backends.hostile import attempts, evaluate
from tests.runtime.conftest import LocalHarness

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")


@pytest.fixture(params=hostile.STARTS)
def each_harness(harness, request):
    """A harness whose ranks start cold, then one whose ranks start warm."""
    return hostile.choose_start(harness, request.param)


# Files, processes and the network


def test_a_run_reaches_and_changes_only_what_is_its_own(each_harness):
    """Everything is tried in one run, beside another run on the same machine."""
    secret, repository, image = (
        each_harness.folder / "secret",
        Path(__file__).resolve().parents[3],
        each_harness.images_root / "bare",
    )
    secret.write_text("key")
    (each_harness.dataset / "images").write_text("data")
    abstract_name = f"\0trainyard-test-{os.getpid()}-{each_harness.folder.name}"
    listens = """
    import signal, socket
    server = socket.create_server(("0.0.0.0", 45671))
    print("ready", flush=True)
    signal.pause()
    """
    each_harness.start(listens, name="job-2-1")
    with (
        socket.socket(socket.AF_UNIX) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.create_server(("127.0.0.1", 0)) as tcp,
    ):
        for listener, name in ((server, str(each_harness.folder / "s")), (abstract, abstract_name)):
            listener.bind(name)
            listener.listen()
        interpreter = Path(os.path.realpath(image / "bin" / "python")).parent
        expressions = {
            # The command is: python -u PROGRAM.
            "program": "open('/proc/self/cmdline').read().split(chr(0))[2].rsplit('/', 1)[-1]",
            "standard streams": "[os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in (0, 1, 2)]",
            # The pipe for notes to the launcher, and the file of steps. They are not listed, since listing opens a
            # descriptor too.
            "other descriptors": "sum(os.path.exists(f'/proc/self/fd/{n}') for n in range(3, 100))",
            "a link out of the workspace": f"[attempt(os.symlink, {str(secret)!r}, 'link'), os.path.exists('link')][1]",
            "files of the host": attempts(
                "read", str(secret), str(repository / "pyproject.toml"), str(repository / "console"), "/root/.bashrc",
                "/etc/shadow",
            ),
            "a socket of the console": attempts("connect", str(each_harness.folder / "s")),
            "folders of the host": attempts(
                "os.listdir", f"/proc/{os.getpid()}", str(each_harness.folder), "/sys/fs/cgroup"
            ),
            "the kernel": [
                *attempts("read", "/proc/kcore", "/proc/kmsg", "/dev/mem"),
                *attempts("write", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger"),
                *attempts("update", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe"),
                *attempts("os.mkdir", "/sys/fs/cgroup/memory/mine"),
                *("attempt(os.setuid, 0)", "attempt(os.chroot, '/')"),
            ],
            "what it may not write": attempts(
                "write", "/datasets/digits/images", "/datasets/new", "/new", "/usr/new", "/etc/hosts", "/dev/new",
                "/opt/trainyard/launcher/agent.py", str(image / "bin" / "new"), str(interpreter / "new"),
            ),
            "what it may write": attempts(
                "write", "/workspace/a", "/trainyard/run/a", "/trainyard/checkpoints/a", "/trainyard/outputs/a",
                "/tmp/a", "/dev/shm/a",
            ),
            "processes": "len([name for name in os.listdir('/proc') if name.isdigit()])",
            "the console's process": f"attempt(os.kill, {os.getpid()}, 0)",
            "the launcher": [
                *(f"attempt(os.kill, 1, {number})" for number in (9, 19, 15, 2)),  # SIGKILL, SIGSTOP, SIGTERM, SIGINT
                *attempts("read", "/proc/1/environ", "/proc/1/mem"),
                *("attempt(os.readlink, '/proc/1/fd/0')", "attempt(os.listdir, '/proc/1/root')"),
            ],
            "calls on the launcher": [
                "ctypes.CDLL(None).ptrace(16, 1, 0, 0)",  # PTRACE_ATTACH
                "ctypes.CDLL(None).syscall(438, os.pidfd_open(1), 4, 0)",  # pidfd_getfd
            ],
            # Two sockets of the test, the port of the other run, and an address on the internet.
            "the host and the other run": attempts(
                "connect", abstract_name, tcp.getsockname(), ("127.0.0.1", 45671), ("192.0.2.1", 80)
            ),
            "interfaces": "[line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]",
        }  # fmt: skip
        found = evaluate(each_harness, expressions)
    refused = {"FileNotFoundError", "PermissionError", "OSError"}
    assert set(found.pop("files of the host")) == {"FileNotFoundError"}
    for name in ("a socket of the console", "folders of the host", "the kernel"):
        assert set(found.pop(name)) <= refused, name
    assert set(found.pop("what it may not write")) <= {"OSError", "PermissionError"}
    assert (each_harness.dataset / "images").read_text() == "data"
    is_warm = (each_harness.folder / "runs" / ".warm_pool").exists()
    assert found == {
        "program": "forkserver.py" if is_warm else "rank.py",
        "a link out of the workspace": False,
        "what it may write": ["1"] * 6,  # the number of characters that were written
        "processes": 2,  # the launcher and the rank
        "the console's process": "ProcessLookupError",
        "the launcher": ["PermissionError"] * 8,
        "calls on the launcher": [-1, -1],
        "standard streams": ["/dev/null", "pipe", "pipe"],
        "other descriptors": 2,
        "the host and the other run": [*["ConnectionRefusedError"] * 3, "OSError"],
        "interfaces": ["lo"],
    }


def test_forged_notes_change_no_outcome(harness):
    """A rank's interpreter tells its launcher through a pipe that the script finished or raised."""
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


def test_in_proc_a_run_can_write_nothing_of_the_machine_and_read_nothing_that_only_root_may(harness):
    """The script prints every such file that it could open."""
    script = """
    import os
    for top, folders, files in os.walk("/proc"):
        if top == "/proc":
            folders[:] = [name for name in folders if not name.isdigit() and not name.endswith("self")]
        for name in files:
            path = os.path.join(top, name)
            for how, allowed_modes in ((os.O_WRONLY, 0), (os.O_RDONLY, 0o044)):  # what others may read is no secret
                if how == os.O_RDONLY and top.startswith("/proc/sys"): continue  # settings, which cannot be changed
                try:
                    if not allowed_modes or not os.stat(path).st_mode & allowed_modes:
                        descriptor = os.open(path, how | os.O_NONBLOCK)
                        # The sandbox hides a file behind /dev/null.
                        is_hidden = os.path.samestat(os.fstat(descriptor), os.stat("/dev/null"))
                        if not is_hidden and (how == os.O_WRONLY or os.read(descriptor, 1)): print(path, how)
                        os.close(descriptor)
                except OSError: pass
    print("looked")
    """
    harness.run(script)
    assert harness.log() == "looked\n"


def test_the_setting_network_host_shares_the_hosts_network_with_runs(tmp_path, bare_images):
    shared = LocalHarness(tmp_path, bare_images)
    shared.backend = shared.new_backend(network="host")
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
    import ctypes, errno, fcntl, os, socket, sys
    libc = ctypes.CDLL(None, use_errno=True)
    def call(*arguments):
        ctypes.set_errno(0)
        return "allowed" if libc.syscall(*arguments) >= 0 else errno.errorcode[ctypes.get_errno()]
    def lease(path, kind):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, kind)
            return "allowed"
        except OSError as error:
            return errno.errorcode[error.errno]
        finally:
            os.close(descriptor)
    def spawn(flags):
        pid = libc.syscall(56, flags | 17, 0, 0, 0, 0)  # clone, whose child ends with SIGCHLD
        if not pid: os._exit(0)
        if pid > 0: os.waitpid(pid, 0)
        return "allowed" if pid > 0 else errno.errorcode[ctypes.get_errno()]
"""
"""Functions that call the kernel and return "allowed" or the name of the error."""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the script calls the kernel by its numbers on x86-64")
def test_calls_that_reach_other_runs_or_the_host_are_refused(each_harness):
    """A lease makes other processes that open the file wait for 45 seconds. Vsock sockets ignore network namespaces."""
    file = each_harness.dataset / "file"  # of the console's own user
    file.write_text("data")
    with file.open() as opened:  # outside a run, a lease on it is possible
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    paths = ["/datasets/digits/file", "/usr/lib/os-release", str(each_harness.images_root / "bare" / "pyvenv.cfg")]
    script = f"""{ASK}
    print([lease(path, kind) for path in {paths!r} for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK)])
    open("own", "w").close()
    print([lease("own", fcntl.F_WRLCK), fcntl.fcntl(0, fcntl.F_GETFD)])
    print([
        # add_key, keyctl, request_key
        call(248, b"user", b"name", b"value", 5, -4), call(250, 0, -4, 1), call(249, b"user", b"name", 0, 0),
        # inotify_init, inotify_init1, io_uring_setup, clone3
        call(253), call(294, 0), call(425, 1, 0), call(435, 0, 0),
        # a new user namespace, and a plain clone
        libc.unshare(0x10000000), spawn(0x10000000), spawn(0),
        # mount, setns, bpf, perf_event_open, userfaultfd, open_tree_attr
        call(165, 0, 0, 0, 0, 0), call(308, 0, 0), call(321, 0, 0, 0), call(298, 0, 0, 0, 0, 0), call(323, 0),
        call(467, -100, b"/", 0, 0, 0),
    ])
    print([call(0x40000000 + 39), call(39)])  # getpid, by the numbers of x32 and of x86-64
    families = []
    for family in range(1, 50):
        for protocol in (0, 15) if family == 16 else (0,):  # 16 is netlink, and 15 its events of devices
            try: socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_STREAM, protocol).close()
            except OSError: continue
            families.append((family, protocol))
    print(families)
    """
    each_harness.complete(script)
    leases, own_file, calls, architectures, families = map(ast.literal_eval, each_harness.log().splitlines())
    assert leases == ["EPERM"] * 6
    assert own_file == ["EPERM", 0], "the console opens the workspace's files too; other uses of fcntl are allowed"
    assert calls == [
        *("EPERM", "EPERM", "EPERM"),
        *("EMFILE", "EMFILE", "ENOSYS", "ENOSYS"),  # errors after which libraries use something else
        *(-1, "EPERM", "allowed"),
        *["EPERM"] * 6,
    ]
    assert architectures == ["ENOSYS", "allowed"]
    # Unix sockets, IPv4, IPv6 where the machine has it, and netlink.
    assert {(1, 0), (2, 0), (16, 0)} <= set(families) <= {(1, 0), (2, 0), (10, 0), (16, 0)}


def test_what_programs_need_is_allowed(each_harness):
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
    one, other = socket.socketpair()
    one.send(b"a pair")
    print(other.recv(10).decode())
    """
    each_harness.complete(script)
    lines = each_harness.log().splitlines()
    assert lines == ["thread", "child", "[1, 2]", "True", "signalled", "True", "True", "a pair"]
