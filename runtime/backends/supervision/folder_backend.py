"""The base class of backends whose runs each have a folder of files on storage that the console can read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from runtime.backends import admission, launch_plan, log_chunks
from runtime.backends.admission import extension_error
from runtime.errors import RunNotFound, RunUnreadable
from runtime.images import venvs
from runtime.launcher.frameworks import rank_environment
from runtime.launcher.topology import Plan
from runtime.specs import Controller, Image, LogChunk, RunPhase, RunSpec, RunStatus
from runtime.trash import Trash, remove_tree

TRASH_FOLDER = ".trash"
"""The folder below `root` that holds the folders that are being removed."""
_FOLDERS = (".active", ".changes", ".checkpoints", ".outputs")
"""The other folders below `root` that are not one run's; `runtime.backends.local.runs` describes them."""


class RunOnDisk(Protocol):
    """One run, which may not exist. `folder` has `logs/`, `nodes/`, `checkpoints/` and `outputs/`."""

    folder: Path

    def status(self) -> RunStatus:
        """Return the run's status. Raises RunNotFound."""

    def spec(self) -> RunSpec:
        """Return the spec as submitted. Raises RunNotFound."""


class FolderBackend:
    """The calls of `Backend` that only read or write files. `root` holds the runs, `images_root` the built-in images.

    `<root>/.active/<name>` exists while a run may have processes.
    """

    shares_storage = True
    extends_runs = False
    has_notebooks = False

    def __init__(self, root: Path, images_root: Path) -> None:
        self._root = root.resolve()
        self._images_root = images_root.resolve()
        self._trash = Trash(self._root / TRASH_FOLDER)
        for folder in (self._root, *(self._root / name for name in _FOLDERS)):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _find(self, name: str) -> RunOnDisk:
        """Return a handle on this run without checking that it exists.

        Raises RunNotFound for a name that no run's folder can have.
        """
        raise NotImplementedError

    def describe(self, name: str) -> RunStatus:
        """See `Backend.describe`."""
        return self._find(name).status()

    def logs(
        self,
        name: str,
        rank: int,
        offset: int = 0,
        limit: int = 65536,
        *,
        at_line: bool = False,
        with_times: bool = False,
    ) -> LogChunk:
        """See `Backend.logs`. A rank that the run does not have raises RunNotFound."""
        run = self._find(name)
        # The status is read before the log. A log that is read after the run's end is complete.
        has_ended = run.status().phase is RunPhase.ENDED
        if not 0 <= rank < run.spec().world_size:
            raise RunNotFound(f"The run '{name}' has no rank {rank}.")
        raw_chunk = _read(run.folder / "logs" / f"rank-{rank}.log", offset, limit)
        # The times are read after the log, because they are written before it: then no line lacks its time.
        times = _read_times(run.folder / "logs" / f"rank-{rank}.times", raw_chunk) if with_times else None
        return log_chunks.text_chunk(raw_chunk, is_final=has_ended and raw_chunk.at_end, at_line=at_line, times=times)

    def samples(self, name: str, node: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        """See `Backend.samples`. A node that the run does not have raises RunNotFound."""
        run = self._find(name)
        has_ended = run.status().phase is RunPhase.ENDED  # before the samples, as in `logs`
        if not 0 <= node < run.spec().nodes:
            raise RunNotFound(f"The run '{name}' has no node {node}.")
        path = run.folder / "nodes" / f"{node}.samples.jsonl"
        raw_chunk = _read(path, offset, limit)
        if b"\n" not in raw_chunk.data and not raw_chunk.at_end:  # one line is longer than `limit`
            raw_chunk = _read(path, offset, log_chunks.MAX_LINE_BYTES)
        return log_chunks.lines_chunk(raw_chunk.data, raw_chunk.offset, is_final=has_ended and raw_chunk.at_end)

    def stacks(self, name: str) -> dict[int, str]:
        """See `Backend.stacks`."""
        run = self._find(name)
        run.spec()  # raises RunNotFound if the run does not exist
        stacks = {}
        for path in (run.folder / "logs").glob("stacks-*.txt"):
            stacks[int(path.stem.partition("-")[2])] = path.read_text("utf-8", "replace")
        return dict(sorted(stacks.items()))

    def extend(self, name: str, deadline_seconds: int) -> None:
        """See `Backend.extend`. Subclasses that can move deadlines override it."""
        del name, deadline_seconds
        raise extension_error()

    def delete_shared(self, checkpoint_key: str) -> None:
        """See `Backend.delete_shared`."""
        with translate_errors(checkpoint_key):
            self._trash.move_in(self.checkpoint_folder(checkpoint_key))
            self._trash.move_in(self.output_folder(checkpoint_key))
            self._trash.empty()

    def fill_checkpoints(self, checkpoint_key: str, copy: Callable[[Path], None]) -> None:
        """See `Backend.fill_checkpoints`."""
        folder = self.checkpoint_folder(checkpoint_key)
        remove_tree(folder)
        folder.mkdir(parents=True, mode=0o700)
        try:
            copy(folder)
        except BaseException:
            remove_tree(folder)
            raise

    def names(self, *, live: bool = False) -> list[str]:
        """See `Backend.names`. Includes runs whose submission is not complete."""
        if live:
            return sorted(path.name for path in (self._root / ".active").iterdir())
        return sorted(path.name for path in self._root.iterdir() if path.is_dir() and not path.name.startswith("."))

    def check_image(self, image: Image, controller: Controller = Controller.GLOO, *, gpus: int = 0) -> None:
        """See `Backend.check_image`."""
        admission.check_image(image, self._images_root, controller, gpus=gpus)

    def image_identity(self, image: Image) -> str:
        """See `Backend.image_identity`."""
        return venvs.identity(self._images_root, image.builtin)

    def environment(self, spec: RunSpec, rank: int) -> dict[str, str]:
        """See `Backend.environment`."""
        # Ports are chosen at submission, so `Backend.environment` promises 0 in their place.
        ports = {"master_port": 0, "worker_ports": [0] * launch_plan.ports_needed(spec)["worker_ports"]}
        plan = Plan.from_data({**launch_plan.topology_fields(spec), **ports, "node": rank // spec.workers_per_node})
        return rank_environment(plan, rank % spec.workers_per_node)

    def run_folder(self, name: str) -> Path:
        """See `Backend.run_folder`; the layout is in `runtime.backends.local.runs`."""
        return self._find(name).folder

    def notebook_socket(self, name: str) -> Path | None:
        """See `Backend.notebook_socket`. None unless the subclass runs nodes on this machine."""
        del name
        return None

    def checkpoint_folder(self, checkpoint_key: str) -> Path:
        """See `Backend.checkpoint_folder`."""
        return self._root / ".checkpoints" / checkpoint_key

    def output_folder(self, checkpoint_key: str) -> Path:
        """See `Backend.output_folder`."""
        return self._root / ".outputs" / checkpoint_key

    def _checkpoint_and_output_folders(self, run: RunOnDisk, spec: RunSpec) -> tuple[Path, Path]:
        """Return the two folders: those that attempts share under the run's checkpoint key, or else the run's own."""
        if not spec.checkpoint_key:
            return run.folder / "checkpoints", run.folder / "outputs"
        return self.checkpoint_folder(spec.checkpoint_key), self.output_folder(spec.checkpoint_key)


@contextlib.contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Raise RunUnreadable for an error of the storage in the `with` block, which changes files of this run."""
    try:
        yield
    except OSError as error:
        raise RunUnreadable(f"The files of '{name}' cannot be changed: {error.strerror}.") from error


def check_folder_name(name: str) -> None:
    """Raise RunNotFound for a name that no run's folder can have."""
    if name.startswith(".") or "/" in name or not name:
        raise RunNotFound(f"There is no run named '{name}'.")


def _read(path: Path, offset: int, limit: int) -> log_chunks.RawChunk:
    """Return up to `limit` bytes from an offset; a missing file is empty."""
    try:
        with path.open("rb") as file:
            return log_chunks.read_raw_chunk(file, offset, limit)
    except FileNotFoundError:
        return log_chunks.RawChunk(b"", at_end=True, offset=max(0, offset), size=0)


def _read_times(path: Path, raw_chunk: log_chunks.RawChunk) -> log_chunks.Times:
    """Return the times of a chunk of a log; empty if the file is missing or a link."""
    try:
        file_fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return log_chunks.read_times(file_fd, raw_chunk)
    finally:
        os.close(file_fd)
