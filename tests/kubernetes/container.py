"""One container of the fake cluster: a process in bubblewrap, first in its PID namespace, with its real user ID.

It sees only its image and its Pod's volumes. The Pods of a Job share a network namespace, in which each has an address
of loopback.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path

from runtime.backends.sandbox import find_bubblewrap
from tests.kubernetes.images import Image
from tests.kubernetes.resources import Object

# Paths of this machine that every container sees, read-only.
_SYSTEM = ("/usr", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/sys/devices/system/cpu")
# Folders that are links into /usr on most machines.
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_LINE_BYTES = 16384  # containerd splits longer lines of output
_REPOSITORY = Path(__file__).resolve().parents[2]
_HOLD_NETWORK = """
import json, os, signal, socket, sys, threading
from runtime.backends.network import add_bridge, enter
from runtime.launcher import install
problem = enter()
if not problem: add_bridge()  # an interface besides loopback, as every Pod has
for address, port, path in json.loads(sys.argv[1]) if not problem else []:
    listener = socket.create_server((address, port))
    threading.Thread(target=install._accept, args=(listener, path), daemon=True).start()
os.write(1, (problem or "ready").encode())
os.close(1)
signal.pause()
"""
"""The program that holds a network namespace. Its argument: the address, port and socket of each server."""
IS_ROOT = os.geteuid() == 0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Bind:
    """A file or folder that the container sees at `target`. With `tmpfs_bytes`, it is memory instead."""

    target: str
    source: Path | None = None
    read_only: bool = False
    tmpfs_bytes: int = 0


@dataclass(frozen=True)
class ContainerSpec:
    """The command, image and limits of a container."""

    image: Image
    command: tuple[str, ...]
    environment: dict[str, str]
    binds: tuple[Bind, ...]
    hostname: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    read_only_root: bool = False
    working_dir: str = "/"
    memory_bytes: int = 0
    network: str = ""
    """The path of the network namespace to join; empty: this machine's."""


def _bubblewrap_arguments(spec: ContainerSpec) -> list[str]:
    """Return bubblewrap's arguments without the command."""
    built = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--new-session", "--as-pid-1",
             "--cap-drop", "ALL", "--clearenv", "--hostname", spec.hostname]  # fmt: skip
    if IS_ROOT:
        root_only = () if spec.uid else ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL")
        for capability in ("CAP_SETUID", "CAP_SETGID", *root_only):  # the first two are for `setpriv`, in `start`
            built += ["--cap-add", capability]
    else:
        built += ["--unshare-user", "--uid", str(spec.uid), "--gid", str(spec.gid)]
    # Create the parents of all mounts first: else bubblewrap creates them, with the mode of what it mounts there. The
    # three that are left out are mounts themselves.
    targets = [*_SYSTEM, *(str(folder) for folder in spec.image.folders), *(bind.target for bind in spec.binds)]
    for parent in sorted(set().union(*map(_parents, targets)) - {"/dev", "/usr", "/proc"}):
        built += ["--perms", "0755", "--dir", parent]
    built += _system_binds()
    built += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--dir", "/tmp"]
    for bind in sorted(spec.binds, key=lambda bind: bind.target.count("/")):
        if bind.source is None:
            built += ["--perms", "1777", "--size", str(bind.tmpfs_bytes or 1 << 30), "--tmpfs", bind.target]
        else:
            built += ["--ro-bind" if bind.read_only else "--bind", str(bind.source), bind.target]
    # After the Pod's own /tmp, because a checkout may be in this machine's /tmp.
    for folder in spec.image.folders:
        if not folder.is_relative_to("/usr"):
            for parent in sorted(_parents(str(folder))):
                built += ["--perms", "0755", "--dir", parent]
            built += ["--ro-bind", str(folder), str(folder)]
    if spec.read_only_root:
        built += ["--remount-ro", "/"]
    for name, value in spec.environment.items():
        built += ["--setenv", name, value]
    return [*built, "--chdir", spec.working_dir]


def _system_binds() -> list[str]:
    built = [argument for path in _SYSTEM for argument in ("--ro-bind-try", path, path)]
    for path in (Path("/") / name for name in _MERGED):
        source = ["--symlink", str(path.readlink())] if path.is_symlink() else ["--ro-bind-try", str(path)]
        built += [*source, str(path)]
    return built


def _parents(path: str) -> set[str]:
    return {str(parent) for parent in Path(path).parents if len(parent.parts) > 1}


@dataclass
class Container:
    """A container. `exit_code` is None while it runs. `lines` has each line with the time when it came.

    `on_end` is notified when it has ended.
    """

    spec: ContainerSpec
    lines: list[tuple[float, bytes]] = field(default_factory=list)
    exit_code: int | None = None
    out_of_memory: bool = False
    started_at: float = 0.0
    finished_at: float = 0.0
    ended: threading.Event = field(default_factory=threading.Event)
    on_end: threading.Condition | None = None

    def start(self) -> None:
        """Start it."""
        spec = self.spec
        read_end, write_end = os.pipe()
        # Root gets no user namespace here, and without one bubblewrap sets no user ID. So `setpriv` sets it.
        drop = ["setpriv", f"--reuid={spec.uid}", f"--regid={spec.gid}"]
        drop += [f"--groups={','.join(map(str, spec.groups))}"] if spec.groups else ["--clear-groups"]
        enter = ["nsenter", f"--net={spec.network}", "--"] if spec.network else []
        self._process = subprocess.Popen(
            [*enter, find_bubblewrap(), "--info-fd", str(write_end), *_bubblewrap_arguments(spec), "--",
             *(drop if IS_ROOT else []), *spec.command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[write_end],
        )  # fmt: skip
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            info = pipe.read()
        self.pid = json.loads(info)["child-pid"] if info else 0  # 0: bubblewrap failed
        self.started_at = time.time()
        for work in (self._read_output, self._limit_memory):
            threading.Thread(target=work, daemon=True).start()

    def signal(self, number: int) -> None:
        """Send a signal to its first process."""
        if self.exit_code is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def output(self) -> bytes:
        """Return what it has written so far."""
        return b"".join(line for _at, line in list(self.lines))

    def kill(self) -> None:
        """Kill all its processes."""
        self.signal(signal.SIGKILL)  # the kernel then kills the rest of its PID namespace
        if not self.pid:
            self._process.kill()

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in iter(lambda: output.readline(_LINE_BYTES), b""):
                self.lines.append((time.time(), line))
        # Only now, so that the log is complete when the container has ended.
        code = self._process.wait()
        self.finished_at = time.time()
        # A process that a signal ended has 128 plus the signal's number: 137 is SIGKILL.
        self.exit_code = 137 if self.out_of_memory else code if code >= 0 else 128 - code
        self.ended.set()
        if self.on_end is not None:
            with self.on_end:
                self.on_end.notify_all()

    def _limit_memory(self) -> None:
        """Kill the container when it uses more memory than its limit."""
        while self.spec.memory_bytes and not self.ended.wait(0.1):
            if self._memory_bytes() > self.spec.memory_bytes:
                self.out_of_memory = True
                self.kill()

    def _memory_bytes(self) -> int:
        """Return what its processes use, without pages that they share. `psutil` would read every process here."""
        pages, pids = 0, [self.pid]
        while pids:
            process = Path(f"/proc/{pids.pop()}")
            with contextlib.suppress(OSError):  # it has ended
                _size, resident, shared, *_rest = map(int, (process / "statm").read_text().split())
                pages += resident - shared
                pids += [int(pid) for file in process.glob("task/*/children") for pid in file.read_text().split()]
        return pages * _PAGE_BYTES


class Networks:
    """The network namespaces of Jobs. A waiting process holds each one, as the pause container does.

    `services`: servers outside the cluster, by (IP address, port), each on a Unix socket of this machine. The process
    that holds a namespace passes connections on to those that the Job's network policies allow.
    """

    def __init__(self) -> None:
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self.services: dict[tuple[str, int], Path] = {}

    def new_address(self) -> str:
        """Return an IP address for a Pod."""
        number = next(self._numbers)
        return f"127.77.{number // 250}.{number % 250 + 1}"

    def namespace_of(self, pod: Object, policies: list[Object]) -> str:
        """Return the path of the namespace of a Pod's Job, or an empty string if the kernel permits none.

        `policies` are the network policies of the Pod.
        """
        owner = next((one["uid"] for one in pod["metadata"].get("ownerReferences", [])), pod["metadata"]["uid"])
        with self._lock:
            if owner not in self._holders:
                reachable = [
                    (*place, str(path)) for place, path in self.services.items() if _is_allowed(*place, policies)
                ]
                command = [sys.executable, "-c", _HOLD_NETWORK, json.dumps(reachable)]
                holder = subprocess.Popen(command, cwd=_REPOSITORY, stdout=subprocess.PIPE)
                assert holder.stdout is not None
                with holder.stdout as output:
                    if output.read() != b"ready":
                        holder.kill()
                        holder.wait()
                self._holders[owner] = holder
            holder = self._holders[owner]
        return f"/proc/{holder.pid}/ns/net" if holder.poll() is None else ""

    def close(self) -> None:
        """Remove all namespaces."""
        for holder in self._holders.values():
            holder.kill()
            holder.wait()


def _is_allowed(address: str, port: int, policies: list[Object]) -> bool:
    """Whether one of the policies allows connections to this address and port."""
    rules = [rule for policy in policies for rule in policy["spec"].get("egress") or []]
    return any(
        ip_address(address) in ip_network(peer["ipBlock"]["cidr"])
        and port in [one["port"] for one in rule.get("ports") or []]
        for rule in rules
        for peer in rule.get("to") or []
        if "ipBlock" in peer
    )
