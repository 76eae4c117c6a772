"""What every backend can do. The one rule: each call is idempotent, keyed on the run's name.

`create` is the only way to one; who calls it names it in settings and imports no backend itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from runtime.backends.local import LocalBackend
from runtime.specs import Capacity, Controller, Image, LogChunk, RunSpec, RunStatus


@dataclass(frozen=True)
class Check:
    """One line of what was looked at in a cluster: whether it is as it should be, and if not, what to do."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


class Backend(Protocol):
    """A cluster that runs RunSpecs."""

    submits_at_once: int
    """How many submissions it is sensibly asked for at once, by one process: 1 where they wait for nothing."""

    def submit(self, spec: RunSpec) -> None:
        """Start the run, or adopt the one of this name that exists already (whatever its phase).

        Returns once the run is on record, not once it runs. Raises InvalidSpec, NoCapacity, BackendUnavailable; after
        any of them nothing of the run is left.
        """

    def describe(self, name: str) -> RunStatus:
        """How the run goes now. Raises RunNotFound, BackendUnavailable."""

    def logs(self, name: str, rank: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        """Up to `limit` bytes of one rank's output from byte `offset`. Raises RunNotFound."""

    def samples(self, name: str, node: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        """What one node used over time, as JSON lines (`runtime.launcher.sampling` says what is in one), whole ones.

        Raises RunNotFound.
        """

    def stacks(self, name: str) -> dict[int, str]:
        """Where each rank stood when the run was found hung: rank to text; empty where none was. Raises RunNotFound."""

    def stop(self, name: str, grace_seconds: int) -> None:
        """Ask the run to end: SIGTERM to every rank, SIGKILL after the grace.

        Returns at once; ended or unknown is fine. A second, sooner end counts.
        """

    def delete(self, name: str) -> None:
        """Remove every trace of the run, killing what still runs. Unknown is fine.

        Checkpoints shared under a key stay: later attempts need them.
        """

    def delete_checkpoints(self, key: str) -> None:
        """Remove the checkpoints that attempts share under this key. Unknown is fine."""

    def names(self, *, live: bool = False) -> list[str]:
        """Every run the backend holds: what a sweep compares with the jobs' rows.

        `live`: only those that may still have processes; this is cheap, however many have ended.
        """

    def capacity(self) -> Capacity:
        """What the cluster has and what is free. Raises BackendUnavailable."""

    def changes(self, stop_after: float | None = None) -> Iterator[set[str]]:
        """Names of runs whose status or output changed, as soon as it is known; blocks between changes.

        An empty set is a heartbeat (at least every second). Ends after `stop_after` seconds, never where None. A hint,
        not a record: after a restart the caller describes what it knows.
        """

    def check_image(self, image: Image, controller: Controller = Controller.GLOO) -> None:
        """Raises InvalidSpec where runs of this image can't start on this cluster as it is.

        Its field is `image`, or `controller` where the image lacks what this controller needs.
        """

    def prepare(self, image: Image) -> None:
        """Get ready for runs of this image, so that they start sooner; returns at once. Only a hint."""

    def retire(self) -> None:
        """The console goes: end what `prepare` keeps ready. Runs go on."""

    def isolation_gaps(self) -> list[str]:
        """What this cluster as it is cannot keep apart or limit as it should, an English sentence each."""

    def environment(self, spec: RunSpec, rank: int) -> dict[str, str]:
        """What a rank of such a run is told, by the environment contract. Ports, chosen at submit, are shown as 0."""

    def run_folder(self, name: str) -> Path:
        """The run's folder on shared storage, as the console sees it: what the code wrote to RUN_DIR is in `run/`.

        Hostile: written by the customer's code. Read it without following links.
        """


def create(kind: str, **options: Any) -> Backend:
    """The backend of this kind. Raises ValueError for an unknown kind.

    `local`: `root` (Path of the runs), `images_root` (Path), and what else `LocalBackend` takes.
    `kubernetes`: `config` (a `kubernetes_config.ClusterConfig`) and `root` (Path of this cluster's runs, inside the
    config's volume).
    """
    if kind == "local":
        return LocalBackend(**options)
    if kind == "kubernetes":
        # Imported here for speed alone: its client takes as long to import as a console without clusters to start.
        module = importlib.import_module("runtime.backends.kubernetes")
        return cast("Backend", module.KubernetesBackend(**options))
    raise ValueError(f"There is no runtime backend '{kind}'. There are: kubernetes, local.")
