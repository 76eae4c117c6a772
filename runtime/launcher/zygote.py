"""An interpreter of an image that has imported the image's frameworks, and is forked into runs' ranks.

    python -u zygote.py <socket name> <idle seconds> <module> ...

It runs outside any sandbox, beside its image's users, and knows nothing of any run: clean environment, no files of
customers, one thread. Supervisors connect to its socket in the working directory. For each connection it forks a
midwife, which enters the sandbox that bubblewrap has made for a node, by a descriptor of the sandbox's first process,
and there forks the ranks; the launcher, as first process, adopts them and tells each by `warm` what to run.

A second one, forked before the frameworks were imported, serves `<socket name>-plain`: for scripts that import none of
them a rank with a framework in it would be no gain, and take long to end. It lives as long as the first.

The one rule: before a rank runs a line of the customer's, it is in the sandbox's namespaces and in no other, without
any capability, with the limits, the group and the session of a rank that was started cold, and holds no descriptor but
its own; what cannot be made so is not run at all. The midwife holds nothing but the way into this one sandbox, and is
gone before anything of the customer's runs in it. Standard library only.
"""

import _thread
import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time

if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    __package__ = "launcher"
    __spec__ = None  # type: ignore[assignment]  # it names no parent, and Python 3.13 warns

from . import calls
from . import rank as wrapper
from .warm import MOST_BYTES, receive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, FrozenSet, List, NoReturn

_ALL_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x08000000 | 0x04000000 | 0x02000000 | 0x40000000
_OWN_NAMESPACES = ("user", "mnt", "pid", "ipc", "uts")
"""A sandbox has these to itself; its network may be the host's, where the installation says so."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_NO_NEW_PRIVS, _PR_GET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 39, 47, 4
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _INSTRUCTION_BYTES = 22, 2, 8
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
_TICK_SECONDS = 1.0
_ORDER_SECONDS = 1.0
_LONGEST_AGE_SECONDS = 6 * 3600.0
"""Forks of one interpreter share its layout in memory and the seed of its hashes: not for ever."""
_HEAD_START_STEP_SECONDS = 0.001
_ASIDE = 100

PLAIN = "-plain"

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """This rank can't be warm: the launcher is told, and starts it cold."""


def main(arguments: "List[str]") -> None:
    """Import, offer, fork, until nobody has asked for long or the keeper is gone."""
    name, idle, modules = arguments[0], float(arguments[1]), arguments[2:]
    parent = os.getppid()
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        return
    first = os.getpid()
    plain = not os.fork()
    if plain:
        _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        if os.getppid() != first:
            return
        name, idle, modules = name + PLAIN, float("inf"), []
    for module in modules:
        importlib.import_module(module)
    wrapper.preload()
    _require_a_good_fork()
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    temporary = "{}.{}".format(name, os.getpid())
    listener.bind(temporary)
    listener.listen(64)
    os.rename(temporary, name)
    begun = asked = time.monotonic()
    while time.monotonic() - asked < idle and time.monotonic() - begun < _LONGEST_AGE_SECONDS:
        ready, _, _ = select.select([listener], [], [], _TICK_SECONDS)
        _reap()
        if not ready:
            continue
        asked = time.monotonic()
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            _deliver(connection, plain=plain)
        connection.close()
    try:
        os.unlink(name)
    except OSError:
        return


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _require_a_good_fork() -> None:
    """Where an import has touched the GPU, forks cannot use it: then this image has no warm start."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    child = os.fork()
    if not child:
        os._exit(1 if torch.cuda._is_in_bad_fork() else 0)  # noqa: SLF001 - torch has no other word for it
    if os.waitpid(child, 0)[1]:
        raise SystemExit("an import has initialized the GPU: ranks of this image start cold")


# The midwife


def _deliver(connection: socket.socket, *, plain: bool) -> "NoReturn":
    """In a fork: enter the sandbox when its launcher asks for it, and leave the ranks there."""
    try:
        connection.settimeout(_ORDER_SECONDS)
        order, (channel, sandbox) = receive(connection, 2)
        connection.close()
        launcher = socket.socket(fileno=channel)
        if launcher.recv(MOST_BYTES):  # The launcher is there, so the sandbox is complete. Nothing: it is gone.
            _fork_ranks(launcher, int(order["ranks"]), _enter(sandbox, order))
    except _Born as born:
        _become(born, plain)
    except BaseException as error:  # nothing of a fork may return to where the zygote waits
        sys.stderr.write("no warm rank: {!r}\n".format(error))
    os._exit(0)


class _Born(Exception):
    """Unwinds a rank's stack to where it goes on as one."""

    def __init__(self, launcher: socket.socket) -> None:
        super().__init__()
        self.launcher = launcher


def _enter(sandbox: int, order: "Dict[str, Any]") -> "Dict[str, str]":
    """Go in with the limits of a cold rank; gives the namespaces that this process had before."""
    for name, limits in order["limits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        wanted = limits if hard == resource.RLIM_INFINITY else min(hard, limits)
        resource.setrlimit(number, (wanted, wanted))
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(order["oom_score_adj"]))
    for folder in order["cgroups"]:
        with open(folder + "/cgroup.procs", "w") as file:
            file.write("0")
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))
    before = _namespaces()
    _check(_libc.setns(sandbox, _ALL_NAMESPACES))
    os.close(sandbox)
    return before


def _namespaces() -> "Dict[str, str]":
    return {kind: os.readlink("/proc/self/ns/" + kind) for kind in _OWN_NAMESPACES}


def _fork_ranks(launcher: socket.socket, ranks: int, before: "Dict[str, str]") -> None:
    """A child, the first of us in the sandbox's pid namespace, has the ranks and leaves them to the launcher."""
    nurse = os.fork()
    if nurse:
        os.waitpid(nurse, 0)
        return
    os.chdir("/")
    now = _namespaces()
    shared = [kind for kind in _OWN_NAMESPACES if now[kind] == before[kind]]
    if shared:
        raise Refused(shared)
    _drop_privileges()
    for _rank in range(ranks):
        if not os.fork():
            raise _Born(launcher)
    os._exit(0)


def _drop_privileges() -> None:
    for capability in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break
    _check(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0))
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, struct.pack("=6I", 0, 0, 0, 0, 0, 0)))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    left = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, left))
    if left.raw.strip(b"\0") or _libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        raise Refused("privileges are left")
    _refuse_calls()


def _refuse_calls() -> None:
    """As bubblewrap does it for what starts cold."""
    program = None if calls.why_not() else calls.program()
    if program is None:
        return
    code = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxP", len(program) // _INSTRUCTION_BYTES, ctypes.addressof(code))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_, 0, 0))


# The rank


def _become(born: _Born, plain: bool) -> None:
    """Be the rank that the launcher says, to the interpreter's end. Leaves by SystemExit, as a script does."""
    launcher = born.launcher
    try:
        launcher.send(json.dumps({"type": "ready"}).encode())
        told, descriptors = receive(launcher, None)
        if not told:
            os._exit(0)
        reason = _unfit(told)
        launcher.send(json.dumps({"type": "no" if reason else "taken", "pid": os.getpid(), "why": reason}).encode())
        if reason:
            os._exit(0)
        launcher.detach()
        notes, *record = _take_over(descriptors)
        _start_afresh(told)
        _wait_for_rank_0(told)
    except BaseException as error:  # as above; the launcher reaps this process and starts nothing in its place
        sys.stderr.write("no warm rank: {!r}\n".format(error))
        os._exit(70)
    raise _Run(notes, sys.argv[0], record[0] if record else -1, plain)


class _Run(BaseException):
    """Unwinds to the top of the main module, where the script runs as from an interpreter's own."""

    def __init__(self, notes: int, script: str, record: int, plain: bool) -> None:
        super().__init__()
        self.arguments = (notes, script, record)
        self.plain = plain


def _unfit(told: "Dict[str, Any]") -> str:
    """Why this script must not find what is imported here; "" where it may.

    A file or folder beside it that has the name of a module which is here already would have come first.
    """
    here = {name.partition(".")[0] for name in sys.modules} - {"__main__", "launcher"}
    for folder in told["import_folders"]:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            if name.partition(".")[0] in here and (name.endswith((".py", ".so", ".pyc")) or "." not in name):
                return "{} comes before the image's own".format(os.path.join(folder, name))
    return ""


def _take_over(descriptors: "List[int]") -> "List[int]":
    """Keep what a cold rank would have, and nothing else: standard streams, the pipe for notes, the record of steps."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[0], 2)
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ASIDE) for descriptor in descriptors[1:]]
    os.closerange(3, _ASIDE)
    for number, descriptor in enumerate(kept):
        os.dup2(descriptor, 3 + number, inheritable=False)
    os.closerange(3 + len(kept), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    return [3 + number for number in range(len(kept))]


def _start_afresh(told: "Dict[str, Any]") -> None:
    """Let nothing of the zygote be seen or guessed: session, environment, arguments, what is random."""
    os.setsid()
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    sys.argv[:] = told["arguments"]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = [sys.executable, "-u", *told["arguments"]]
    for name, reseed in (("random", "seed"), ("numpy.random", "seed")):
        module = sys.modules.get(name)
        if module is not None:
            getattr(module, reseed)()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
    torch = sys.modules.get("torch")
    threads = told["environment"].get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdigit():
        # Read when the library was loaded, long ago.
        torch.set_num_threads(int(threads))
    for name in [name for name in sys.modules if name == "launcher" or name.startswith("launcher.")]:
        del sys.modules[name]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A supervisor catches these, so a cold rank never ignores them, whatever its console was started by.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))


def _wait_for_rank_0(told: "Dict[str, Any]") -> None:
    """PyTorch's rank 0 serves the store that the others connect to; who comes before it listens waits much longer."""
    give_up_at = time.monotonic() + told["head_start_seconds"]
    port = ":{:04X} ".format(int(told["environment"].get("MASTER_PORT", 0)))
    while time.monotonic() < give_up_at:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            try:
                with open(table) as file:
                    # Local address, remote address, state: 0A is listening.
                    if any(port in line and line.split()[3] == "0A" for line in file):
                        return
            except OSError:
                return
        time.sleep(_HEAD_START_STEP_SECONDS)  # that another process listens comes with no event


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _leave(known: "FrozenSet[str]") -> None:
    """End as an interpreter does after a script that went well, but leave whole what was there before the script.

    Taking that apart would copy most of the zygote's memory, for nothing. What is the script's own gets all it would:
    its threads are waited for, its exit handlers and its objects' destructors run, then the C library's handlers. May
    return: whatever is not plain is left to the interpreter.
    """
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()  # noqa: SLF001 - what the interpreter itself calls
    if _thread._count():  # noqa: SLF001 - threads that nobody waits for; there is no other word for their number
        return
    atexit._run_exitfuncs()  # noqa: SLF001 - as above
    sys.stdout.flush()
    sys.stderr.flush()
    for module in [module for name, module in reversed(list(sys.modules.items())) if name not in known]:
        for name in sorted(vars(module), key=lambda name: not name.startswith("_")):
            if name != "__builtins__":
                vars(module)[name] = None
    gc.collect()
    for found in gc.get_objects():
        if issubclass(type(found), io.IOBase) and not found.closed and found.writable():
            found.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    _libc.exit(0)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except _Run as _run:
        _arguments, _plain = _run.arguments, _run.plain
    else:
        sys.exit(0)
    _known = frozenset(sys.modules) - {"__main__"}
    try:
        wrapper.run(*_arguments)
    except SystemExit as _end:
        if _end.code not in (None, 0):
            raise
    if _plain:
        try:  # noqa: SIM105 - contextlib is not loaded here
            _leave(_known)
        except Exception:  # noqa: S110 - the interpreter says what there is to say
            pass
