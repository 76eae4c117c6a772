"""Hostile scripts: calls of the kernel that reach past a sandbox, to the machine and to other runs."""

from __future__ import annotations

import ast
import fcntl
import os
from pathlib import Path

import pytest

from runtime.specs import Outcome
from tests.runtime.backends import hostile
from tests.runtime.conftest import Yard

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


@pytest.fixture(params=["cold", "warm"])
def yard(yard: Yard, request: pytest.FixtureRequest) -> Yard:
    """Both ways in which ranks are started."""
    return hostile.started(yard, request.param)


@pytest.fixture
def held(yard: Yard) -> Path:
    """A file of the console's own user, which a lease on would be possible."""
    file = yard.dataset / "file"
    file.write_text("data")
    descriptor = os.open(file, os.O_RDONLY)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    os.close(descriptor)
    return file


@pytest.mark.usefixtures("held")
def test_nobody_can_be_kept_from_a_file_that_a_run_may_only_read(yard: Yard) -> None:
    """A lease on a file of the image or of the system holds up whoever opens it, for 45 seconds each time."""
    paths = ["/datasets/digits/file", "/usr/lib/os-release", str(yard.images_root / "bare" / "pyvenv.cfg")]
    script = f"""{ASK}
    print([lease(path, kind) for path in {paths!r} for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK)])
    open("own", "w").close()
    print([lease("own", fcntl.F_WRLCK), fcntl.fcntl(0, fcntl.F_GETFD)])
    """
    yard.run(script)
    first, second = map(ast.literal_eval, yard.log().splitlines())
    assert first == ["EPERM"] * 6
    assert second == ["EPERM", 0], "the console opens the workspace's files; the rest of fcntl is as it was"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the script calls the kernel by its numbers on x86-64")
def test_what_the_kernel_shares_by_user_is_out_of_reach(yard: Yard) -> None:
    script = f"""{ASK}
    print([
        call(248, b"user", b"name", b"value", 5, -4), call(250, 0, -4, 1), call(249, b"user", b"name", 0, 0),
        call(253), call(294, 0), call(425, 1, 0), call(435, 0, 0),
        libc.unshare(0x10000000), spawn(0x10000000), spawn(0),
        call(165, 0, 0, 0, 0, 0), call(308, 0, 0), call(321, 0, 0, 0), call(298, 0, 0, 0, 0, 0), call(323, 0),
    ])
    print(call(0x40000000 + 39), call(39))
    """
    yard.run(script)
    first, second = yard.log().splitlines()
    assert ast.literal_eval(first) == [
        *("EPERM", "EPERM", "EPERM"),
        *("EMFILE", "EMFILE", "ENOSYS", "ENOSYS"),
        *(-1, "EPERM", "allowed"),
        *("EPERM", "EPERM", "EPERM", "EPERM", "EPERM"),
    ]
    assert second == "ENOSYS allowed"


def test_what_programs_need_is_allowed(yard: Yard) -> None:
    script = """
    import multiprocessing, os, subprocess, sys, tempfile, threading
    from multiprocessing import shared_memory
    thread = threading.Thread(target=print, args=("thread",))
    thread.start(); thread.join()
    print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout.strip())
    memory = shared_memory.SharedMemory(create=True, size=1 << 16)
    os.posix_fallocate(memory._fd, 0, 1 << 16)
    memory.close(); memory.unlink()
    with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(abs, [-1, -2]))
    print(os.posix_spawn("/bin/true", ["true"], {}) > 0)
    """
    assert yard.run(script).outcome is Outcome.COMPLETED, yard.log()
    assert yard.log().splitlines() == ["thread", "child", "[1, 2]", "True"]


def test_ranks_that_were_started_either_way_are_held_by_one_filter(yard: Yard) -> None:
    yard.run("print([l.split()[1] for l in open('/proc/self/status') if l.startswith('Seccomp')])")
    assert yard.log() == "['2', '1']\n"
