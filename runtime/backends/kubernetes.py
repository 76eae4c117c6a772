"""The Kubernetes backend: a run is an Indexed Job, and what belongs to it.

It hides the API server and everything that can go wrong with it. Its one rule: the API server is the truth. Any number
of these objects, in any number of processes, may work on one cluster and die at any moment; what has to outlive a pod
is written on the run's Job.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

from runtime.backends import kubernetes_check, kubernetes_guard, kubernetes_output
from runtime.backends.base import Check
from runtime.backends.kubernetes_api import Api, Object, Refused, path_of
from runtime.backends.kubernetes_capacity import capacity as count
from runtime.backends.kubernetes_capacity import declared, waiting_requests
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_departures import Departures
from runtime.backends.kubernetes_facts import JobFact, latest, read_job, read_pod, seconds
from runtime.backends.kubernetes_folder import Folders
from runtime.backends.kubernetes_launchers import Launchers
from runtime.backends.kubernetes_names import (
    CONTAINER,
    ENDED_LABEL,
    MANAGED_BY,
    MANAGER,
    MARGIN_SECONDS,
    RUN_LABEL,
)
from runtime.backends.kubernetes_order import order
from runtime.backends.kubernetes_runs import Runs, is_submitted
from runtime.backends.kubernetes_submission import Submission
from runtime.backends.kubernetes_watch import LISTED, Watches
from runtime.errors import BackendUnavailable, InvalidSpec, RunNotFound
from runtime.launcher.frameworks import rank_environment
from runtime.launcher.topology import Plan
from runtime.specs import (
    Capacity,
    Controller,
    FailureCode,
    Image,
    LogChunk,
    Outcome,
    RunPhase,
    RunSpec,
    RunStatus,
)

_REFERENCE = re.compile(r"^[a-z0-9][a-z0-9._:/-]*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?$")
_HALF_MADE_SECONDS = 900.0
"""A submission that nobody has finished for so long is cleared away."""
_OUTPUT_SECONDS = 1.0
_UNSEEN_OUTPUT_SECONDS = 3.0
"""So often somebody looks for output: on shared storage by its files, else by asking the API server."""
_CAPACITY_SECONDS = 1.0


class KubernetesBackend:
    """Runs on one cluster. `root` is where this console sees the runs' folders, inside the config's volume."""

    submits_at_once = 8

    def __init__(self, *, config: ClusterConfig, root: Path) -> None:
        if config.volume.shared and not root.is_relative_to(config.volume.root):
            raise ValueError(f"The cluster '{config.name}': its runs must lie in its volume, {config.volume.root}.")
        self._config = config
        self._root = root
        self._api = Api(config)
        self._folders = Folders(root, config.uid) if config.volume.shared else None
        self._runs = Runs(self._api, config, self._folders, self._capacity_if_known)
        self._launchers = Launchers(self._api, config)
        self._submission = Submission(self._api, config, self._runs, root, self._folders, launchers=self._launchers)
        self._counted: tuple[float, Capacity] | None = None

    # The protocol

    def submit(self, spec: RunSpec) -> None:
        """See `Backend.submit`. What does not fit now waits in the cluster, and says for what."""
        with self._heard():
            self._submission.submit(spec)
        self._counted = None

    def describe(self, name: str) -> RunStatus:
        """See `Backend.describe`."""
        with self._heard():
            return self._runs.status(name)

    def logs(self, name: str, rank: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        """See `Backend.logs`. A rank that the run does not have raises RunNotFound."""
        with self._heard():
            found, job, ended = self._asked(name)
            workers = int(job.told.get("workers", 1))
            if not 0 <= rank < job.nodes * workers:
                raise RunNotFound(f"The run '{name}' has no rank {rank}.")
            if self._folders is not None:
                data, whole = self._folders.read(name, "logs", f"rank-{rank}.log", offset, limit)
            else:
                data, whole = self._pod_log(found, rank // workers, rank, max(0, offset), limit)
        return kubernetes_output.text_chunk(data, offset, final=ended and whole)

    def samples(self, name: str, node: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        """See `Backend.samples`. There are none where storage is not shared."""
        with self._heard():
            _found, job, ended = self._asked(name)
        if not 0 <= node < job.nodes:
            raise RunNotFound(f"The run '{name}' has no node {node}.")
        if self._folders is None:
            return LogChunk("", max(0, offset), eof=ended)
        file = f"{node}.samples.jsonl"
        data, whole = self._folders.read(name, "nodes", file, offset, limit)
        if b"\n" not in data and not whole:
            data, whole = self._folders.read(name, "nodes", file, offset, kubernetes_output.LONGEST_SAMPLE)
        return kubernetes_output.lines_chunk(data, offset, final=ended and whole)

    def stacks(self, name: str) -> dict[int, str]:
        """See `Backend.stacks`. There are none where storage is not shared."""
        with self._heard():
            self._runs.get(name)
        found = {}
        for file in self._folders.files(name, "logs") if self._folders is not None else []:
            rank = file.removeprefix("stacks-").removesuffix(".txt")
            if self._folders is not None and rank.isdecimal() and file == f"stacks-{rank}.txt":
                data, _whole = self._folders.read(name, "logs", file, 0, kubernetes_output.LONGEST_SAMPLE)
                found[int(rank)] = data.decode("utf-8", "replace")
        return dict(sorted(found.items()))

    def stop(self, name: str, grace_seconds: int) -> None:
        """See `Backend.stop`."""
        with self._heard():
            job = self._runs.find(name)
            if job is None:
                return
            if not is_submitted(job):
                self._api.delete(_address(job), uid=job["metadata"]["uid"])
                return
            fact = read_job(job)
            if fact.final or fact.ended_as:
                return
            message = "The run was stopped on request."
            why = kubernetes_guard.taken_down(Outcome.STOPPED, FailureCode.STOPPED, message, time.time())
            hurried = grace_seconds < int(fact.told.get("grace_seconds", 0))
            if hurried:
                # Before its Job tells them: a kubelet keeps to the grace that it was told of first.
                self._runs.take_down(fact, why, hurried_until=time.time() + grace_seconds, through_job=False)
                self._runs.hurry(fact, grace_seconds)
                self._hurry(job, grace_seconds)
            self._runs.take_down(fact, why)

    def delete(self, name: str) -> None:
        """See `Backend.delete`."""
        with self._heard():
            job = self._runs.find(name)
            if job is not None:
                # First: a kubelet that was once told of a longer grace, by whoever collects pods, keeps to it.
                self._hurry(job, 0)
                self._api.delete(_address(job), uid=job["metadata"]["uid"])
                self._hurry(job, 0)
            namespace = job["metadata"]["namespace"] if job is not None else self._config.namespace
            self._clear(namespace, name)
        if self._folders is not None:
            self._folders.remove(name)

    def delete_checkpoints(self, key: str) -> None:
        """See `Backend.delete_checkpoints`."""
        if self._folders is not None:
            self._folders.remove_checkpoints(key)

    def names(self, *, live: bool = False) -> list[str]:
        """See `Backend.names`. What submissions given up half made, and older versions, have left goes on the way."""
        selector = f"{MANAGED_BY}={MANAGER},{RUN_LABEL}" + (f",!{ENDED_LABEL}" if live else "")
        with self._heard():
            jobs = self._api.list(self._path("batch/v1", "jobs"), labelSelector=selector)["items"]
            names = []
            for job in jobs:
                made_at = seconds(job["metadata"]["creationTimestamp"]) or 0.0
                if not is_submitted(job) and time.time() > made_at + _HALF_MADE_SECONDS:
                    self._api.delete(_address(job), uid=job["metadata"]["uid"])
                elif not job["metadata"].get("deletionTimestamp"):
                    names.append(job["metadata"]["name"])
            if not live:
                self._launchers.collect(jobs)
        return sorted(names)

    def capacity(self) -> Capacity:
        """See `Backend.capacity`. What waits to be placed holds what it asks for. At most a second old."""
        if self._counted is None or time.monotonic() > self._counted[0] + _CAPACITY_SECONDS:
            self._counted = (time.monotonic(), self._count())
        return self._counted[1]

    def changes(self, stop_after: float | None = None) -> Iterator[set[str]]:
        """See `Backend.changes`. Output is looked for every second, where storage is not shared every few."""
        end = None if stop_after is None else time.monotonic() + stop_after
        paths = {kind: self._path(version, kind) for kind, version in (("jobs", "batch/v1"), ("pods", "v1"))}
        paths["events"] = self._path("v1", "events")
        running: dict[str, str] = {}
        departures = Departures()

        def look(kind: str, change: str, item: Object) -> None:
            if change == LISTED:
                if kind == "pods":
                    departures.begin(item["items"])
                return
            name = (item["metadata"].get("labels") or {}).get(RUN_LABEL, "")
            if kind == "jobs":
                if change == "DELETED":
                    running.pop(name, None)
                    departures.forget(item["metadata"]["uid"])
                return
            first = departures.take(change, item)
            if change == "DELETED" or item["metadata"].get("deletionTimestamp"):
                self._runs.note(item, first=first)
            if (item.get("status") or {}).get("phase") == "Running":
                running[name] = item["metadata"]["uid"]

        watches = Watches(self._api, paths, look)
        try:
            yield from self._changes(watches, running, end)
        finally:
            watches.close()

    def check_image(self, image: Image, controller: Controller = Controller.GLOO) -> None:
        """See `Backend.check_image`. Whether a registry has it, its nodes find out."""
        del controller  # every image is asked for its own mpirun, by the launcher
        if image.builtin:
            if image.builtin not in self._config.images:
                raise InvalidSpec(
                    f"The cluster '{self._config.name}' has no image '{image.builtin}'. Choose another, or ask your "
                    "administrator to add it.",
                    field="image",
                )
        elif not _REFERENCE.match(image.reference):
            raise InvalidSpec(f"'{image.reference}' is no reference of an image.", field="image")

    def prepare(self, image: Image) -> None:
        """Nodes keep the images that they have pulled; there is nothing else to get ready."""

    def retire(self) -> None:
        """Nothing is kept ready, so nothing is to be ended."""

    def isolation_gaps(self) -> list[str]:
        """See `Backend.isolation_gaps`."""
        gaps = []
        if self._config.volume.host_path:
            gaps.append("Pods of runs mount a folder of their machine, which the Pod Security Standards forbid.")
        if self._folders is None:
            gaps.append("Storage is not shared: checkpoints end with their pod, and metrics files are not read.")
        return gaps

    def environment(self, spec: RunSpec, rank: int) -> dict[str, str]:
        """See `Backend.environment`. Addresses, which pods are given when they are placed, are shown empty."""
        plan = order(spec, self._config, self._root)["plan"]
        shown = {"addresses": [""] * spec.nodes, "node": rank // spec.workers_per_node, "master_port": 0}
        ports = {name: [0] * len(plan[name]) for name in ("worker_ports", "spare_ports")}
        return rank_environment(Plan.from_data({**plan, **shown, **ports}), rank % spec.workers_per_node)

    def run_folder(self, name: str) -> Path:
        """See `Backend.run_folder`; the layout is that of local runs. Empty where storage is not shared."""
        return self._root / name

    # How

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        """What the server refuses for a reason that nobody foresaw is a cluster that is not set up."""
        try:
            yield
        except Refused as refused:
            name = self._config.name
            raise BackendUnavailable(
                f"The cluster '{name}' refuses: {refused}. 'manage.py check_cluster {name}' says what is missing."
            ) from refused

    def _path(self, version: str, plural: str) -> str:
        """A collection: of the runs' namespace, or of all where each organization has one."""
        return path_of(version, plural, "" if self._config.namespace_per_organization else self._config.namespace)

    def _asked(self, name: str) -> tuple[Object, JobFact, bool]:
        """A run's Job, what it says, and whether nothing is written any more."""
        found = self._runs.get(name)
        fact = read_job(found)
        ended = bool(fact.final) or self._runs.status(name).phase is RunPhase.ENDED
        return found, fact, ended

    def _pod_log(self, found: Object, node: int, rank: int, offset: int, limit: int) -> tuple[bytes, bool]:
        """From the API server, as long as the pod is there."""
        job = read_job(found)
        pod = latest(job, [pod for pod in map(read_pod, self._runs.pods(found)) if pod is not None]).get(node)
        if pod is None or pod.started_at is None:
            return b"", True
        try:
            path = path_of("v1", "pods", job.namespace, pod.name, "log")
            return kubernetes_output.of_rank(self._api.text(path, container=CONTAINER), rank, offset, limit)
        except Refused as refused:
            if refused.status in {400, 404}:
                return b"", True  # it is gone, or not begun
            raise

    def _hurry(self, job: Object, grace_seconds: int) -> None:
        """End the run's pods sooner than they would by themselves."""
        for pod in self._runs.pods(job):
            phase = (pod.get("status") or {}).get("phase")
            meta = pod["metadata"]
            if phase in {"Succeeded", "Failed"}:
                continue
            if meta.get("deletionGracePeriodSeconds", MARGIN_SECONDS + grace_seconds) > max(1, grace_seconds):
                path = path_of("v1", "pods", meta["namespace"], meta["name"])
                self._api.delete(path, grace_seconds=max(1, grace_seconds), uid=meta["uid"])

    def _clear(self, namespace: str, name: str) -> None:
        """What the Job owns goes with it; this is for what somebody has parted from it."""
        for version, plural, owned in (
            ("v1", "services", name),
            ("v1", "secrets", name),
            ("v1", "secrets", f"{name}-pull"),
            ("v1", "configmaps", name),
            ("networking.k8s.io/v1", "networkpolicies", name),
        ):
            self._api.delete(path_of(version, plural, namespace, owned))

    def _count(self) -> Capacity:
        with self._heard():
            held = self._held()
            if self._config.elastic and self._config.capacity is not None:
                return declared(self._config.capacity, held, self._config)
            try:
                nodes = self._api.list(path_of("v1", "nodes"))["items"]
                pods = self._api.list(
                    path_of("v1", "pods"), fieldSelector="status.phase!=Succeeded,status.phase!=Failed"
                )
            except Refused:
                if self._config.elastic:
                    return Capacity((), elastic=True)
                if self._config.capacity is None:
                    raise
                return declared(self._config.capacity, held, self._config)
        return count(nodes, pods["items"], self._config, waiting=waiting_requests(held, pods["items"], self._config))

    def _held(self) -> list[Object]:
        """The Jobs of runs that may have pods now, or are about to."""
        selector = f"{MANAGED_BY}={MANAGER},{RUN_LABEL},!{ENDED_LABEL}"
        jobs = self._api.list(self._path("batch/v1", "jobs"), labelSelector=selector)["items"]
        return [job for job in jobs if not job["spec"].get("suspend") and not _is_over(job)]

    def _capacity_if_known(self) -> Capacity | None:
        try:
            return self.capacity()
        except BackendUnavailable:
            return None

    def _changes(self, watches: Watches, running: dict[str, str], end: float | None) -> Iterator[set[str]]:
        stamps: dict[str, tuple[int, ...]] = {}
        look_at = 0.0
        while end is None or time.monotonic() < end:
            names = watches.changed()
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + (_UNSEEN_OUTPUT_SECONDS if self._folders is None else _OUTPUT_SECONDS)
                for name in list(running):
                    stamp = (0,) if self._folders is None else self._folders.stamp(name)
                    if self._folders is None or stamps.get(name) != stamp:
                        names.add(name)
                    stamps[name] = stamp
                stamps = {name: stamp for name, stamp in stamps.items() if name in running}
            yield names


def _address(job: Object) -> str:
    return path_of("batch/v1", "jobs", job["metadata"]["namespace"], job["metadata"]["name"])


def _is_over(job: Object) -> bool:
    return bool(read_job(job).ended_as)


def check(config: ClusterConfig, root: Path, *, smoke: bool = True) -> Iterator[Check]:
    """Look at a cluster, line by line, as far as it can be reached; `smoke` starts a run of one node at the end.

    Never raises for what is wrong with the cluster: that is a line, with its remedy.
    """
    backend = KubernetesBackend(config=config, root=root)
    return kubernetes_check.check(Api(config), config, root, backend if smoke else None)
