"""Pull a customer's own image and unpack it to shared storage. Node 0 of a run does this before customer code begins.

`skopeo` pulls the image and checks its digest, and `umoci` unpacks its layers. Both read what a registry sends, which
may be hostile. So they run in a sandbox of their own, as an ordinary user without any privilege. The sandbox sees this
machine's programs and one working folder, and uses the network of the machine, as runs do. Each import has its own
working folder, so no layer of another organization's image can be named or read.

    <root>/.images/<organization>/<image>/root-<id>/   the image's root folder, read-only for runs
                                          image.json   its contents (ImageContents); written last
                                          lock         locked during the import
                                          used         modified when a run was last submitted with the image
    <root>/.images/.work/<import>/                     the working folder of an import

Standard library only, and the modules that `runtime.backends.slurm.program` copies to compute nodes.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from runtime import environment
from runtime.backends import container, sandbox
from runtime.files import refresh_listing, write_json
from runtime.launcher import disk
from runtime.specs import FailureCode, Outcome
from runtime.trash import remove_tree

IMAGES_FOLDER = ".images"
"""The folder of all unpacked images, below the root folder of the runs."""
WORK_FOLDER = ".work"
"""The folder of the working folders of imports, below IMAGES_FOLDER."""
USED_FILE = "used"
"""The file in an image's folder whose modification time is the last use of the image."""
TOOLS = ("skopeo", "umoci")
"""The programs with which a compute node imports images."""
_WORK_TARGET = "/work"
"""The folder `files` in an import's working folder, as the programs in the sandbox see it."""
_LAYOUT = "layout"
"""The folder in `_WORK_TARGET` that holds the pulled image, in the OCI image layout."""
_TAG = "image"
"""The tag that skopeo gives the pulled image in `_LAYOUT`."""
_CREDENTIALS_TARGET = "/auth.json"
"""The file with the registry's credentials as skopeo sees it. It lies in the sandbox's memory and on no disk."""
_POLL_SECONDS = 0.25
"""Interval of checks whether the program has ended, a stop is requested, or the disk is full."""
_MEASURE_PAUSE_SECONDS = 2.0
"""Minimum pause between two measurements of the working folder."""
_MEASURE_PAUSE_FACTOR = 4
"""Minimum pause in multiples of a measurement's duration: measuring then takes at most a fifth of the time."""
_MEASURE_SECONDS = 60.0
"""How long one measurement may take. An import whose folder takes longer to measure has too many files."""
_TMP_BYTES = 256 << 20
"""Size of the sandbox's /tmp, which takes up memory. Both programs use the working folder instead."""
_CHECK_SECONDS = 30
"""How long a program may take to print its version."""
_TAIL_BYTES = 4000
"""How much of a program's output is kept, from its end. Errors come last."""
_MAX_JSON_BYTES = 8 << 20
"""Maximum size of a JSON file of an image. Manifests and configurations have a few KiB."""
_MAX_ENVIRONMENT_BYTES = 64 * 1024
"""Maximum size of all variables that an image sets, since they are part of a node's launch plan. Variables above the
limit are left out."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# Texts in skopeo's errors. A name error means that the image does not exist. A credentials error means that the
# credentials are wrong, or, at some registries, that the image does not exist.
_NAME_ERROR = re.compile(r"manifest unknown|name unknown|repository name not known|not found", re.IGNORECASE)
_CREDENTIALS_ERROR = re.compile(
    r"unauthorized|authentication required|access .*denied|denied:|invalid username/password|\b40[13]\b", re.IGNORECASE
)
_SYSTEM_FILES = ("/etc/hosts", "/etc/nsswitch.conf", "/etc/containers")
"""Files of this machine that only the sandbox of an import shows: two to resolve host names, and the administrator's
own rules for registries, such as mirrors."""


class ImagePlan(TypedDict):
    """The part of a run's plan about its own image. All nodes read it; node 0 imports the image.

    `folder` is the image's folder, and `digest` is empty if only the tag is known. `host`, `username` and `password`
    are the credentials of its registry (empty: none), `limit_mib` and `seconds` the limits of the import, and `bin` the
    folder of the programs ("": on the PATH).
    """

    folder: str
    reference: str
    digest: str
    host: str
    username: str
    password: str
    limit_mib: int
    seconds: int
    bin: str
    is_insecure: bool
    """Whether the registry may be reached without a valid certificate, or over HTTP."""


class ImageContents(TypedDict):
    """What an unpacked image contains: the path of its Python, and the variables that it sets.

    `root` is the name of its root folder, which differs for each import. An image may be imported twice, even at the
    same time: on some shared storage a lock does not hold between machines, or a machine does not see at once that
    another has imported the image. So an import removes no older root folder, since runs may use that one.
    """

    root: str
    python: str
    environment: dict[str, str]


class ImportStopped(Exception):
    """The run was stopped during the import."""


class ImportFailed(Exception):
    """The image could not be imported. `outcome`, `code` and `data` become a cause of the run's end."""

    def __init__(self, outcome: Outcome, code: FailureCode, message: str, **data: Any) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.code = code
        self.data = data


def load_contents(folder: Path) -> ImageContents | None:
    """Return what an image's folder contains; None if it was not imported."""
    try:
        contents: ImageContents = json.loads((folder / "image.json").read_bytes())
    except (OSError, ValueError):
        return None
    return contents


def import_image(plan: ImagePlan, *, bubblewrap: str, is_stopped: Callable[[], bool]) -> ImageContents:
    """Import the image unless another run has done so; return its contents.

    Raises ImportFailed, ImportStopped, and OSError if the image's folder or its lock cannot be used. `bubblewrap` is
    the path of bwrap. `is_stopped` returns whether the import must stop; it is called several times a second.
    """
    folder = Path(plan["folder"])
    give_up_at = time.monotonic() + plan["seconds"]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _lock(folder / "lock", plan, give_up_at, is_stopped):
        refresh_listing(folder)  # another machine may have imported the image
        contents = load_contents(folder)
        if contents is not None:
            return contents
        work = folder.parent.parent / WORK_FOLDER / uuid.uuid4().hex
        (work / "files").mkdir(parents=True, mode=0o700)
        try:
            importer = _Importer(plan, work, bubblewrap, give_up_at, is_stopped)
            contents = importer.run()
            importer.root.rename(folder / contents["root"])
            write_json(folder / "image.json", contents)
            return contents
        except OSError as error:
            message = f"The image could not be written to shared storage: {error.strerror}."
            raise ImportFailed(Outcome.PLATFORM_ERROR, FailureCode.PLATFORM_ERROR, message) from error
        finally:
            remove_tree(work)


def transport_reference(reference: str, digest: str) -> str:
    """Return the image as skopeo names it: by its digest if that is known, else by its tag."""
    pinned = digest or reference.partition("@")[2]
    if not pinned:
        return f"docker://{reference}"
    host, _, path = reference.partition("@")[0].partition("/")  # the host may have a port
    return f"docker://{host}/{path.partition(':')[0]}@{pinned}"


def classify_pull_error(text: str) -> FailureCode:
    """Return IMAGE_NAME, IMAGE_CREDENTIALS or IMAGE_NETWORK, by the output of a failed pull."""
    if _NAME_ERROR.search(text):
        return FailureCode.IMAGE_NAME
    return FailureCode.IMAGE_CREDENTIALS if _CREDENTIALS_ERROR.search(text) else FailureCode.IMAGE_NETWORK


def sandbox_arguments(files: Path, programs: Mapping[str, str], credentials_fd: int = -1) -> list[str]:
    """Return bubblewrap's arguments for programs that see the folder `files` and no other data of this machine.

    `programs` are the paths of the programs by their names. `credentials_fd` is the descriptor of a file that becomes
    _CREDENTIALS_TARGET; -1: none.
    """
    args = sandbox.base_arguments("import", _TMP_BYTES)
    for path in _SYSTEM_FILES:
        args += ["--ro-bind-try", path, path]
    for path in programs.values():
        if not Path(path).is_relative_to("/usr"):
            args += ["--ro-bind", path, path]
    args += ["--bind", str(files), _WORK_TARGET]
    if credentials_fd >= 0:
        args += ["--file", str(credentials_fd), _CREDENTIALS_TARGET]
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": _WORK_TARGET, "TMPDIR": _WORK_TARGET}
    # These come last, since they make everything read-only that is not mounted as writable.
    return args + sandbox.closing_arguments({**variables, "LC_ALL": "C.UTF-8"})


def check_tools(folder: str, bubblewrap: str) -> str:
    """Return why this machine cannot import images; "" if it can. Runs each program in the sandbox of an import."""
    programs = find_tools(folder)
    for name in TOOLS:
        if name not in programs:
            return f"{name} is not installed."
    with tempfile.TemporaryDirectory(prefix="trainyard-check-") as files:
        for path in programs.values():
            command = [bubblewrap, *sandbox_arguments(Path(files), programs), path, "--version"]
            try:
                result = subprocess.run(
                    command, env={}, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                return f"{path} does not answer in {_CHECK_SECONDS} s."
            except OSError as error:  # such as no bubblewrap at this path
                return f"{bubblewrap} cannot be started: {error.strerror}"
            if result.returncode:
                return f"{path} does not run in a sandbox: {_last_line(result.stderr)}"
    return ""


def find_tools(folder: str) -> dict[str, str]:
    """Return the paths of TOOLS on this machine, in `folder` or on the PATH; missing ones are left out."""
    paths = {name: shutil.which(name, path=folder or None) for name in TOOLS}
    return {name: str(Path(path).resolve()) for name, path in paths.items() if path is not None}


class _Importer:
    """One import, in the working folder `work`. `root` is the image's root folder after `run`."""

    def __init__(
        self, plan: ImagePlan, work: Path, bubblewrap: str, give_up_at: float, is_stopped: Callable[[], bool]
    ) -> None:
        self._plan = plan
        self._work = work
        self._files = work / "files"  # what the sandbox sees; the log lies beside it
        self._bubblewrap = bubblewrap
        self._give_up_at = give_up_at
        self._is_stopped = is_stopped
        self._next_measurement_at = 0.0
        self.root = self._files / "root"
        self._programs = find_tools(plan["bin"])
        missing = [name for name in TOOLS if name not in self._programs]
        if missing:
            message = f"This machine cannot import images: it has no {' and no '.join(missing)}."
            raise ImportFailed(Outcome.PLATFORM_ERROR, FailureCode.NODE_NOT_STARTED, message)

    def run(self) -> ImageContents:
        """Pull and unpack the image; return its contents. Raises ImportFailed, ImportStopped, OSError."""
        self._pull()
        variables = _image_environment(self._files / _LAYOUT)
        self._unpack()
        self._check_size()
        try:
            python = self._check_contents(variables.get("PATH", "") or container.DEFAULT_PATH)
        except OSError as error:  # such as a folder without read permission, or a PATH with a name that is too long
            raise self._not_unpacked(f"its files cannot be read: {error.strerror}") from error
        if not python:
            raise self._failed(FailureCode.IMAGE_UNUSABLE, f"The image {self._reference} has no Python on its PATH.")
        return {"root": f"root-{uuid.uuid4().hex}", "python": python, "environment": variables}

    def _check_contents(self, search_path: str) -> str:
        """Check that a sandbox can show the image; return the path of its Python, "" if it has none.

        Raises ImportFailed, and OSError if the image cannot be read.
        """
        # A run's sandbox has its own /, /etc and /opt, which get the image's entries one by one, as arguments of
        # bubblewrap (`container`).
        if container.count_entries(self.root) > container.MAX_ENTRIES:
            raise self._not_unpacked(f"it has more than {container.MAX_ENTRIES} entries in /, /etc and /opt")
        if container.count_argument_bytes(self.root) > container.MAX_ARGUMENT_BYTES:
            raise self._not_unpacked("the links in /, /etc and /opt have too long targets")
        return container.find_program(self.root, ("python3", "python"), search_path)

    @property
    def _reference(self) -> str:
        return self._plan["reference"]

    def _pull(self) -> None:
        plan = self._plan
        command = [self._programs["skopeo"]]
        if not Path("/etc/containers/policy.json").exists():
            # The file says which images need a signature. If it is missing, skopeo pulls only with this option.
            command.append("--insecure-policy")
        command += ["copy", "--quiet", f"--src-tls-verify={'false' if plan['is_insecure'] else 'true'}"]
        if plan["username"]:
            command.append(f"--src-authfile={_CREDENTIALS_TARGET}")
        else:
            command.append("--src-no-creds")
        source = transport_reference(self._reference, plan["digest"])
        output = self._run_program([*command, source, f"oci:{_WORK_TARGET}/{_LAYOUT}:{_TAG}"], self._credentials())
        if output is not None:
            code = classify_pull_error(output)
            raise self._failed(code, f"The image {self._reference} could not be pulled: {_last_line(output)}")

    def _credentials(self) -> bytes:
        """Return the contents of the credentials' file; empty if there are none.

        They need a file, since the arguments of a process are public on its machine.
        """
        plan = self._plan
        if not plan["username"]:
            return b""
        token = base64.b64encode(f"{plan['username']}:{plan['password']}".encode()).decode()
        return json.dumps({"auths": {plan["host"]: {"auth": token}}}).encode()

    def _unpack(self) -> None:
        image = f"{_WORK_TARGET}/{_LAYOUT}:{_TAG}"
        output = self._run_program(
            [self._programs["umoci"], "raw", "unpack", "--rootless", "--image", image, f"{_WORK_TARGET}/root"]
        )
        if output is not None or self.root.is_symlink() or not self.root.is_dir():
            raise self._not_unpacked("it is empty" if output is None else _last_line(output))

    def _run_program(self, command: list[str], credentials: bytes = b"") -> str | None:
        """Run a program in the sandbox; return the end of its output if it failed, else None.

        The program reads `credentials` at _CREDENTIALS_TARGET. Raises ImportFailed if the import exceeds a limit, and
        ImportStopped.
        """
        log_path = self._work / "log"
        with log_path.open("wb") as log, _memory_file(credentials) as credentials_fd:
            process = subprocess.Popen(
                [self._bubblewrap, *sandbox_arguments(self._files, self._programs, credentials_fd), *command],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[credentials_fd],
            )
        try:
            while process.poll() is None:
                self._check_limits()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
        finally:
            process.kill()  # bubblewrap's end ends the sandbox
            process.wait()
        if process.returncode == 0:
            return None
        # SIGTERM ended bubblewrap or the program in it. Slurm sends SIGTERM to all processes of a job, perhaps to this
        # process a moment later.
        if process.returncode in {-signal.SIGTERM, 128 + signal.SIGTERM}:
            raise ImportStopped
        with log_path.open("rb") as log:
            log.seek(max(0, log_path.stat().st_size - _TAIL_BYTES))
            return self._without_password(log.read().decode("utf-8", "replace"))

    def _without_password(self, text: str) -> str:
        password = self._plan["password"]
        return text.replace(password, "***") if password else text

    def _check_limits(self) -> None:
        """Raise ImportStopped if a stop was requested, ImportFailed if the import takes too long or too much disk."""
        if self._is_stopped():
            raise ImportStopped
        now = time.monotonic()
        if now > self._give_up_at:
            raise _too_slow(self._plan)
        free_bytes = disk.free_bytes(self._work)
        if free_bytes is not None and free_bytes < disk.RESERVE_BYTES:
            message = f"Shared storage is full: {free_bytes >> 20} MiB are free."
            data = {"free_mib": free_bytes >> 20}
            raise ImportFailed(Outcome.PLATFORM_ERROR, FailureCode.DISK_FULL, message, **data)
        if now >= self._next_measurement_at:
            self._check_size()
            seconds = time.monotonic() - now
            pause_seconds = max(_MEASURE_PAUSE_SECONDS, _MEASURE_PAUSE_FACTOR * seconds)
            self._next_measurement_at = time.monotonic() + pause_seconds

    def _check_size(self) -> None:
        """Check the size of the working folder. Raises ImportFailed if it is too large, or cannot be measured in time.

        A file or folder counts as at least one inode's share of the disk, so many small files can exceed the limit too.
        """
        usage = disk.measure([self._work], _MEASURE_SECONDS)
        limit_mib = self._plan["limit_mib"]
        # Only a hostile image has folders that cannot be measured, or too many files for _MEASURE_SECONDS.
        if usage is None or usage.is_incomplete or usage.bytes > limit_mib << 20:
            message = f"The image {self._reference} takes more than {limit_mib} MiB of disk, or has too many files."
            raise self._failed(FailureCode.IMAGE_TOO_LARGE, message, limit_mib=limit_mib)

    def _not_unpacked(self, reason: str) -> ImportFailed:
        message = f"The image {self._reference} could not be unpacked: {reason}"
        return self._failed(FailureCode.IMAGE_NOT_UNPACKED, message, detail=reason)

    def _failed(self, code: FailureCode, message: str, **data: Any) -> ImportFailed:
        """Return the error for a fault of the image or of its registry, for which the customer is responsible."""
        return ImportFailed(Outcome.CODE_FAILED, code, message, image=self._reference, **data)


@contextlib.contextmanager
def _memory_file(contents: bytes) -> Iterator[int]:
    """Yield the descriptor of a file in memory, and close it after the block."""
    descriptor = os.memfd_create("credentials")
    try:
        os.write(descriptor, contents)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _lock(path: Path, plan: ImagePlan, give_up_at: float, is_stopped: Callable[[], bool]) -> Iterator[None]:
    """Hold the lock of an image during the block. While another run imports the image, wait until `give_up_at`.

    Raises ImportFailed after that time, and ImportStopped if a stop is requested.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if is_stopped():
                raise ImportStopped
            if time.monotonic() > give_up_at:
                raise _too_slow(plan)
            time.sleep(_POLL_SECONDS)  # a wait for the lock itself would not end at a request to stop
        yield
    finally:
        os.close(descriptor)


def _too_slow(plan: ImagePlan) -> ImportFailed:
    seconds = plan["seconds"]
    message = f"The import of the image {plan['reference']} took longer than {seconds} s."
    data = {"image": plan["reference"], "limit_seconds": seconds}
    return ImportFailed(Outcome.CODE_FAILED, FailureCode.IMAGE_TOO_SLOW, message, **data)


def _image_environment(layout: Path) -> dict[str, str]:
    """Return the variables that an image in the OCI layout sets, except those that an order may not set.

    Empty if the files are not as skopeo writes them, for example nested so deeply that Python cannot read them.
    """
    try:
        manifest = _load_blob(layout, _load_json(layout / "index.json")["manifests"][0]["digest"])
        lines = _load_blob(layout, manifest["config"]["digest"])["config"]["Env"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    variables: dict[str, str] = {}
    size = 0
    for line in lines if isinstance(lines, list) else []:
        name, separator, value = str(line).partition("=")
        size += len(name) + len(value.encode("utf-8", "replace"))
        is_valid = separator and environment.is_name(name) and not environment.is_reserved(name)
        if is_valid and "\0" not in value and size <= _MAX_ENVIRONMENT_BYTES:
            variables[name] = value
    return variables


def _load_blob(layout: Path, digest: str) -> Any:
    if not _DIGEST.fullmatch(digest):
        raise ValueError(digest)
    return _load_json(layout / "blobs" / "sha256" / digest.removeprefix("sha256:"))


def _load_json(path: Path) -> Any:
    """Return a JSON file's contents, which the registry decides. Raises OSError, ValueError, RecursionError."""
    if path.is_symlink() or path.stat().st_size > _MAX_JSON_BYTES:
        raise ValueError(path.name)
    return json.loads(path.read_bytes())


def _last_line(output: str) -> str:
    """Return the last line of a program's output, which names the error. 300 characters of it are enough for people."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "no output"
