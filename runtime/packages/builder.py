"""Install a layer's packages on this machine: `python -m runtime.packages.builder <layer folder>`.

The installation of the packages is a run of one node on a local backend of its own, with the limits and the isolation
of customers' runs. This process waits for it and needs no database. If the process dies, the next one starts the
installation again.
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
import traceback
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
"""The name of every installation's run. The names do not clash, since each installation has a backend of its own."""
REPLACED_FOLDER = "A package has replaced the folder that it was to be installed in."
"""The `reason` of an `InstallResult` if `layers.move_installed` returns None."""
LOG_LIMIT_BYTES = 1 << 20
"""Maximum bytes of an installation's output that its run keeps. After the run is deleted, only the end is kept."""
MAX_LOG_BYTES = 64 * 1024
"""How many bytes from the end of an installation's output are kept after the run is deleted. The database stores them,
and uv reports errors at the end."""
MAX_CACHE_BYTES = 2 << 30
"""A cache larger than this is removed after an installation: the cache only saves downloads, and each organization has
one."""
_LAST_START = "last-start"
"""A file in an organization's folder. Its modification time is when the organization's last installation started."""
_MAX_REASON_LENGTH = 2000
"""Maximum length of the reason for a failure, which pages show: enough for uv's explanation of a conflict."""
_START_AND_END_SECONDS = 60
"""How much longer than its deadline to wait for an installation, since its node needs seconds to start and to end."""
_SOURCE_ROOT = Path(__file__).resolve().parents[2]
"""The folder of the package `runtime`, from which the process of an installation imports it."""
_CPUS = 2
"""Cores of an installation. It mostly waits for downloads, and compiles one package at a time."""
_REASON_MARKS = ("error:", "  ×", "×")
"""uv's explanation of a failure begins with a line that starts with one of these."""


@dataclass(frozen=True)
class InstallRequest:
    """The requirements to install on an image, and the limits. `indexes` and `file_hosts` are for `load_indexes`.

    `seconds` is how long the installation may run. `network` is as in `LocalBackend`.
    """

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
    """How an installation ended.

    `reason` is why it failed, or "". `is_fault`: the platform is at fault for a failure.
    """

    reason: str = ""
    is_fault: bool = False
    size_bytes: int = 0


def install(layer: Layer, request: InstallRequest) -> InstallResult:
    """Install the layer's packages, unless they are installed. The caller must hold the organization's `try_lock`."""
    if layer.is_complete:
        return InstallResult(size_bytes=layers.size_of(layer.packages))
    backend = LocalBackend(
        root=layer.folder / "runs",
        images_root=Path(request.images_root),
        cpus=_CPUS,
        # 1 PiB: this backend must never refuse, because the caller decides how many installations run at once.
        memory_mib=1 << 30,
        network=request.network,
    )
    backend.delete(RUN_NAME)  # a process that died may have left this run
    try:
        allowed_indexes = indexes.load_indexes(request.indexes, request.file_hosts)
        # The sandbox sees the inputs like a dataset, and the cache as the workspace, which every run must have.
        sandbox_settings = {"proxy": "/datasets/inputs/proxy", "cache": "/workspace"}
        mounts = prepare_inputs(layer, request.requirements, allowed_indexes, sandbox_settings)
        with proxy.run_in_thread(layer.folder / "inputs", "proxy", allowed_indexes.hosts) as index_proxy:
            backend.submit(_local_spec(layer, request, mounts))
            status = smoke_run.await_end(backend, RUN_NAME, request.seconds + _START_AND_END_SECONDS)
        log = _read_log(backend, request, index_proxy.refused_hosts)
        (layer.folder / "log.txt").write_text(log)
        if status.outcome is Outcome.COMPLETED:
            size = layers.move_installed(layer, backend.run_folder(RUN_NAME))
            return InstallResult(REPLACED_FOLDER) if size is None else InstallResult(size_bytes=size)
        if status.outcome is Outcome.CODE_FAILED:
            return InstallResult(reason_of(log))
        return failed_result(status)
    except (RuntimeFault, OSError) as error:
        return InstallResult(str(error), is_fault=True)
    finally:
        backend.delete(RUN_NAME)
        _remove_large_cache(layer)


def failed_result(status: RunStatus) -> InstallResult:
    """Return the result of an installation that neither succeeded nor ended with an error of uv."""
    if status.outcome in {Outcome.OUT_OF_MEMORY, Outcome.DISK_FULL, Outcome.TIME_LIMIT} and status.failure:
        return InstallResult(f"The packages could not be installed: {status.failure.message}")
    return InstallResult(status.failure.message if status.failure else "The installation was lost.", is_fault=True)


def install_spec(name: str, image: Image, request: InstallRequest, mounts: Sequence[Mount]) -> RunSpec:
    """Return the spec of the run that installs the packages, with these mounts."""
    return RunSpec(
        name=name,
        framework=Framework.PYTORCH,  # a run needs one; the script uses none
        image=image,
        nodes=1,
        workers_per_node=1,
        resources=Resources(cpus=_CPUS, memory_mib=request.memory_mib, disk_mib=request.disk_mib),
        script="",
        builtin_script="install",
        deadline_seconds=request.seconds,
        grace_seconds=1,
        hang_seconds=0,  # a slow download may show no sign of progress
        log_limit_bytes=LOG_LIMIT_BYTES,
        mounts=tuple(mounts),
    )


def _local_spec(layer: Layer, request: InstallRequest, mounts: list[Mount]) -> RunSpec:
    cache = layer.folder.parent / CACHE
    cache.mkdir(mode=0o700, exist_ok=True)
    cache_mount = Mount(str(cache), "/workspace", read_only=False)
    return install_spec(RUN_NAME, Image(builtin=request.image), request, (cache_mount, *mounts))


def prepare_inputs(
    layer: Layer, requirements: Sequence[str], allowed_indexes: indexes.Indexes, settings: Mapping[str, str]
) -> list[Mount]:
    """Write the files that the script in the sandbox reads; return the mounts of the sandbox.

    `settings` are further fields of the script's `plan.json`: see `runtime.launcher.install`.
    """
    folder = layer.folder / "inputs"
    remove_tree(folder)
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements))
    mounts = [Mount(str(folder), "/datasets/inputs"), Mount(str(_copy_uv(layer.root)), "/datasets/uv")]

    def make_visible(address: str) -> str:
        """Return an index's address in the sandbox. If the index is a folder of this machine, add a mount for it."""
        source = indexes.folder_of(address)
        if source is None:
            return address
        # The files of an index usually lie beside its folder of pages, so the folder above is mounted.
        is_index = address in allowed_indexes.addresses
        target = f"/datasets/index-{len(mounts)}"
        mounts.append(Mount(str(source.parent if is_index else source), target))
        return f"file://{target}/{source.name}" if is_index else target

    default, *others = (make_visible(address) for address in allowed_indexes.addresses)
    environment = {
        "UV_DEFAULT_INDEX": default,
        "UV_INDEX": " ".join(others),
        "UV_FIND_LINKS": ",".join(make_visible(address) for address in allowed_indexes.find_links),
        # As when images are built (`runtime.images.uv`): take the best version of all indexes.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_CONCURRENT_DOWNLOADS": "8",
        "UV_CONCURRENT_BUILDS": "1",
        "UV_HTTP_TIMEOUT": "60",  # an index may take this long to prepare a large listing
        "UV_PYTHON_DOWNLOADS": "never",
    }
    if allowed_indexes.certificate and Path(allowed_indexes.certificate).is_file():
        shutil.copyfile(allowed_indexes.certificate, folder / "certificates.pem")
        environment["SSL_CERT_FILE"] = "/datasets/inputs/certificates.pem"
    plan: dict[str, Any] = {
        "uv": "/datasets/uv/uv",
        **settings,
        "environment": {name: value for name, value in environment.items() if value},
        "arguments": [
            *("--requirements", "/datasets/inputs/requirements.txt"),
            # Copies: through hard links to the cache, a later installation could change this layer's files.
            *("--link-mode", "copy"),
            *("--compile-bytecode", "--no-config", "--no-progress", "--color", "never"),
        ],
    }
    write_json(folder / "plan.json", plan)
    for path in folder.iterdir():
        path.chmod(0o644)  # pods may run as another user
    return mounts


def _copy_uv(root: Path) -> Path:
    """Copy uv to a folder below `root`, unless this version is there; return that folder, which sandboxes mount."""
    executable = Path(uv.executable())
    status = executable.stat()
    folder = root / ".uv" / f"{status.st_size}-{status.st_mtime_ns}"
    if not (folder / "uv").exists():
        folder.mkdir(parents=True, exist_ok=True)
        copy = folder / f"uv.{os.getpid()}"
        shutil.copy2(executable, copy)
        copy.rename(folder / "uv")
    return folder


def _read_log(backend: LocalBackend, request: InstallRequest, refused_hosts: set[str]) -> str:
    """Return the end of the installation's output, with `/images` in place of the path of this machine's images.

    `refused_hosts` has the hosts to which the proxy has refused connections; a line about each is added.
    """
    text = _read_end(backend.run_folder(RUN_NAME) / "logs" / "rank-0.log").replace(
        str(Path(request.images_root).resolve()), "/images"
    )
    for host in sorted(refused_hosts):
        text += f"[trainyard] Refused a connection to {host}: it is not one of the configured package indexes.\n"
    return text


def reason_of(log: str) -> str:
    """Return uv's explanation of a failure on one line."""
    lines = log.splitlines()
    # If no line has such a mark, the last five lines are the best available explanation.
    start = max(0, len(lines) - 5)
    for number, line in enumerate(lines):
        if line.startswith(_REASON_MARKS):
            start = number
            break
    words = " ".join(lines[start:]).replace("╰─▶", "").replace("│", "").replace("×", "").split()
    # uv begins the line of each deeper cause with "cause:".
    text = " ".join(words).removeprefix("error: ").replace(" cause: ", ": ")
    return text[:_MAX_REASON_LENGTH] or "The installer ended without an explanation."


def _remove_large_cache(layer: Layer) -> None:
    """Remove the organization's cache if it is larger than `MAX_CACHE_BYTES`."""
    cache = layer.folder.parent / CACHE
    if layers.size_of(cache) > MAX_CACHE_BYTES:
        trash = Trash(layer.root / ".trash")
        trash.move_in(cache)
        trash.empty()


# The process that installs


@contextlib.contextmanager
def try_lock(layer: Layer) -> Iterator[bool]:
    """Yield whether this process got the lock of the layer's organization, and release it when the `with` block ends.

    An organization has one installation at a time, since its cache serves only one. The kernel releases the lock if the
    process dies.
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
    """Start the process that installs the layer's packages. It continues if this process ends."""
    layer.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (layer.folder.parent / _LAST_START).touch()
    remove_result(layer)
    write_json(layer.folder / "request.json", dataclasses.asdict(request))
    # The process may outlive this one, so its working directory is `/`, which always exists. There `-m` would not find
    # `runtime`, which is not an installed package.
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


def last_started_at(layer: Layer) -> float:
    """Return when the last installation of the layer's organization was started (Unix seconds); 0 if none was."""
    try:
        return (layer.folder.parent / _LAST_START).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def is_working(layer: Layer) -> bool:
    """Whether a process is installing packages for the layer's organization."""
    with try_lock(layer) as has_lock:
        return not has_lock


def remove_result(layer: Layer) -> None:
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
    return _read_end(path)


def _read_end(path: Path) -> str:
    """Return the last `MAX_LOG_BYTES` of a log; "" if it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            return file.read(MAX_LOG_BYTES).decode("utf-8", "replace").replace("\0", "")
    except OSError:
        return ""


def main() -> None:
    """Install the layer whose folder is the first argument, and write `result.json`.

    An unexpected error is a fault of the platform: without a result, the installation would start again for ever.
    """
    folder = Path(sys.argv[1])
    layer = Layer(folder.parents[1], folder.parent.name, folder.name)
    with try_lock(layer) as has_lock:
        # If there is a result, another process finished this installation before this one got the lock.
        if has_lock and result_of(layer) is None:
            try:
                result = install(layer, _read_request(folder))
            except Exception as error:
                traceback.print_exc()  # to builder.log
                result = InstallResult(f"The installer failed: {type(error).__name__}: {error}", is_fault=True)
            write_json(folder / "result.json", dataclasses.asdict(result))


def _read_request(folder: Path) -> InstallRequest:
    """Return the request that `start` has written to the layer's folder."""
    data = json.loads((folder / "request.json").read_bytes())
    # JSON has lists in place of tuples.
    return InstallRequest(**data | {name: tuple(data[name]) for name in ("requirements", "indexes", "file_hosts")})


if __name__ == "__main__":
    main()
