"""One container of the fake cluster: a real process in bubblewrap, first of its pid namespace, with its real user id.

The one rule: what a container sees is its image, its pod's volumes and nothing else of this machine; the files in them
have the owners that a kubelet would give them, so that a folder of root's refuses a container that is not root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from runtime.backends.sandbox import find_bubblewrap
from tests.kubernetes import quotas
from tests.kubernetes.images import Image

_SYSTEM = ("/usr", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/sys/devices/system/cpu")
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_LINE_BYTES = 16384
IS_ROOT = os.geteuid() == 0


@dataclass(frozen=True)
class Bind:
    """A file or folder seen at `target`; `tmpfs_bytes` makes it memory instead."""

    target: str
    source: Path | None = None
    read_only: bool = False
    tmpfs_bytes: int = 0


@dataclass(frozen=True)
class Order:
    """What to run."""

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
    cpus: float = 0.0
    """Cores that it is held to; 0: to none."""
    network: str = ""
    """The /proc/<pid>/ns/net that it joins; empty: this machine's."""


def arguments(order: Order) -> list[str]:
    """Bubblewrap's arguments, up to and without the command."""
    built = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--new-session", "--as-pid-1",
             "--cap-drop", "ALL", "--clearenv", "--hostname", order.hostname]  # fmt: skip
    if IS_ROOT:
        of_root = () if order.uid else ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL")
        for capability in ("CAP_SETUID", "CAP_SETGID", *of_root):
            built += ["--cap-add", capability]
    else:
        built += ["--unshare-user", "--uid", str(order.uid), "--gid", str(order.gid)]
    # Said first: bubblewrap gives a folder that it makes on the way the mode of what it mounts below it.
    targets = [*_SYSTEM, *(str(folder) for folder in order.image.folders), *(bind.target for bind in order.binds)]
    parents = {str(parent) for target in targets for parent in Path(target).parents if len(parent.parts) > 1}
    for parent in sorted(parents - {"/dev", "/usr", "/proc"}):
        built += ["--perms", "0755", "--dir", parent]
    built += _system()
    built += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--dir", "/tmp"]
    for bind in sorted(order.binds, key=lambda bind: bind.target.count("/")):
        if bind.source is None:
            built += ["--perms", "1777", "--size", str(bind.tmpfs_bytes or 1 << 30), "--tmpfs", bind.target]
        else:
            built += ["--ro-bind" if bind.read_only else "--bind", str(bind.source), bind.target]
    # After the pod's own /tmp: the image of a checkout that lies there is to be seen all the same.
    for folder in order.image.folders:
        if not folder.is_relative_to("/usr"):
            for parent in sorted(str(parent) for parent in folder.parents if len(parent.parts) > 1):
                built += ["--perms", "0755", "--dir", parent]
            built += ["--ro-bind", str(folder), str(folder)]
    if order.read_only_root:
        built += ["--remount-ro", "/"]
    for name, value in order.environment.items():
        built += ["--setenv", name, value]
    return [*built, "--chdir", order.working_dir]


def _system() -> list[str]:
    built: list[str] = []
    for path in _SYSTEM:
        built += ["--ro-bind-try", path, path]
    for name in _MERGED:
        path = Path("/") / name
        built += (
            ["--symlink", str(path.readlink()), str(path)]
            if path.is_symlink()
            else ["--ro-bind-try", f"/{name}", f"/{name}"]
        )
    return built


def executable(order: Order) -> str | None:
    """Where the command is in the image; None where it is not."""
    name = order.command[0]
    inside = [str(folder) for folder in order.image.folders] + ["/usr", "/bin"]
    path = os.pathsep.join(part for part in order.environment["PATH"].split(":") if part.startswith(tuple(inside)))
    return name if name.startswith("/") else shutil.which(name, path=path)


@dataclass
class Container:
    """A container that was started. `exit_code` is None while it runs."""

    order: Order
    lines: list[tuple[float, bytes]] = field(default_factory=list)
    exit_code: int | None = None
    out_of_memory: bool = False
    started_at: float = 0.0
    finished_at: float = 0.0
    ended: threading.Event = field(default_factory=threading.Event)
    rotate_bytes: int = 10 << 20
    """The log is begun anew when it is so long, as a kubelet does at 10 MiB."""
    on_end: threading.Condition | None = None

    def start(self) -> None:
        """Run it."""
        read_end, write_end = os.pipe()
        drop = ["setpriv", f"--reuid={self.order.uid}", f"--regid={self.order.gid}"]
        drop += [f"--groups={','.join(map(str, self.order.groups))}"] if self.order.groups else ["--clear-groups"]
        enter = ["nsenter", f"--net={self.order.network}", "--"] if self.order.network else []
        self._group = quotas.hold(self.order.cpus) if self.order.cpus else None
        join = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', f"{self._group}/cgroup.procs"] if self._group else []
        self._process = subprocess.Popen(
            [*join, *enter, find_bubblewrap(), "--info-fd", str(write_end), *arguments(self.order), "--",
             *(drop if IS_ROOT else []), *self.order.command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[write_end],
        )  # fmt: skip
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            told = pipe.read()
        self.pid = json.loads(told)["child-pid"] if told else 0
        self.started_at = time.time()
        for work in (self._read, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def signal(self, number: int) -> None:
        """Send a signal to its first process."""
        if self.exit_code is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """All of it, at once."""
        self.signal(signal.SIGKILL)
        if not self.pid:
            self._process.kill()

    def text(self) -> bytes:
        """What of the log the kubelet still has."""
        return b"".join(line for _at, line in list(self.lines))

    def processes(self) -> list[psutil.Process]:
        """Every process in it."""
        try:
            first = psutil.Process(self.pid)
            return [first, *first.children(recursive=True)]
        except (psutil.Error, ValueError):
            return []

    def _read(self) -> None:
        assert self._process.stdout is not None
        size = 0
        for line in iter(lambda: self._process.stdout.readline(_LINE_BYTES), b""):  # type: ignore[union-attr]
            size += len(line)
            if size > self.rotate_bytes:
                self.lines.clear()
                size = len(line)
            self.lines.append((time.time(), line))
        # Only now: whoever sees the end finds the whole log.
        code = self._process.wait()
        self._process.stdout.close()
        if self._group is not None:
            quotas.remove(self._group)
        self.finished_at = time.time()
        self.exit_code = 137 if self.out_of_memory else code if code >= 0 else 128 - code
        self.ended.set()
        if self.on_end is not None:
            with self.on_end:
                self.on_end.notify_all()

    def _watch(self) -> None:
        """End the whole container when it takes more memory than it may, as the kernel does for one group."""
        while self.order.memory_bytes and not self.ended.wait(0.1):
            if _resident(self.processes()) > self.order.memory_bytes:
                self.out_of_memory = True
                self.kill()
                return


def _resident(processes: Iterable[psutil.Process]) -> int:
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            memory = process.memory_info()
            total += memory.rss - memory.shared
    return total
