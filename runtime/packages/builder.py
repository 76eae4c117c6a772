"""Install a layer's packages: `python -m runtime.packages.builder <layer folder>`.

The installation is a run of one node on a local backend of its own, with the limits and the isolation of customers'
runs. The process that supervises it needs no database. If it dies, another one starts over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.backends import smoke_run
from runtime.backends.local.backend import LocalBackend
from runtime.errors import RuntimeFault
from runtime.files import write_json
from runtime.images import uv
from runtime.packages import indexes, layers, proxy
from runtime.packages.layers import CACHE, Layer
from runtime.specs import Framework, Image, Mount, Outcome, Resources, RunSpec, RunStatus
from runtime.trash import Trash, remove_tree

RUN_NAME = "packages"
REPLACED_FOLDER = "A package has replaced the folder that it was to be installed in."
LOG_LIMIT_BYTES = 1 << 20
"""Bytes of an installation's output that its run keeps."""
MAX_LOG_BYTES = 64 * 1024
"""Bytes kept of an installation's output, from its end."""
MAX_CACHE_BYTES = 2 << 30
"""A larger cache is removed after an installation: it only saves downloads."""
_MAX_REASON = 2000
"""Characters of the reason for a failure."""
_GRACE_SECONDS = 60
"""How much longer than its deadline an installation is awaited: its nodes need time to start and end."""
_SOURCE_ROOT = Path(__file__).resolve().parents[2]
_CPUS = 2
_REASON_MARKS = ("error:", "  ×", "×")
"""Beginnings of the line with which uv starts to explain a failure."""


@dataclass(frozen=True)
class InstallRequest:
    """What to install, and with which limits. `indexes` and `file_hosts` are the settings of `indexes.configured`."""

    image: str
    images_root: str
    requirements: tuple[str, ...]
    indexes: tuple[str, ...] = ()
    file_hosts: tuple[str, ...] = ()
    network: str = "private"
    memory_mib: int = 4096
    disk_mib: int = 10240
    seconds: int = 1800


@dataclass(frozen=True)
class InstallResult:
    """How an installation ended. `reason` is empty on success; `is_fault`: not the requirements' but the platform's."""

    reason: str = ""
    is_fault: bool = False
    size_bytes: int = 0


def install(layer: Layer, request: InstallRequest) -> InstallResult:
    """Install the layer's packages, unless they are there. An organization has one installation at a time: `locked`."""
    if layer.is_complete:
        return InstallResult(size_bytes=layers.size_of(layer.packages))
    backend = LocalBackend(
        root=layer.folder / "runs",
        images_root=Path(request.images_root),
        # The caller decides how many installations run at once, so no machine is too small for the limits of one.
        cpus=_CPUS,
        memory_mib=1 << 30,
        network=request.network,
    )
    backend.delete(RUN_NAME)  # left by a process that died
    try:
        found = indexes.configured(request.indexes, request.file_hosts)
        sandbox_settings = {"proxy": "/datasets/inputs/proxy", "cache": "/workspace"}
        mounts = prepare_inputs(layer, request.requirements, found, sandbox_settings)
        with proxy.running(layer.folder / "inputs", "proxy", found.hosts) as index_proxy:
            backend.submit(_spec(layer, request, mounts))
            status = smoke_run.await_end(backend, RUN_NAME, request.seconds + _GRACE_SECONDS)
        log = _read_log(layer, backend, request, index_proxy.refused)
        (layer.folder / "log.txt").write_text(log)
        if status.outcome is Outcome.COMPLETED:
            size = layers.adopt(layer, backend.run_folder(RUN_NAME))
            return InstallResult(REPLACED_FOLDER) if size is None else InstallResult(size_bytes=size)
        if status.outcome is Outcome.CODE_FAILED:
            return InstallResult(reason_of(log))
        return failed(status)
    except (RuntimeFault, OSError) as error:
        return InstallResult(str(error), is_fault=True)
    finally:
        backend.delete(RUN_NAME)
        _trim_cache(layer)


def failed(status: RunStatus) -> InstallResult:
    """Return the result of an installation that neither succeeded nor ended with an error of uv."""
    if status.outcome in {Outcome.OUT_OF_MEMORY, Outcome.DISK_FULL, Outcome.TIME_LIMIT} and status.failure:
        return InstallResult(f"The packages could not be installed: {status.failure.message}")
    return InstallResult(status.failure.message if status.failure else "The installation was lost.", is_fault=True)


def install_spec(name: str, image: Image, request: InstallRequest, mounts: Sequence[Mount]) -> RunSpec:
    """Return the run that installs, with these mounts."""
    return RunSpec(
        name=name,
        framework=Framework.PYTORCH,
        image=image,
        nodes=1,
        workers_per_node=1,
        resources=Resources(cpus=_CPUS, memory_mib=request.memory_mib, disk_mib=request.disk_mib),
        script="",
        builtin_script="install",
        deadline_seconds=request.seconds,
        grace_seconds=1,
        hang_seconds=0,
        log_limit_bytes=LOG_LIMIT_BYTES,
        mounts=tuple(mounts),
    )


def _spec(layer: Layer, request: InstallRequest, mounts: list[Mount]) -> RunSpec:
    cache = layer.folder.parent / CACHE
    cache.mkdir(mode=0o700, exist_ok=True)
    cache_mount = Mount(str(cache), "/workspace", read_only=False)
    return install_spec(RUN_NAME, Image(builtin=request.image), request, (cache_mount, *mounts))


def prepare_inputs(
    layer: Layer, requirements: Sequence[str], found: indexes.Indexes, settings: Mapping[str, str]
) -> list[Mount]:
    """Write the files that the script in the sandbox reads; return what the sandbox mounts.

    `settings` are further fields of its `plan.json`: see `runtime.launcher.install`.
    """
    folder = layer.folder / "inputs"
    remove_tree(folder)
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements))
    mounts = [Mount(str(folder), "/datasets/inputs"), Mount(str(_uv_folder(layer.root)), "/datasets/uv")]

    def visible(address: str) -> str:
        """Return an index's address as the sandbox sees it; mount its folder if it is on this machine."""
        source = indexes.folder_of(address)
        if source is None:
            return address
        # The files of an index usually lie beside its folder of pages, so the folder above is mounted.
        is_index = address in found.addresses
        target = f"/datasets/index-{len(mounts)}"
        mounts.append(Mount(str(source.parent if is_index else source), target))
        return f"file://{target}/{source.name}" if is_index else target

    default, *others = (visible(address) for address in found.addresses)
    environment = {
        "UV_DEFAULT_INDEX": default,
        "UV_INDEX": " ".join(others),
        "UV_FIND_LINKS": ",".join(visible(address) for address in found.find_links),
        # As in images: the best version of all indexes.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_CONCURRENT_DOWNLOADS": "8",
        "UV_CONCURRENT_BUILDS": "1",
        "UV_HTTP_TIMEOUT": "60",
        "UV_PYTHON_DOWNLOADS": "never",
    }
    if found.certificate and Path(found.certificate).is_file():
        shutil.copyfile(found.certificate, folder / "certificates.pem")
        environment["SSL_CERT_FILE"] = "/datasets/inputs/certificates.pem"
    plan: dict[str, Any] = {
        "uv": "/datasets/uv/uv",
        **settings,
        "environment": {name: value for name, value in environment.items() if value},
        "arguments": [
            *("--requirements", "/datasets/inputs/requirements.txt"),
            # A link would let a later installation change this layer's files through the cache.
            *("--link-mode", "copy"),
            *("--compile-bytecode", "--no-config", "--no-progress", "--color", "never"),
        ],
    }
    write_json(folder / "plan.json", plan)
    for path in folder.iterdir():
        path.chmod(0o644)  # for Pods, which run as another user
    return mounts


def _uv_folder(root: Path) -> Path:
    """Return a folder that holds nothing but uv."""
    executable = Path(uv.executable())
    status = executable.stat()
    folder = root / ".uv" / f"{status.st_size}-{status.st_mtime_ns}"
    if not (folder / "uv").exists():
        folder.mkdir(parents=True, exist_ok=True)
        copy = folder / f"uv.{os.getpid()}"
        shutil.copy2(executable, copy)
        copy.rename(folder / "uv")
    return folder


def _read_log(layer: Layer, backend: LocalBackend, request: InstallRequest, refused: set[str]) -> str:
    """Return the end of the installation's output, without paths of this machine."""
    try:
        with (backend.run_folder(RUN_NAME) / "logs" / "rank-0.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            text = file.read(MAX_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        text = ""
    text = text.replace("\0", "").replace(str(Path(request.images_root).resolve()), "/images")
    for host in sorted(refused):
        text += f"[trainyard] Refused a connection to {host}: it is not one of the configured package indexes.\n"
    return text


def reason_of(log: str) -> str:
    """Return uv's explanation of a failure on one line."""
    lines = log.splitlines()
    first = next(
        (number for number, line in enumerate(lines) if line.startswith(_REASON_MARKS)), max(0, len(lines) - 5)
    )
    words = " ".join(lines[first:]).replace("╰─▶", "").replace("│", "").replace("×", "").split()
    text = " ".join(words).removeprefix("error: ").replace(" cause: ", ": ")
    return text[:_MAX_REASON] or "The installer ended without an explanation."


def _trim_cache(layer: Layer) -> None:
    cache = layer.folder.parent / CACHE
    if layers.size_of(cache) > MAX_CACHE_BYTES:
        trash = Trash(layer.root / ".trash")
        trash.move_in(cache)
        trash.empty()


# The process


@contextlib.contextmanager
def locked(layer: Layer) -> Iterator[bool]:
    """Yield whether this process got the lock of the layer's organization.

    The kernel releases it if the process dies.
    """
    layer.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(layer.folder.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def start(layer: Layer, request: InstallRequest) -> subprocess.Popen[bytes]:
    """Start the process that installs the layer's packages. It outlives this one."""
    layer.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    forget_result(layer)
    write_json(layer.folder / "request.json", dataclasses.asdict(request))
    code = f"import sys; sys.path.insert(0, {str(_SOURCE_ROOT)!r}); from runtime.packages.builder import main; main()"
    with (layer.folder / "builder.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code, str(layer.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )


def is_working(layer: Layer) -> bool:
    """Whether a process installs packages for the layer's organization."""
    with locked(layer) as is_ours:
        return not is_ours


def forget_result(layer: Layer) -> None:
    """Remove the result of an installation, so that another one can start."""
    (layer.folder / "result.json").unlink(missing_ok=True)


def result_of(layer: Layer) -> InstallResult | None:
    """Return how the installation ended; None if it has not."""
    try:
        return InstallResult(**json.loads((layer.folder / "result.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def log_of(layer: Layer) -> str:
    """Return the end of the installation's output so far."""
    path = layer.folder / "log.txt"
    if not path.exists():
        path = layer.folder / "runs" / RUN_NAME / "logs" / "rank-0.log"
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            return file.read(MAX_LOG_BYTES).decode("utf-8", "replace").replace("\0", "")
    except OSError:
        return ""


def main() -> None:
    """Install the layer whose folder is the first argument, and write `result.json`."""
    folder = Path(sys.argv[1])
    layer = Layer(folder.parents[1], folder.parent.name, folder.name)
    with locked(layer) as is_ours:
        if is_ours and result_of(layer) is None:
            data = json.loads((folder / "request.json").read_bytes())
            names = ("requirements", "indexes", "file_hosts")
            request = InstallRequest(**data | {name: tuple(data[name]) for name in names})
            write_json(folder / "result.json", dataclasses.asdict(install(layer, request)))


if __name__ == "__main__":
    main()
