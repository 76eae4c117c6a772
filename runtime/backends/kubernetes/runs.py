"""Observe the runs of one cluster, and store in their Jobs the state that would be lost with their Pods.

A run's end is decided once. The first process that sees it writes the final status to the Job's annotations (`names`).
Every later call returns that status, even after the Pods are deleted.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.backends.kubernetes import names, pending
from runtime.backends.kubernetes.capacity import not_ready_since
from runtime.backends.kubernetes.client import ApiClient, ApiError, Object, resource_path
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.disruptions import DeletionEvents, event_selectors, read_events, unexplained_deletions
from runtime.backends.kubernetes.objects import (
    controller_uid,
    is_deleting,
    is_owned_by,
    object_annotations,
    object_labels,
)
from runtime.backends.kubernetes.outcome import derive_status
from runtime.backends.kubernetes.state import (
    JobState,
    PodState,
    Termination,
    as_externally_deleted,
    dump_status,
    is_existing_run,
    is_submitted,
    load_status,
    newest_pods,
    read_job,
    read_pod,
    with_saved_external_deletion,
)
from runtime.backends.kubernetes.volume import RunFolders
from runtime.backends.records import RecordData, is_well_formed
from runtime.errors import BackendUnavailable, RunNotFound
from runtime.launcher.signed_record import STOP_FILE, read_record, sign_stop
from runtime.specs import Capacity, Outcome, RunPhase, RunStatus, Waiting

logger = logging.getLogger(__name__)

_MAX_RECORD_BYTES = 1 << 20
"""Maximum bytes that are read of a record in shared storage. A record has a few KiB, but customer code can replace the
file by a larger one."""
_MAX_CACHED_KEYS = 10_000
"""Maximum number of record keys in memory, 64 bytes each. A cluster never has so many runs at a time."""
_EVENT_CACHE_SECONDS = 1.0
"""How long a namespace's warnings are reused. Each pending run is described about every second, and needs them each
time."""
_PATCH_TRIES = 10
"""Tries to patch a Job that others change at the same time. Its controller changes it a few times a second at most."""
_MAX_SAVED_PODS = 24
"""Deleted Pods are saved for the nodes below this number. A saved Pod takes up to 6 KiB with its termination message,
and a Job's annotations hold at most 256 KiB, including the final status."""


class Runs:
    """The runs of one cluster. `folders` is None if the console does not share their storage."""

    def __init__(
        self, api: ApiClient, config: ClusterConfig, folders: RunFolders | None, capacity: Callable[[], Capacity | None]
    ) -> None:
        """`capacity` returns the cluster's capacity, or None if it is not known."""
        self._api = api
        self._config = config
        self._folders = folders
        self._capacity = capacity
        self._record_keys: collections.OrderedDict[str, str] = collections.OrderedDict()
        """By the UID of a run's Job: the key that signs the run's records. In the order in which they were fetched."""
        self._record_keys_lock = threading.Lock()
        self._warnings: dict[str, tuple[float, list[Object]]] = {}
        """By namespace: when its warning events were read (monotonic), and these events."""

    # Read

    def find_job(self, name: str) -> Object | None:
        """Return the run's Job, even if its submission is incomplete; None if there is none.

        Raises BackendUnavailable.
        """
        if not self._config.namespace_per_organization:
            return self._api.find(resource_path("batch/v1", "jobs", self._config.namespace, name))
        # The namespace depends on the organization, which the run's name does not show.
        jobs = self._api.list(resource_path("batch/v1", "jobs"), labelSelector=f"{names.RUN_LABEL}={name}")["items"]
        return next((job for job in jobs if job["metadata"]["name"] == name), None)

    def get_job(self, name: str) -> Object:
        """Return the Job of a submitted run that is not being deleted. Raises RunNotFound, BackendUnavailable."""
        job = self.find_job(name)
        if job is None or not is_existing_run(job):
            raise RunNotFound(f"There is no run named '{name}'.")
        return job

    def list_pods(self, job: Object) -> list[Object]:
        """Return the run's Pods, without Pods of an earlier Job of the same name that are still ending."""
        meta = job["metadata"]
        path = resource_path("v1", "pods", meta["namespace"])
        pods: list[Object] = self._api.list(path, labelSelector=f"{names.RUN_LABEL}={meta['name']}")["items"]
        # "": a Pod that has lost its owner counts by its label.
        return [pod for pod in pods if controller_uid(pod) in {"", meta["uid"]}]

    def status(self, name: str) -> RunStatus:
        """Return the run's status. Raises RunNotFound, BackendUnavailable.

        This call also stores in the Job the facts that would be lost with the Pods, and ends a run that must not go on
        (`pending.find_termination`).
        """
        job = self.get_job(name)
        state = read_job(job)
        if state.final_status is not None:
            return state.final_status
        pod_objects = self.list_pods(job)
        now = time.time()
        listed_pods = [pod for pod in map(read_pod, pod_objects) if pod is not None]
        pods = newest_pods(state, [*listed_pods, *self._externally_deleted(state, pod_objects, now)])
        unreachable_since = self._unreachable_nodes(state, pods)
        records = self._verified_records(state, pods)
        status = derive_status(state, pods, records, now=now, unreachable_since=unreachable_since)
        if status.phase is RunPhase.ENDED:
            if status.outcome is Outcome.CODE_FAILED and unexplained_deletions(state, pods):
                # The run is free of charge if a Pod was deleted by neither the Job controller nor the console. Only
                # events show that. Reading them costs two requests, so that is done only in this case.
                events = self._deletion_events(state, now)
                status = derive_status(
                    state, pods, records, now=now, unreachable_since=unreachable_since, events=events
                )
            # If further events are expected, the second status is not ENDED yet.
            return self._save_final_status(state, pods, status) if status.phase is RunPhase.ENDED else status
        waiting = self._explain(job, state, pod_objects) if status.phase is RunPhase.STARTING else None
        if waiting is not None:
            status = dataclasses.replace(
                status, waiting_for=waiting.sentence, waiting_code=waiting.code.value, waiting_data=waiting.data
            )
        termination = pending.find_termination(state, pods, status, waiting, config=self._config, now=now)
        if termination is not None:
            self.terminate(state, termination)
        elif state.termination is not None and not state.is_ending:
            # A process stored the termination, but died before it had the Job controller end the Pods.
            self.terminate(state, state.termination)
        self._save_progress(state, pods, status)
        return status

    # Write

    def delete_job(self, job: Object) -> None:
        """Delete this Job, and with it all objects that it owns. Raises ApiError, BackendUnavailable."""
        meta = job["metadata"]
        self._api.delete(resource_path("batch/v1", "jobs", meta["namespace"], meta["name"]), uid=meta["uid"])

    def terminate(
        self, job: JobState, termination: Termination, *, grace_end: float = 0.0, ends_pods: bool = True
    ) -> None:
        """Store why the run ends, and have the Job controller end its Pods. A termination that is stored already stays.

        If `ends_pods` is false, this only stores the termination; the caller then deletes the Pods itself, to shorten
        their grace period. `grace_end` is when these Pods must have ended, in Unix seconds.
        """
        # The Job controller ends the Pods at once, since the Job has run for longer than this.
        change: dict[str, Any] = {"activeDeadlineSeconds": 1} if ends_pods else {}
        if job.suspended and ends_pods:
            change["parallelism"] = 0  # if Kueue resumed the Job now, it would start no Pods
        annotations = {names.GRACE_END_ANNOTATION: repr(grace_end)} if grace_end else {}
        if job.termination is None:
            stored = {**annotations, names.TERMINATION_ANNOTATION: termination.to_json()}
            patch = {"metadata": {"annotations": stored}, "spec": change}
            if self._patch_once(job, names.TERMINATION_ANNOTATION, patch) is None:
                return
            # Another process has stored a termination, which stays. The rest of the change is made below.
        self._patch_job(job, {"metadata": {"annotations": annotations}, "spec": change})

    def write_stop_file(self, job: JobState, grace_seconds: int) -> None:
        """Write the file on shared storage that asks the Pods to end sooner. Does nothing without shared storage.

        The file is needed because a kubelet does not shorten a grace period that has begun. If the file cannot be
        written, the Pods keep that longer period.
        """
        key = self.record_key(job) if self._folders is not None else ""
        if self._folders is not None and key:
            self._folders.write(job.name, "nodes", STOP_FILE, sign_stop(job.name, grace_seconds, key))

    def save_pod(self, pod: Object, *, was_deleted_first: bool = False) -> None:
        """Store in the run's Job the last state of a Pod that is being deleted.

        `was_deleted_first`: the deletion was requested before any Pod of the run failed. A failure is logged and not
        raised, because the caller's watch must continue.
        """
        state = read_pod(pod)
        is_unexplained = state is not None and was_deleted_first and not state.disruption
        if state is None or not (is_unexplained or _must_save(state, None)):
            return
        namespace, name = pod["metadata"]["namespace"], object_labels(pod).get(names.RUN_LABEL, "")
        try:
            job = self._api.find(resource_path("batch/v1", "jobs", namespace, name))
            if job is None or not is_submitted(job) or controller_uid(pod) not in {"", job["metadata"]["uid"]}:
                return
            job_state = read_job(job)
            if is_unexplained and _should_keep_pods(job, job_state):
                state = as_externally_deleted(pod, now=time.time()) or state
            saved = with_saved_external_deletion(state, job_state.saved_pods.get(state.node))
            self._save_progress(job_state, {state.node: saved}, None)
        except (BackendUnavailable, ApiError):
            logger.warning("The last state of node %s of the run %s could not be stored.", state.node, name)

    # Inputs of a status

    def _externally_deleted(self, job: JobState, pods: Sequence[Object], now: float) -> list[PodState]:
        """Return the Pods that neither the Job controller nor the console deleted, marked as EXTERNALLY_DELETED.

        Returns none once a Pod of the run has failed, since the Job controller then deletes the others.
        """
        deleting = [pod for pod in pods if is_deleting(pod)]
        if not deleting or job.is_failing or job.termination or any(_has_failed(pod) for pod in pods):
            return []
        # The Job was read before the Pods. It is read again, because the controller writes its reason to the Job only
        # after it has deleted Pods. The console stores a termination before it deletes Pods. So the second read shows
        # whether the controller or the console deleted these.
        current = self.find_job(job.name)
        if current is None or current["metadata"]["uid"] != job.uid:
            return []
        current_state = read_job(current)
        if current_state.is_failing or not _should_keep_pods(current, current_state):
            return []
        deleted_pods = [as_externally_deleted(pod, now=now) for pod in deleting]
        # A Pod that has ended has succeeded, so its deletion ends nothing: `_has_failed` was false for all.
        return [pod for pod in deleted_pods if pod is not None and not pod.ended]

    def _deletion_events(self, job: JobState, now: float) -> DeletionEvents | None:
        """Return what events show about the run's deleted Pods; None without the permission to read events."""
        path = resource_path("v1", "events", job.namespace)
        try:
            job_events, pod_events = (
                self._api.list(path, fieldSelector=selector)["items"] for selector in event_selectors(job)
            )
        except ApiError:
            return None
        return read_events(job, job_events, pod_events, now=now)

    def _unreachable_nodes(self, job: JobState, pods: Mapping[int, PodState]) -> dict[int, float]:
        """Return, by node, when its machine became NotReady or was deleted (Unix seconds).

        Reads Kubernetes Nodes only for a run that shows signs of trouble. The result is empty without the permission to
        read Nodes; lost Pods are then found when their end is overdue (`outcome`).
        """
        active = [pod for pod in pods.values() if pod.machine and not pod.ended]
        has_signs_of_trouble = (
            job.is_failing
            or job.termination
            or len(active) < len(pods)  # a Pod has ended or has no machine
            or any(pod.deletion_deadline or pod.disruption for pod in active)
        )
        if not has_signs_of_trouble:
            return {}
        unreachable_since = {}
        for machine in {pod.machine for pod in active}:
            try:
                node = self._api.find(resource_path("v1", "nodes", name=machine))
            except ApiError:
                return {}
            # When a Node was deleted is not known, so the time of this look counts.
            since = not_ready_since(node) if node is not None else time.time()
            if since is not None:
                unreachable_since.update({pod.node: since for pod in active if pod.machine == machine})
        return unreachable_since

    def _verified_records(self, job: JobState, pods: Mapping[int, PodState]) -> dict[int, RecordData]:
        """Return, by node, its record if the signature is valid and the record is well formed.

        The last record of an ended Pod is in its termination message. The current record of a running Pod is in shared
        storage.
        """
        # Before a Pod has started, there is no record to verify, so the key is not read.
        key = self.record_key(job) if any(pod.started_at for pod in pods.values()) else ""
        records: dict[int, RecordData] = {}
        if not key:
            return records
        for node in range(job.nodes):
            message = pods[node].termination_message.encode() if node in pods else b""
            record = read_record(message, key, run_name=job.name, node=node)
            if record is None and self._folders is not None:
                data = self._folders.read(job.name, "nodes", f"{node}.json", 0, _MAX_RECORD_BYTES).data
                record = read_record(data, key, run_name=job.name, node=node)
            if record is not None and is_well_formed(record):
                # While a node runs, its customer code can put an older record back. So causes and the start of the code
                # are read from final records only.
                is_final = record.get("phase") == "ended"
                records[node] = record if is_final else {**record, "causes": [], "started_at": None}
        return records

    def record_key(self, job: JobState) -> str:
        """Return the key that signs the run's records; "" if the run's Secret is deleted."""
        with self._record_keys_lock:
            if job.uid in self._record_keys:
                return self._record_keys[job.uid]
        secret = self._api.find(resource_path("v1", "secrets", job.namespace, job.name)) or {}
        key = b64decode((secret.get("data") or {}).get("record_key", "")).decode()
        if key:
            with self._record_keys_lock:
                self._record_keys[job.uid] = key
                while len(self._record_keys) > _MAX_CACHED_KEYS:
                    self._record_keys.popitem(last=False)
        return key

    def _explain(self, job: Object, state: JobState, pods: Sequence[Object]) -> Waiting:
        """Return why the run has not started. Works also without the permission to read events and Workloads."""
        uids = {state.uid, *(pod["metadata"]["uid"] for pod in pods)}
        events: list[Object] = []
        workload = None
        with contextlib.suppress(ApiError):
            warnings = self._namespace_warnings(state.namespace)
            events = [event for event in warnings if (event.get("involvedObject") or {}).get("uid") in uids]
        if state.suspended:
            with contextlib.suppress(ApiError):
                workload = self._kueue_workload(state)
        has_unscheduled = any(not pod["spec"].get("nodeName") for pod in pods)
        capacity = self._capacity() if has_unscheduled else None
        return pending.explain_waiting(job, pods, events, config=self._config, capacity=capacity, workload=workload)

    def _namespace_warnings(self, namespace: str) -> list[Object]:
        """Return the namespace's warning events, at most `_EVENT_CACHE_SECONDS` old."""
        read_at, warnings = self._warnings.get(namespace, (0.0, []))
        if time.monotonic() > read_at + _EVENT_CACHE_SECONDS:
            warnings = self._api.list(resource_path("v1", "events", namespace), fieldSelector="type!=Normal")["items"]
            self._warnings[namespace] = (time.monotonic(), warnings)
        return warnings

    def _kueue_workload(self, job: JobState) -> Object | None:
        """Return Kueue's Workload of the Job; None if Kueue has created none yet. Raises ApiError."""
        path = resource_path("kueue.x-k8s.io/v1beta1", "workloads", job.namespace)
        workloads: list[Object] = self._api.list(path)["items"]
        return next((workload for workload in workloads if is_owned_by(workload, job.uid)), None)

    # Storing

    def _save_progress(self, job: JobState, pods: Mapping[int, PodState], status: RunStatus | None) -> None:
        """Store when the run started, and the last state of Pods that are being deleted, unless stored already."""
        annotations: dict[str, str] = {}
        if status is not None and status.started_at is not None and job.started_at is None:
            annotations[names.STARTED_ANNOTATION] = repr(status.started_at)
        for node, pod in pods.items():
            if _must_save(pod, job.saved_pods.get(node)):
                annotations[f"{names.POD_ANNOTATION_PREFIX}{node}"] = pod.to_json()
        if annotations:
            self._patch_job(job, {"metadata": {"annotations": annotations}})

    def _save_final_status(self, job: JobState, pods: Mapping[int, PodState], status: RunStatus) -> RunStatus:
        """Store how the run ended, unless another process has, and delete Pods whose machine does not respond.

        Returns the stored status.
        """
        # The final status replaces the saved Pods; None removes an annotation.
        outdated: dict[str, str | None] = {f"{names.POD_ANNOTATION_PREFIX}{node}": None for node in job.saved_pods}
        change: dict[str, Any] = {
            "metadata": {
                "annotations": {**outdated, names.FINAL_STATUS_ANNOTATION: dump_status(status)},
                "labels": {names.ENDED_LABEL: "true"},
            }
        }
        # If the Job has no end condition, it is still active, and its Pods on lost machines would stay.
        unended = [] if job.end_condition else [pod for pod in pods.values() if not pod.ended]
        if unended:
            change["spec"] = {"activeDeadlineSeconds": 1}
        stored = self._patch_once(job, names.FINAL_STATUS_ANNOTATION, change)
        for pod in unended:
            # With a grace period of 0 the API server removes the Pod without waiting for its kubelet.
            path = resource_path("v1", "pods", job.namespace, pod.name)
            # If this fails, the Pod stays until its machine returns or is removed from the cluster.
            with contextlib.suppress(ApiError, BackendUnavailable):
                self._api.delete(path, grace_seconds=0, uid=pod.uid)
        return status if stored is None else load_status(stored)

    def _patch_once(self, job: JobState, annotation: str, change: Object) -> str | None:
        """Patch this Job. If another process has set the annotation since `job` was read, return that value instead.

        Returns None after the patch. Does nothing and returns None if the Job was deleted. Raises BackendUnavailable.
        """
        path = resource_path("batch/v1", "jobs", job.namespace, job.name)
        meta = {**change["metadata"], "uid": job.uid, "resourceVersion": job.version}
        for _ in range(_PATCH_TRIES):
            try:
                self._api.patch(path, {**change, "metadata": meta})
            except ApiError as error:
                if error.status not in {404, 409}:
                    raise BackendUnavailable(
                        f"The Job of the run '{job.name}' could not be changed: {error}"
                    ) from error
            else:
                return None
            current = self._api.find(path)
            if current is None or current["metadata"]["uid"] != job.uid:
                return None
            value = object_annotations(current).get(annotation)
            if value:
                return value
            meta["resourceVersion"] = current["metadata"]["resourceVersion"]
        raise BackendUnavailable(f"The Job of the run '{job.name}' changes too often.")

    def _patch_job(self, job: JobState, change: Object) -> None:
        """Patch this Job; do nothing if it was deleted or another Job has its name now. Raises BackendUnavailable."""
        # The API server answers 409 if the Job of this name has another UID.
        change = {**change, "metadata": {**change.get("metadata", {}), "uid": job.uid}}
        try:
            self._api.patch(resource_path("batch/v1", "jobs", job.namespace, job.name), change)
        except ApiError as error:
            if error.status not in {404, 409}:
                raise BackendUnavailable(f"The Job of the run '{job.name}' could not be changed: {error}") from error


def _must_save(pod: PodState, saved: PodState | None) -> bool:
    """Return whether the Pod is about to disappear and its saved state is missing or incomplete."""
    is_disappearing = pod.disruption or (pod.ended and pod.deletion_deadline is not None)
    if pod.node >= _MAX_SAVED_PODS or not is_disappearing:
        return False
    return saved is None or saved.uid != pod.uid or (pod.exit_code is not None and saved.exit_code is None)


def _has_failed(pod: Object) -> bool:
    """Return whether the Pod failed or reports a disruption."""
    state = read_pod(pod)
    return state is not None and bool(state.disruption or (state.ended and state.exit_code != 0))


def _should_keep_pods(job: Object, state: JobState) -> bool:
    """Return whether neither the console nor Kueue has a reason to delete the Job's Pods."""
    return not (is_deleting(job) or state.termination or state.suspended or state.final_status)
