"""The protocol of all backends, and `create`, which returns one by its kind.

Every call is idempotent and keyed on the run's name.
"""

from __future__ import annotations

import importlib
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from runtime.backends.local.backend import LocalBackend
from runtime.specs import Capacity, Controller, Image, LogChunk, RunSpec, RunStatus

Tunnel = Callable[[], AbstractAsyncContextManager[str]]
"""Opens a connection to a program on another machine. It yields the path of a Unix socket on this machine. The first
connection to this socket is passed on to that program. The socket is removed when the context ends. Raises RunNotFound,
BackendUnavailable."""
ShellTunnel = Callable[[], AbstractAsyncContextManager[tuple[StreamReader, StreamWriter]]]
"""Opens a connection to a new shell on another machine, and closes it when the context ends. Raises RunNotFound,
BackendUnavailable."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of a cluster: whether it passed, what it found, and how to fix the fault if it failed."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


class Backend(Protocol):
    """A cluster that runs RunSpecs."""

    shares_storage: bool
    """Whether the console can read and write the runs' files."""
    extends_runs: bool
    """Whether `extend` can move the deadline of a running run."""
    has_notebooks: bool
    """Whether the console can connect to notebooks: see `notebook_socket`."""
    parallel_submissions: int
    """How many submissions one process should make in parallel; 1 if more would not be faster."""

    def submit(self, spec: RunSpec) -> None:
        """Start the run. If a run of this name exists, in any phase, do nothing: the caller goes on with that run.

        Returns once the run is recorded, before its nodes run. Raises InvalidSpec, NoCapacity, BackendUnavailable;
        after an error, nothing of the run is left.
        """

    def describe(self, name: str) -> RunStatus:
        """Return the run's status. Raises RunNotFound, BackendUnavailable."""

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
        """Return up to `limit` bytes of one rank's output, from byte `offset` on. Raises RunNotFound.

        A negative `offset` counts from the end of the output. On a cluster that does not know the output's size, it
        stands for 0. `at_line`: leave out an incomplete line at the beginning. `with_times`: add the times of the
        lines, where they are known.
        """

    def samples(self, name: str, node: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        """Return a node's resource usage over time, as JSON lines of up to `limit` bytes in total. Raises RunNotFound.

        A negative `offset` counts from the end. The first line may then be incomplete.
        `runtime.launcher.telemetry.sampling` defines the fields of a line.
        """

    def stacks(self, name: str) -> dict[int, str]:
        """Return each rank's stacks at the time the run was found hung; empty if it was not. Raises RunNotFound."""

    def stop(self, name: str, grace_seconds: int) -> None:
        """Ask the run to end: SIGTERM to every rank, SIGKILL after the grace period.

        Returns at once, also for an unknown or ended run. If there are several requests, the earliest end counts.
        """

    def extend(self, name: str, deadline_seconds: int) -> None:
        """Move the deadline of a running run to `deadline_seconds` after its start, if that is later.

        Returns at once. A run that is ending, by its deadline or otherwise, ends as planned. Raises RunNotFound;
        InvalidSpec (deadline_seconds) where `extends_runs` is false.
        """

    def kill(self, name: str) -> None:
        """Kill the run's processes and free its capacity, even if its files cannot be read.

        Returns once all processes have ended. Raises RunUnreadable if they do not end, and BackendUnavailable if
        nothing is known about them. An unknown or ended run is fine. Call this only for a run whose status no longer
        matters.
        """

    def delete(self, name: str) -> None:
        """Remove every trace of the run, killing its processes. An unknown run is fine.

        Checkpoints and outputs that attempts share under a checkpoint key (`RunSpec.checkpoint_key`) stay for later
        attempts.
        """

    def delete_shared(self, checkpoint_key: str) -> None:
        """Remove the checkpoints and outputs that attempts share under this key. An unknown key is fine."""

    def names(self, *, live: bool = False) -> list[str]:
        """Return the names of all runs that the backend holds. Reconciliation compares them with the jobs.

        `live`: only the runs that may still have processes. Then the cost does not grow with the number of ended runs.
        """

    def capacity(self) -> Capacity:
        """Return the cluster's machines with their total and free resources. Raises BackendUnavailable."""

    def is_reachable(self) -> bool:
        """Return whether the cluster answers within two seconds. Asks the cluster even if earlier calls failed."""

    def changes(self, stop_after_seconds: float | None = None) -> Iterator[set[str]]:
        """Yield the names of runs whose status or output changed; block between changes.

        Something is yielded at least every second: an empty set, if nothing has changed. The iterator ends after
        `stop_after_seconds`; None: never. Changes are lost while no caller iterates, so a caller that begins must
        describe all runs that it knows.
        """

    def check_image(self, image: Image, controller: Controller = Controller.GLOO, *, gpus: int = 0) -> None:
        """Check that runs of this image can start on this cluster now. Raises InvalidSpec.

        The error's field is `controller` if the image lacks the controller's programs, `gpus` if nodes have GPUs that
        the image cannot use, and else `image`.
        """

    def image_identity(self, image: Image) -> str:
        """Return a text that identifies the content of an image on this cluster; empty if that is not known.

        The text is the digest of a built image's recipe with its flavour, or a registry reference, which may lack a
        digest. This call asks neither the cluster nor the registry.
        """

    def stop_prepared_processes(self) -> None:
        """End the processes that are kept for warm starts. Called when the console stops; runs continue."""

    def shell_socket(self, name: str, node: int) -> Path | ShellTunnel | None:
        """Return how the console connects to a new shell in a node; None if the node is known not to run.

        A path leads to a Unix socket on this machine that customer code cannot replace. `runtime.launcher.shell`
        defines the messages on a connection; customer code decides what the shell sends. Makes no call to the cluster;
        opening a tunnel does. Raises RunNotFound for a name that no run can have.
        """

    def notebook_socket(self, name: str) -> Path | Tunnel | None:
        """Return how the console connects to the JupyterLab of a run; None where `has_notebooks` is false.

        A path leads to a Unix socket on this machine, on which nothing listens while JupyterLab does not run.
        Customer code can put anything in its place. Makes no call to the cluster; opening a tunnel does. Raises
        RunNotFound for a name that no run can have.
        """

    def isolation_gaps(self) -> list[str]:
        """Return one English sentence for each resource that this cluster cannot isolate or limit."""

    def environment(self, spec: RunSpec, rank: int) -> dict[str, str]:
        """Return a rank's environment variables (docs/environment.md). Ports are 0: submission chooses them."""

    def run_folder(self, name: str) -> Path:
        """Return the run's folder on shared storage; RUN_DIR is its `run/`.

        Customer code writes there, so treat the contents as hostile: read them without following links.
        """

    def checkpoint_folder(self, checkpoint_key: str) -> Path:
        """Return the checkpoint folder that attempts share under this key.

        Its contents are hostile, as in `run_folder`.
        """

    def fill_checkpoints(self, checkpoint_key: str, copy: Callable[[Path], None]) -> None:
        """Replace the checkpoints under this key by the files that `copy` writes into an empty folder.

        Call this only for a key that no run has used. Runs may change the copied files later, so `copy` must not link
        to the originals. If `copy` raises, the folder is removed and the error passed on. Raises InvalidSpec
        (from_checkpoint) if storage is not shared.
        """

    def output_folder(self, checkpoint_key: str) -> Path:
        """Return the output folder (OUTPUT_DIR) that attempts share under this key.

        Its contents are hostile, as in `run_folder`.
        """


def create(kind: str, **options: Any) -> Backend:
    """Return a backend of this kind. Raises ValueError for an unknown kind.

    `local` takes `root` (the folder of runs), `images_root` (of the built images) and the other arguments of
    `LocalBackend`. `kubernetes` takes `config` (a `ClusterConfig`) and `root`, the folder of this cluster's runs inside
    the config's volume. `slurm` takes `config` (a `SlurmConfig`), `root` and `images_root`, which the compute nodes see
    at the same paths.
    """
    if kind == "local":
        return LocalBackend(**options)
    # The others are imported only when used: the Kubernetes client alone takes longer to import than all of a console
    # without clusters.
    if kind == "kubernetes":
        module = importlib.import_module("runtime.backends.kubernetes.backend")
        return cast("Backend", module.KubernetesBackend(**options))
    if kind == "slurm":
        module = importlib.import_module("runtime.backends.slurm.backend")
        return cast("Backend", module.SlurmBackend(**options))
    raise ValueError(f"There is no runtime backend '{kind}'. There are: kubernetes, local, slurm.")
