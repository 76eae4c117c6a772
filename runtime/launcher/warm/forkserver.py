"""A fork server: an interpreter of an image that has imported the image's frameworks and forks the ranks of runs.

    python -u forkserver.py <socket name> <idle seconds> <module> ...

The warm pool's daemon (`runtime.backends.local.warm_pool.daemon`) starts one for each image. A fork server runs outside
any sandbox, with a clean environment, one thread and no customer files. Its socket is in the working directory.

Supervisors connect to the socket and pass two descriptors: a socket to the launcher in their sandbox, and a pidfd of
that sandbox's first process. For each connection the fork server forks an *entry process*. The entry process waits for
the launcher's message on that socket, enters the sandbox, forks the ranks there and ends. The launcher is the first
process of the sandbox, so it adopts the ranks. It sends each rank its script over the same socket (`client`).

Before a rank runs customer code, it is confined like a rank that was started cold. It has only the sandbox's namespaces
and its own descriptors, no capabilities, and the same limits, cgroup and session. If any of that fails, the rank does
not run. Standard library only.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, Dict, List, NamedTuple, Optional

# Run as a script, so make this file part of its package: the relative imports below need it.
if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    __package__ = "launcher.warm"
    __spec__ = None  # type: ignore[assignment]  # Python 3.13 warns if a spec names another package than this

from .. import seccomp
from .client import MAX_MESSAGE_BYTES, python_path, receive

# Constants from the kernel's headers. First the CLONE_NEW* flags of user, mount, pid, ipc, uts and cgroup namespaces,
# and of the network.
_ALL_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x08000000 | 0x04000000 | 0x02000000 | 0x40000000
_PRIVATE_NAMESPACES = ("user", "mnt", "pid", "ipc", "uts")
"""Kinds of namespaces that every sandbox has to itself. Two kinds are not among them: a setting can make runs share the
host's network, and not every kernel has namespaces of cgroups."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_NO_NEW_PRIVS, _PR_GET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 39, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
"""The highest capability that version 3 of the kernel's interface can name."""
_POLL_SECONDS = 1.0
"""Interval at which an idle fork server reaps children and checks whether it should end; neither is urgent."""
_REQUEST_SECONDS = 1.0
"""How long a connected supervisor may take to send its request, which it does as soon as its sandbox starts."""
_MAX_AGE_SECONDS = 6 * 3600.0
"""Age at which a fork server ends, so that a new one replaces it: all forks of one interpreter share its memory layout
and its hash seed."""
_STORE_POLL_SECONDS = 0.001
"""Interval at which a rank checks whether rank 0 listens. There is no event for another process's listening socket."""
_FIRST_SPARE_DESCRIPTOR = 100
"""A rank's descriptors are moved to this number and above while those below are closed. A rank has fewer than ten."""
_NOT_STARTED_EXIT_CODE = 70
"""Exit code (EX_SOFTWARE of sysexits.h) of a rank that failed after it had accepted a script."""


def _load_rank_module() -> Any:
    """Load the module `rank` with `<trainyard>` as its file name, since tracebacks must not show a path of the host."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "rank.py")
    module = type(sys)("launcher.rank")
    module.__file__ = path
    with open(path, "rb") as file:
        exec(compile(file.read(), "<trainyard>", "exec"), module.__dict__)  # noqa: S102 - the platform's code
    return module


_rank_module = _load_rank_module()

_LIBC = ctypes.CDLL(None, use_errno=True)


class UnsafeRank(Exception):
    """The forked process could not be confined like a rank that is started cold."""


class Script(NamedTuple):
    """The path of the script that a forked rank runs.

    `report_fd` is the descriptor of the rank's pipe for reports, `counts_fd` that of its step counts (-1: none).
    """

    report_fd: int
    path: str
    counts_fd: int


def main(arguments: List[str]) -> Optional[Script]:
    """Import the modules and serve until idle for too long. Returns None in the server, and a script in each rank."""
    name, idle_seconds, modules = arguments[0], float(arguments[1]), arguments[2:]
    parent = os.getppid()
    _raise_on_error(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        return None  # the daemon ended before the signal was set
    for module in modules:
        importlib.import_module(module)
    _rank_module.preload()
    exit_if_gpu_is_open()
    # Frozen objects are not visited by the ranks' garbage collectors, so their memory pages stay shared.
    gc.collect()
    gc.freeze()
    listener = _listen(name)
    started_at = last_request_at = time.monotonic()
    while time.monotonic() - last_request_at < idle_seconds and time.monotonic() - started_at < _MAX_AGE_SECONDS:
        ready, _, _ = select.select([listener], [], [], _POLL_SECONDS)
        _reap()
        if not ready:
            continue
        last_request_at = time.monotonic()
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            return _serve_supervisor(connection)
        connection.close()
    with contextlib.suppress(OSError):
        os.unlink(name)
    return None


def _listen(name: str) -> socket.socket:
    """Return a listening socket. The socket's file is named `name` only once connections are accepted."""
    listener = socket.socket(socket.AF_UNIX)
    temporary = "{}.{}".format(name, os.getpid())
    listener.bind(temporary)
    listener.listen(64)  # the nodes of several runs may start at once
    os.rename(temporary, name)
    return listener


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def exit_if_gpu_is_open(descriptors: str = "/proc/self/fd") -> None:
    """Exit if an import has opened a GPU: CUDA fails in forks of such a process. This image's ranks then start cold.

    `descriptors` is the folder in /proc with a link for each open descriptor.
    """
    for name in os.listdir(descriptors):
        try:
            path = os.readlink(os.path.join(descriptors, name))
        except OSError:  # the descriptor of `listdir`, closed by now
            continue
        if path.startswith("/dev/nvidia"):
            raise SystemExit(f"An import has opened {path}: ranks of this image start cold.")


# The entry process


def _serve_supervisor(connection: socket.socket) -> Script:
    """In a fork of the server: enter the sandbox and fork its ranks. Returns only in ranks, once they have a script."""
    launcher: Optional[socket.socket] = None
    try:
        connection.settimeout(_REQUEST_SECONDS)
        request, (launcher_fd, sandbox_pidfd) = receive(connection, descriptor_count=2)
        connection.close()
        launcher_socket = socket.socket(fileno=launcher_fd)
        # The launcher sends a message once the sandbox is complete. It closes the socket if it needs no warm rank.
        if launcher_socket.recv(MAX_MESSAGE_BYTES):
            host_namespaces = _enter_sandbox(sandbox_pidfd, request)
            if _fork_ranks(int(request["ranks"]), host_namespaces):
                launcher = launcher_socket
    except BaseException as error:  # this process must never return into the server's loop
        sys.stderr.write("no warm rank: {!r}\n".format(error))
    if launcher is None:
        os._exit(0)
    return _become_rank(launcher)


def _enter_sandbox(sandbox_pidfd: int, request: Dict[str, Any]) -> Dict[str, str]:
    """Enter the sandbox with the limits of a cold rank; return the namespaces that this process had before.

    `request` is the message of `runtime.backends.supervision.rank_fork`.
    """
    for name, limit in request["limits"].items():
        limit_kind = getattr(resource, name)
        hard_limit = resource.getrlimit(limit_kind)[1]
        effective_limit = limit if hard_limit == resource.RLIM_INFINITY else min(hard_limit, limit)
        resource.setrlimit(limit_kind, (effective_limit, effective_limit))
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(request["oom_score_adj"]))
    for folder in request["cgroups"]:
        with open(folder + "/cgroup.procs", "w") as file:
            file.write("0")  # stands for the process that writes
    # No process of the sandbox can read or trace this one until `_reset_process`, which is called in each rank.
    _raise_on_error(_LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))
    host_namespaces = _namespaces()
    _raise_on_error(_LIBC.setns(sandbox_pidfd, _ALL_NAMESPACES))
    os.close(sandbox_pidfd)
    return host_namespaces


def _namespaces() -> Dict[str, str]:
    return {kind: os.readlink("/proc/self/ns/" + kind) for kind in _PRIVATE_NAMESPACES}


def _fork_ranks(ranks: int, host_namespaces: Dict[str, str]) -> bool:
    """Fork the ranks; return True in each rank and False elsewhere. Raises UnsafeRank.

    A new pid namespace applies only to children. The ranks are therefore forked by a child, which ends at once, so that
    the launcher adopts them.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return False
    os.chdir("/")
    own_namespaces = _namespaces()
    shared = [kind for kind in _PRIVATE_NAMESPACES if own_namespaces[kind] == host_namespaces[kind]]
    if shared:
        raise UnsafeRank("namespaces shared with the host", shared)
    _drop_privileges()
    for _rank in range(ranks):
        pid = os.fork()
        if not pid:
            return True
    return False


def _drop_privileges() -> None:
    """Drop every capability for good and install the filter of system calls, as bubblewrap does for a cold start."""
    for capability in range(_LAST_CAPABILITY + 1):
        # Fails at the first capability that this kernel does not have.
        if _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break
    _raise_on_error(_LIBC.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0))
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _raise_on_error(_LIBC.capset(header, struct.pack("=6I", 0, 0, 0, 0, 0, 0)))
    _raise_on_error(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    # Read back what is left, since customer code runs next.
    capabilities = ctypes.create_string_buffer(24)  # two structs of three 32-bit sets
    _raise_on_error(_LIBC.capget(header, capabilities))
    if capabilities.raw.strip(b"\0") or _LIBC.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        raise UnsafeRank("privileges could not be dropped")
    system_call_filter = None if seccomp.unavailable_reason() else seccomp.sandbox_filter()
    if system_call_filter is not None:
        seccomp.install_filter(system_call_filter)


# The rank


def _become_rank(launcher: socket.socket) -> Script:
    """Wait for the launcher's script and become the rank that runs it; end this process where that fails."""
    try:
        launcher.send(json.dumps({"type": "ready"}).encode())
        # `None`, since two descriptors come, or three with step counts.
        script_message, descriptors = receive(launcher, descriptor_count=None)
        if not script_message:
            os._exit(0)
        reason = _reason_to_start_cold(script_message["import_folders"])
        answer = {"type": "refused" if reason else "accepted", "pid": os.getpid(), "reason": reason}
        launcher.send(json.dumps(answer).encode())
        if reason:
            os._exit(0)
        launcher.detach()  # so that only `_close_other_descriptors` closes it
        report_fd, *counts_fds = _close_other_descriptors(descriptors)
        _reset_process(script_message)
        _wait_for_store(script_message)
    except BaseException as error:  # this process must never return into the server's loop
        sys.stderr.write("no warm rank: {!r}\n".format(error))
        os._exit(_NOT_STARTED_EXIT_CODE)
    return Script(report_fd, sys.argv[0], counts_fds[0] if counts_fds else -1)


def _reason_to_start_cold(import_folders: List[str]) -> str:
    """Return why the script cannot run in this process; "" if it can.

    It cannot if a module of the script's own has the name of a module that is loaded here: the script's import would
    return the loaded one.
    """
    # An interpreter imports `sitecustomize` when it starts, and this one has started already.
    loaded = {name.partition(".")[0] for name in sys.modules} - {"__main__", "launcher"} | {"sitecustomize"}
    for folder in import_folders:
        try:
            names = os.listdir(folder)
        except OSError:
            continue  # PYTHONPATH may name folders that do not exist
        for name in names:
            # A name without a dot may be a folder, and so a package.
            if name.partition(".")[0] in loaded and (name.endswith((".py", ".so", ".pyc")) or "." not in name):
                return "{} comes before the image's own".format(os.path.join(folder, name))
    return ""


def _close_other_descriptors(descriptors: List[int]) -> List[int]:
    """Close all descriptors except those of a cold rank: standard streams, the pipe for reports, the step counts.

    The first of `descriptors` is the rank's output. Returns the new numbers of the others.
    """
    dev_null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(dev_null, 0)
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[0], 2)
    moved_descriptors = [
        fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_SPARE_DESCRIPTOR) for descriptor in descriptors[1:]
    ]
    os.closerange(3, _FIRST_SPARE_DESCRIPTOR)
    for number, descriptor in enumerate(moved_descriptors):
        os.dup2(descriptor, 3 + number, inheritable=False)
    os.closerange(3 + len(moved_descriptors), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    return [3 + number for number in range(len(moved_descriptors))]


def _reset_process(script_message: Dict[str, Any]) -> None:
    """Give this process the session, environment, arguments, random state and signal handlers of a cold rank.

    `script_message` is the message of `client.WarmRanks.start`.
    """
    os.setsid()
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(script_message["environment"])
    # An interpreter reads PYTHONPATH when it starts. The first entry is the script's folder.
    sys.path[1:1] = python_path(script_message["environment"])
    os.chdir(script_message["folder"])
    sys.argv[:] = script_message["arguments"]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = [sys.executable, "-u", *script_message["arguments"]]
    # These seed themselves at random when they are imported, so all forks have inherited one state.
    for name in ("random", "numpy.random"):
        module = sys.modules.get(name)
        if module is not None:
            module.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)  # all forks have inherited the same key
    torch = sys.modules.get("torch")
    threads = script_message["environment"].get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdigit():
        # The library read the variable when the server imported it.
        torch.set_num_threads(int(threads))
    # A cold rank has not imported the platform's modules either.
    for name in [name for name in sys.modules if name == "launcher" or name.startswith("launcher.")]:
        del sys.modules[name]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The server may ignore these signals. A cold rank never inherits them as ignored, because supervisors handle them.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _raise_on_error(_LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))


def _wait_for_store(script_message: Dict[str, Any]) -> None:
    """Wait until PyTorch's rank 0 serves its store, for `head_start_seconds` at most.

    A client that connects too early is refused, and retries only after about half a second.
    """
    give_up_at = time.monotonic() + script_message["head_start_seconds"]
    port_suffix = ":{:04X} ".format(int(script_message["environment"].get("MASTER_PORT", 0)))
    while time.monotonic() < give_up_at:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            try:
                with open(table) as file:
                    # Local address, remote address, state: 0A is listening.
                    if any(port_suffix in line and line.split()[3] == "0A" for line in file):
                        return
            except OSError:
                return  # listening sockets cannot be seen here, so the rank begins at once
        time.sleep(_STORE_POLL_SECONDS)  # the kernel announces no listening socket


def _raise_on_error(result: int) -> None:
    """Raise OSError if a call of the C library has failed."""
    if result < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))


if __name__ == "__main__":
    # Called from the module's top level, so that the script's stack is as short as in a cold start.
    _script = main(sys.argv[1:])
    if _script is not None:
        _rank_module.run(_script.report_fd, _script.path, _script.counts_fd)
