"""The Kubernetes backend: `KubernetesBackend` runs each RunSpec as an Indexed Job.

The API server holds all state of a run, so any number of processes may use one cluster, and each may die at any moment.
Annotations of the run's Job store the state that must outlive a Pod.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.backends import log_chunks
from runtime.backends.admission import check_gpus, check_reference, extension_error
from runtime.backends.base import CheckResult, ShellTunnel, Tunnel
from runtime.backends.kubernetes import check as cluster_check
from runtime.backends.kubernetes import names
from runtime.backends.kubernetes.capacity import compute_capacity, declared_capacity, pending_requests
from runtime.backends.kubernetes.client import ApiClient, ApiError, Object, resource_path
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.disruptions import DeletionTracker
from runtime.backends.kubernetes.launcher_archive import LauncherConfigMaps
from runtime.backends.kubernetes.logs import RankOutput, extract_rank
from runtime.backends.kubernetes.notebooks import NotebookTunnels
from runtime.backends.kubernetes.objects import TERMINAL_PHASES, is_deleting, pod_phase, timestamp
from runtime.backends.kubernetes.pod_plan import build_pod_inputs
from runtime.backends.kubernetes.runs import Runs
from runtime.backends.kubernetes.shells import ShellTunnels
from runtime.backends.kubernetes.state import JobState, Termination, is_submitted, newest_pods, read_job, read_pod
from runtime.backends.kubernetes.submission import Submission
from runtime.backends.kubernetes.volume import RunFolders
from runtime.backends.kubernetes.watch import LISTED, RunningRuns, Watcher
from runtime.errors import BackendUnavailable, InvalidSpec, RunNotFound
from runtime.launcher.frameworks import rank_environment
from runtime.launcher.record import STACKS_LIMIT_BYTES
from runtime.launcher.topology import Plan
from runtime.specs import Capacity, Controller, FailureCode, Image, LogChunk, Outcome, RunPhase, RunSpec, RunStatus

_ABANDONED_SECONDS = 900.0
"""Age at which a Job whose submission is incomplete is deleted. A submission takes seconds, and the console repeats a
failed one for some minutes."""
_OUTPUT_POLL_SECONDS = 1.0
"""Interval at which `changes` looks for new output in shared storage. A network file system reports no changes that
other machines make."""
_REPORT_ALL_SECONDS = 3.0
"""Interval at which `changes` reports every running run if storage is not shared. The backend cannot see which of them
wrote output, and each reported run costs a request for its logs."""
_MAX_STACKS_BYTES = 16 << 20
"""Maximum size of the stacks of all ranks that `stacks` returns, since customer code can write these files. A rank's
real stacks have a few KiB."""
_CAPACITY_CACHE_SECONDS = 1.0
"""How long a computed capacity is reused. One scheduling pass asks for it several times."""


class KubernetesBackend:
    """Runs on one cluster."""

    # The first process and `activeDeadlineSeconds` enforce the deadline that was set when the Pod was created.
    extends_runs = False
    has_notebooks = True
    parallel_submissions = 8  # a submission mostly waits for the API server

    def __init__(self, *, config: ClusterConfig, root: Path) -> None:
        """`root` is the folder of this cluster's runs, as the console sees it, inside the config's volume."""
        if config.volume.shared and not root.is_relative_to(config.volume.root):
            raise ValueError(f"The cluster '{config.name}': its runs must lie in its volume, {config.volume.root}.")
        self._config = config
        self._root = root
        self._api = ApiClient(config)
        self._folders = RunFolders(root, config.uid) if config.volume.shared else None
        self.shares_storage = config.volume.shared
        self._runs = Runs(self._api, config, self._folders, self._capacity_if_known)
        self._launchers = LauncherConfigMaps(self._api, config)
        self._submission = Submission(self._api, config, self._runs, root, self._folders, launchers=self._launchers)
        self._notebooks = NotebookTunnels(self._api, self._runs)
        self._shells = ShellTunnels(self._api, self._runs)
        self._cached_capacity: tuple[float, Capacity] | None = None
        """When the capacity was last computed (monotonic), and the result; None if it must be computed anew."""

    # The protocol

    def submit(self, spec: RunSpec) -> None:
        """See `Backend.submit`. A run that does not fit now stays pending in the cluster."""
        with self._translate_refusals():
            self._submission.submit(spec)
        self._cached_capacity = None

    def describe(self, name: str) -> RunStatus:
        """See `Backend.describe`."""
        with self._translate_refusals():
            return self._runs.status(name)

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
        """See `Backend.logs`. Raises RunNotFound for a rank that the run does not have."""
        with self._translate_refusals():
            job, state, has_ended = self._read_run(name)
            workers = state.spec.workers
            if not 0 <= rank < state.nodes * workers:
                raise RunNotFound(f"The run '{name}' has no rank {rank}.")
            if self._folders is not None:
                raw_chunk = self._folders.read(name, "logs", f"rank-{rank}.log", offset, limit)
                # Each line's time is written before the line. So times that are read after the log cover all lines.
                times = self._folders.log_times(name, rank, raw_chunk) if with_times else None
            else:
                # A negative offset would count from the end, which is not known without reading all of the output.
                offset = max(0, offset)
                output = self._read_pod_log(job, rank // workers, rank, offset, limit, with_times=with_times)
                raw_chunk = log_chunks.RawChunk(output.data, output.at_end, offset)
                times = output.times if with_times else None
        return log_chunks.text_chunk(raw_chunk, is_final=has_ended and raw_chunk.at_end, at_line=at_line, times=times)

    def samples(self, name: str, node: int, offset: int = 0, limit: int = 65536) -> LogChunk:
        """See `Backend.samples`. Empty if storage is not shared."""
        with self._translate_refusals():
            _job, state, has_ended = self._read_run(name)
        if not 0 <= node < state.nodes:
            raise RunNotFound(f"The run '{name}' has no node {node}.")
        if self._folders is None:
            return LogChunk("", max(0, offset), eof=has_ended)
        file = f"{node}.samples.jsonl"
        raw_chunk = self._folders.read(name, "nodes", file, offset, limit)
        if b"\n" not in raw_chunk.data and not raw_chunk.at_end:  # one line is longer than `limit`
            raw_chunk = self._folders.read(name, "nodes", file, offset, log_chunks.MAX_LINE_BYTES)
        return log_chunks.lines_chunk(raw_chunk.data, raw_chunk.offset, is_final=has_ended and raw_chunk.at_end)

    def stacks(self, name: str) -> dict[int, str]:
        """See `Backend.stacks`. Empty if storage is not shared."""
        with self._translate_refusals():
            state = read_job(self._runs.get_job(name))  # raises RunNotFound
        if self._folders is None:
            return {}
        stacks = {}
        bytes_left = _MAX_STACKS_BYTES
        for rank in range(state.nodes * state.spec.workers):
            limit = min(STACKS_LIMIT_BYTES, bytes_left)
            data = self._folders.read(name, "logs", f"stacks-{rank}.txt", 0, limit).data
            bytes_left -= len(data)
            if data:
                stacks[rank] = data.decode("utf-8", "replace")
        return stacks

    def stop(self, name: str, grace_seconds: int) -> None:
        """See `Backend.stop`."""
        with self._translate_refusals():
            job = self._runs.find_job(name)
            if job is None:
                return
            if not is_submitted(job):  # the run does not exist yet, so there are no Pods to end
                self._runs.delete_job(job)
                return
            state = read_job(job)
            if state.final_status is not None or state.end_condition:
                return
            now = time.time()
            message = "The run was stopped on request."
            termination = Termination(Outcome.STOPPED, FailureCode.STOPPED, message, now)
            if grace_seconds < state.spec.grace_seconds:
                # A kubelet keeps the first grace period that it received. So the Pods are deleted with the shorter one
                # before the Job controller deletes them.
                self._runs.terminate(state, termination, grace_end=now + grace_seconds, ends_pods=False)
                state = dataclasses.replace(state, termination=termination)  # it is stored now
                self._runs.write_stop_file(state, grace_seconds)
                self._delete_pods(job, grace_seconds)
            self._runs.terminate(state, termination)

    def extend(self, name: str, deadline_seconds: int) -> None:
        """See `Backend.extend`."""
        del name, deadline_seconds
        raise extension_error()

    def kill(self, name: str) -> None:
        """See `Backend.kill`. Deletes the run: the cluster has its state, so there is none that only lacks files."""
        self.delete(name)

    def delete(self, name: str) -> None:
        """See `Backend.delete`."""
        with self._translate_refusals():
            job = self._runs.find_job(name)
            if job is not None:
                # The Pods are deleted before the Job. Otherwise the garbage collector would give them their full grace
                # period, and a kubelet keeps the first grace period that it received.
                self._delete_pods(job, 0)
                # The folder goes first: if this process dies in between, reconciliation finds the run by its Job.
                if self._folders is not None:
                    self._folders.remove(name)
                self._runs.delete_job(job)
                self._delete_pods(job, 0)  # the Job controller may have created Pods in between
            self._delete_orphans(job["metadata"]["namespace"] if job is not None else self._config.namespace, name)
        if self._folders is not None:
            self._folders.remove(name)  # what Pods have written since

    def delete_shared(self, checkpoint_key: str) -> None:
        """See `Backend.delete_shared`."""
        if self._folders is not None:
            self._folders.remove_shared(checkpoint_key)

    def names(self, *, live: bool = False) -> list[str]:
        """See `Backend.names`. Also deletes abandoned submissions and, unless `live`, unused launchers.

        Reconciliation calls this regularly, so the deletions need no timer.
        """
        with self._translate_refusals():
            selector = names.LIVE_RUN_SELECTOR if live else names.RUN_SELECTOR
            jobs = self._api.list(self._collection("batch/v1", "jobs"), labelSelector=selector)["items"]
            abandoned = [job for job in jobs if _is_abandoned(job)]
            for job in abandoned:
                self._runs.delete_job(job)
            if not live:
                self._launchers.remove_unused(jobs)
        return sorted(job["metadata"]["name"] for job in jobs if not is_deleting(job) and job not in abandoned)

    def capacity(self) -> Capacity:
        """See `Backend.capacity`. Requests of pending Pods count as used. The result is at most a second old."""
        now = time.monotonic()
        if self._cached_capacity is None or now > self._cached_capacity[0] + _CAPACITY_CACHE_SECONDS:
            self._cached_capacity = (now, self._compute_capacity())
        return self._cached_capacity[1]

    def is_reachable(self) -> bool:
        """See `Backend.is_reachable`."""
        return self._api.is_ready()

    def changes(self, stop_after_seconds: float | None = None) -> Iterator[set[str]]:
        """See `Backend.changes`. Watches Jobs, Pods and events, and polls for new output (`_OUTPUT_POLL_SECONDS`)."""
        stop_at = None if stop_after_seconds is None else time.monotonic() + stop_after_seconds
        paths = {
            "jobs": self._collection("batch/v1", "jobs"),
            "pods": self._collection("v1", "pods"),
            "events": self._collection("v1", "events"),
        }
        running_runs = RunningRuns()
        deletions = DeletionTracker()

        def on_change(kind: str, change: str, item: Object) -> None:
            """Note which runs may write output, and save the state of Pods that are being deleted."""
            if kind == "events":
                return
            running_runs.observe(kind, change, item)
            if change == LISTED:
                if kind == "pods":
                    deletions.reset(item["items"])
                return
            if kind == "jobs":
                if change == "DELETED":
                    deletions.forget(item["metadata"]["uid"])
                return
            # Whether the Pod was deleted before any Pod of its run failed.
            was_deleted_first = deletions.observe(change, item)
            if change == "DELETED" or is_deleting(item):
                self._runs.save_pod(item, was_deleted_first=was_deleted_first)

        watcher = Watcher(self._api, paths, on_change)
        try:
            yield from self._changes_until(watcher, running_runs, stop_at)
        finally:
            watcher.close()

    def check_image(self, image: Image, controller: Controller = Controller.GLOO, *, gpus: int = 0) -> None:
        """See `Backend.check_image`. Does not ask the registry, since the console may have no access to it."""
        del controller  # MPI needs mpirun in the image: if it is missing, the launcher reports that
        if image.builtin:
            if image.builtin not in self._config.images:
                raise InvalidSpec(
                    f"The cluster '{self._config.name}' has no image '{image.builtin}'. Choose another, or ask your "
                    "administrator to add it.",
                    field="image",
                )
            check_gpus(image, self._config.flavours.get(image.builtin), gpus)
        else:
            check_reference(image)

    def image_identity(self, image: Image) -> str:
        """See `Backend.image_identity`."""
        return image.reference or self._config.images.get(image.builtin, "")

    def stop_prepared_processes(self) -> None:
        """Do nothing: starts are always cold."""

    def isolation_gaps(self) -> list[str]:
        """See `Backend.isolation_gaps`."""
        gaps = []
        if self._config.volume.host_path:
            gaps.append("Pods of runs mount a folder of their machine, which the Pod Security Standards forbid.")
        if self._folders is None:
            gaps.append(
                "Storage is not shared: checkpoints and outputs end with their pod, and metrics files are not read."
            )
        return gaps

    def environment(self, spec: RunSpec, rank: int) -> dict[str, str]:
        """See `Backend.environment`. Addresses are empty: a Pod gets its address when it starts."""
        topology = build_pod_inputs(spec, self._config, self._root).topology
        # Ports are 0, as the protocol promises.
        ports = {"master_port": 0, **{name: [0] * len(topology[name]) for name in ("worker_ports", "spare_ports")}}
        pod_fields = {"addresses": [""] * spec.nodes, "node": rank // spec.workers_per_node}
        return rank_environment(Plan.from_data({**topology, **ports, **pod_fields}), rank % spec.workers_per_node)

    def run_folder(self, name: str) -> Path:
        """See `Backend.run_folder`. Does not exist if storage is not shared."""
        return self._root / name

    def shell_socket(self, name: str, node: int) -> ShellTunnel:
        """See `Backend.shell_socket`. Returned even if the node does not run: opening it then raises RunNotFound."""
        return functools.partial(self._shells.open, name, node)

    def notebook_socket(self, name: str) -> Tunnel:
        """See `Backend.notebook_socket`. Returned even if there is no such run: opening it then raises RunNotFound."""
        return functools.partial(self._notebooks.open, name)

    def checkpoint_folder(self, checkpoint_key: str) -> Path:
        """See `Backend.checkpoint_folder`."""
        return self._root / ".checkpoints" / checkpoint_key

    def fill_checkpoints(self, checkpoint_key: str, copy: Callable[[Path], None]) -> None:
        """See `Backend.fill_checkpoints`."""
        if self._folders is None:
            raise InvalidSpec("The cluster's storage is not shared with the console.", field="from_checkpoint")
        self._folders.fill_checkpoints(checkpoint_key, copy)

    def output_folder(self, checkpoint_key: str) -> Path:
        """See `Backend.output_folder`. Does not exist if storage is not shared."""
        return self._root / ".outputs" / checkpoint_key

    # Helpers

    @contextlib.contextmanager
    def _translate_refusals(self) -> Iterator[None]:
        """Turn an unexpected refusal of the API server into BackendUnavailable: the cluster is not set up correctly."""
        try:
            yield
        except ApiError as error:
            name = self._config.name
            raise BackendUnavailable(
                f"The cluster '{name}' refuses: {error}. 'manage.py check_cluster {name}' says what is missing."
            ) from error

    def _collection(self, version: str, plural: str) -> str:
        """Return the path of a collection: in the namespace of runs, or in all if each organization has its own."""
        namespace = "" if self._config.namespace_per_organization else self._config.namespace
        return resource_path(version, plural, namespace)

    def _read_run(self, name: str) -> tuple[Object, JobState, bool]:
        """Return a run's Job, its state, and whether the run has ended. Raises RunNotFound.

        Call this before reading files: an ended run writes nothing more, so a later read is complete.
        """
        job = self._runs.get_job(name)
        state = read_job(job)
        return job, state, state.final_status is not None or self._runs.status(name).phase is RunPhase.ENDED

    def _read_pod_log(
        self, job: Object, node: int, rank: int, offset: int, limit: int, *, with_times: bool
    ) -> RankOutput:
        """Read a rank's output from the API server. It is empty before the Pod starts and after it is deleted."""
        state = read_job(job)
        pods = newest_pods(state, [pod for pod in map(read_pod, self._runs.list_pods(job)) if pod is not None])
        pod = pods.get(node)
        if pod is None or pod.started_at is None:
            return RankOutput(b"", at_end=True, times=[])
        path = resource_path("v1", "pods", state.namespace, pod.name, "log")
        try:
            query = {"container": names.CONTAINER_NAME, **({"timestamps": "true"} if with_times else {})}
            return extract_rank(self._api.stream(path, **query), rank, offset, limit, with_times=with_times)
        except ApiError as error:
            if error.status in {400, 404}:  # the container has not started, or the Pod is deleted
                return RankOutput(b"", at_end=True, times=[])
            raise

    def _delete_pods(self, job: Object, grace_seconds: int) -> None:
        """Delete the run's Pods that have not ended. Skip Pods that already have this grace period or a shorter one."""
        # A grace period of 0 would remove the Pod from the API server while its processes still run.
        grace = max(1, grace_seconds)
        for pod in self._runs.list_pods(job):
            meta = pod["metadata"]
            if pod_phase(pod) in TERMINAL_PHASES:
                continue
            current_grace = meta.get("deletionGracePeriodSeconds")
            if current_grace is None or current_grace > grace:
                path = resource_path("v1", "pods", meta["namespace"], meta["name"])
                self._api.delete(path, grace_seconds=grace, uid=meta["uid"])

    def _delete_orphans(self, namespace: str, name: str) -> None:
        """Delete the run's objects that have lost their owner, for example by `kubectl delete job --cascade=orphan`.

        Kubernetes deletes all others together with the Job.
        """
        for version, plural, object_name in (
            ("v1", "services", name),
            ("v1", "secrets", name),
            ("v1", "secrets", f"{name}-pull"),
            ("v1", "secrets", f"{name}-secrets"),
            ("v1", "configmaps", name),
            ("networking.k8s.io/v1", "networkpolicies", name),
        ):
            self._api.delete(resource_path(version, plural, namespace, object_name))

    def _compute_capacity(self) -> Capacity:
        """Compute the cluster's total and free resources. Raises BackendUnavailable."""
        with self._translate_refusals():
            jobs = self._resumed_jobs()
            # The Nodes that an elastic cluster has now do not show how far it can grow; the declared capacity does.
            if self._config.elastic and self._config.capacity is not None:
                return declared_capacity(self._config.capacity, jobs, self._config)
            try:
                nodes = self._api.list(resource_path("v1", "nodes"))["items"]
                not_ended = "status.phase!=Succeeded,status.phase!=Failed"
                pods = self._api.list(resource_path("v1", "pods"), fieldSelector=not_ended)["items"]
            except ApiError:
                # The console lacks the permission to list Nodes, or the Pods of all namespaces.
                if self._config.elastic:
                    return Capacity((), elastic=True)
                if self._config.capacity is None:
                    raise
                return declared_capacity(self._config.capacity, jobs, self._config)
        return compute_capacity(nodes, pods, self._config, pending=pending_requests(jobs, pods, self._config))

    def _resumed_jobs(self) -> list[Object]:
        """Return the Jobs that may have Pods: neither suspended nor ended."""
        jobs = self._api.list(self._collection("batch/v1", "jobs"), labelSelector=names.LIVE_RUN_SELECTOR)["items"]
        return [job for job in jobs if not job["spec"].get("suspend") and not read_job(job).end_condition]

    def _capacity_if_known(self) -> Capacity | None:
        """Return the capacity; None if the cluster does not answer. `Runs` can explain a wait without it."""
        try:
            return self.capacity()
        except BackendUnavailable:
            return None

    def _changes_until(self, watcher: Watcher, running_runs: RunningRuns, stop_at: float | None) -> Iterator[set[str]]:
        """Yield the runs that the watcher reports and those that wrote output, until the monotonic time `stop_at`."""
        fingerprints: dict[str, tuple[int, ...]] = {}  # of each run's files, at the last poll
        next_poll_at = 0.0
        while stop_at is None or time.monotonic() < stop_at:
            changed = watcher.wait_for_changes()
            if time.monotonic() >= next_poll_at:
                if self._folders is None:
                    changed |= running_runs.sizes().keys()
                    next_poll_at = time.monotonic() + _REPORT_ALL_SECONDS
                else:
                    sizes = running_runs.sizes()
                    current = {name: self._folders.fingerprint(name, *size) for name, size in sizes.items()}
                    changed |= {name for name, fingerprint in current.items() if fingerprints.get(name) != fingerprint}
                    fingerprints = current
                    next_poll_at = time.monotonic() + _OUTPUT_POLL_SECONDS
            yield changed


def _is_abandoned(job: Object) -> bool:
    """Return whether the Job's submission is incomplete and too old to be completed."""
    created_at = timestamp(job["metadata"]["creationTimestamp"]) or 0.0
    return not is_submitted(job) and time.time() > created_at + _ABANDONED_SECONDS


def check(config: ClusterConfig, root: Path, *, smoke: bool = True) -> Iterator[CheckResult]:
    """Yield the results of all checks of a cluster; with `smoke`, the last one is a smoke run."""
    backend = KubernetesBackend(config=config, root=root)
    return cluster_check.check(ApiClient(config), config, root, backend if smoke else None)
