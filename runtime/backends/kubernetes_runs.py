"""One cluster's runs, as their Jobs, pods and records tell of them.

The one rule: how a run ended is decided once. Whoever sees the end first writes it on the Job, and from then on that is
how it ended, whatever becomes of its pods.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.backends import kubernetes_guard, kubernetes_history, kubernetes_waiting
from runtime.backends.kubernetes_api import Api, Object, Refused, path_of
from runtime.backends.kubernetes_capacity import lost_since
from runtime.backends.kubernetes_causes import Record, parted
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_facts import (
    JobFact,
    PodFact,
    latest,
    pack_status,
    read_job,
    read_pod,
    remembered,
    removed,
    unpack_status,
)
from runtime.backends.kubernetes_folder import Folders
from runtime.backends.kubernetes_names import (
    ENDED_LABEL,
    FINAL,
    HURRIED,
    POD,
    RUN_LABEL,
    STARTED,
    SUBMITTED,
    TAKEN_DOWN,
)
from runtime.backends.kubernetes_outcome import merge
from runtime.errors import BackendUnavailable, RunNotFound
from runtime.launcher.signed import STOP_FILE, read_record, sign_stop
from runtime.specs import Capacity, Outcome, RunPhase, RunStatus, Waiting

logger = logging.getLogger(__name__)

_LONGEST_RECORD = 1 << 20
_KEYS = 10_000
_EVENTS_SECONDS = 1.0
_MOST_NOTES = 24
"""A Job's annotations hold 256 KiB; of the pods that are gone, so many are kept with what they said last."""


class Runs:
    """The runs of one cluster. `folders` is None where their storage is not shared with us."""

    def __init__(
        self, api: Api, config: ClusterConfig, folders: Folders | None, capacity: Callable[[], Capacity | None]
    ) -> None:
        self._api = api
        self._config = config
        self._folders = folders
        self._capacity = capacity
        self._keys: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._warned: dict[str, tuple[float, list[Object]]] = {}

    # Finding

    def find(self, name: str) -> Object | None:
        """The run's Job, half made or not. Raises BackendUnavailable."""
        if not self._config.namespace_per_organization:
            return self._api.find(path_of("batch/v1", "jobs", self._config.namespace, name))
        found = self._api.list(path_of("batch/v1", "jobs"), labelSelector=f"{RUN_LABEL}={name}")["items"]
        return next((job for job in found if job["metadata"]["name"] == name), None)

    def get(self, name: str) -> Object:
        """The run's Job. Raises RunNotFound, also for one whose submission is half made, and BackendUnavailable."""
        job = self.find(name)
        if job is None or not is_submitted(job) or job["metadata"].get("deletionTimestamp"):
            raise RunNotFound(f"There is no run named '{name}'.")
        return job

    def pods(self, job: Object) -> list[Object]:
        """The run's pods, as the API server has them; those of an older Job of its name may still be going."""
        meta = job["metadata"]
        path = path_of("v1", "pods", meta["namespace"])
        found: list[Object] = self._api.list(path, labelSelector=f"{RUN_LABEL}={meta['name']}")["items"]
        return [pod for pod in found if owner_of(pod) in {"", meta["uid"]}]

    # How it goes

    def status(self, name: str) -> RunStatus:
        """How the run goes; writes on its Job what would else be lost. Raises RunNotFound, BackendUnavailable."""
        job = self.get(name)
        fact = read_job(job)
        if fact.final:
            return unpack_status(fact.final)
        listed = self.pods(job)
        now = time.time()
        seen = [pod for pod in map(read_pod, listed) if pod is not None]
        pods = latest(fact, [*seen, *self._removed(fact, listed, now)])
        lost = self._lost(fact, pods)
        records = self._records(fact, pods)
        status = merge(fact, pods, records, now=now, lost=lost)
        if status.phase is RunPhase.ENDED:
            if status.outcome is Outcome.CODE_FAILED and parted(fact, pods):
                history = self._history(fact, now)
                status = merge(fact, pods, records, now=now, lost=lost, history=history)
            self._write_end(fact, pods, status)
            return status
        waiting = self._waiting(job, fact, listed) if status.phase is RunPhase.STARTING else None
        if waiting is not None:
            status = dataclasses.replace(
                status, waiting_for=waiting.sentence, waiting_code=waiting.code.value, waiting_data=waiting.data
            )
        why = kubernetes_guard.verdict(fact, pods, status, waiting, config=self._config, now=now)
        if why is not None:
            self.take_down(fact, why)
        elif fact.taken_down is not None and not fact.is_told:
            self.take_down(fact, fact.taken_down)
        self._keep(fact, pods, status)
        return status

    def take_down(
        self, fact: JobFact, why: Mapping[str, Any], *, hurried_until: float = 0.0, through_job: bool = True
    ) -> None:
        """Have the run's pods ended, with the grace that they have; the first reason given stays the reason.

        `through_job` False: the caller ends them, sooner. Whoever looks at the run next makes up for one that died.
        """
        change: dict[str, Any] = {"activeDeadlineSeconds": 1} if through_job else {}
        if fact.suspended and through_job:
            change["parallelism"] = 0
        notes = {} if fact.taken_down is not None else {TAKEN_DOWN: json.dumps(dict(why), sort_keys=True)}
        if hurried_until:
            notes[HURRIED] = repr(hurried_until)
        self._write(fact, {"metadata": {"annotations": notes}, "spec": change})

    def hurry(self, fact: JobFact, grace_seconds: int) -> None:
        """Leave word for pods that are on their way out already: kubelets do not cut short a wait that has begun."""
        key = self._record_key(fact) if self._folders is not None else ""
        if self._folders is not None and key:
            self._folders.write(fact.name, "nodes", STOP_FILE, sign_stop(fact.name, grace_seconds, key))

    def note(self, pod: Object, *, first: bool = False) -> None:
        """Keep the last word of a pod that goes, on its Job. For a watch: it raises nothing.

        `first`: it was told to go before any of its run had failed, by the order of the watch.
        """
        meta = pod["metadata"]
        fact = read_pod(pod)
        name = (meta.get("labels") or {}).get(RUN_LABEL, "")
        if fact is None or not (_is_worth_keeping(fact, None) or (first and not fact.disruption)):
            return
        try:
            job = self._api.find(path_of("batch/v1", "jobs", meta["namespace"], name))
            if job is None or not is_submitted(job) or owner_of(pod) not in {"", job["metadata"]["uid"]}:
                return
            of_job = read_job(job)
            if first and not fact.disruption and _may_lose_pods_to_others(job, of_job):
                fact = removed(pod, now=time.time()) or fact
            self._keep(of_job, {fact.node: remembered(fact, of_job.kept.get(fact.node))}, None)
        except (BackendUnavailable, Refused):
            logger.warning("What node %s of the run %s said last could not be kept.", fact.node, name)

    # What is asked for it

    def _removed(self, fact: JobFact, listed: Sequence[Object], now: float) -> list[PodFact]:
        """Pods that were told to go while all of this list were well: not by the Job's controller, then."""
        going = [pod for pod in listed if pod["metadata"].get("deletionTimestamp")]
        if not going or fact.failing or fact.taken_down or any(_has_failed(pod) for pod in listed):
            return []
        # Its controller tells pods to go before it says why, and what we want of it ourselves is written first.
        job = self.find(fact.name)
        if (
            job is None
            or job["metadata"]["uid"] != fact.uid
            or not _may_lose_pods_to_others(job, after := read_job(job))
        ):
            return []
        if after.failing:
            return []
        found = [removed(pod, now=now) for pod in going]
        return [pod for pod in found if pod is not None and not pod.ended]

    def _history(self, fact: JobFact, now: float) -> kubernetes_history.History | None:
        """What events say, where they may be read."""
        path = path_of("v1", "events", fact.namespace)
        try:
            told = [self._api.list(path, fieldSelector=one)["items"] for one in kubernetes_history.selectors(fact)]
        except Refused:
            return None
        return kubernetes_history.read(fact, *told, now=now)

    def _lost(self, fact: JobFact, pods: Mapping[int, PodFact]) -> dict[int, float]:
        """Nodes on machines that the API server takes for dead; asked only where something is wrong already."""
        open_ones = [pod for pod in pods.values() if pod.machine and not pod.ended]
        suspicious = fact.failing or fact.taken_down or any(pod.deleted_at or pod.disruption for pod in open_ones)
        if not (suspicious or len(open_ones) < len(pods)):
            return {}
        lost = {}
        for machine in {pod.machine for pod in open_ones}:
            try:
                node = self._api.find(path_of("v1", "nodes", name=machine))
            except Refused:
                return {}  # we may not look: then only time tells
            since = lost_since(node) if node is not None else time.time()
            if since is not None:
                lost.update({pod.node: since for pod in open_ones if pod.machine == machine})
        return lost

    def _records(self, fact: JobFact, pods: Mapping[int, PodFact]) -> dict[int, Record]:
        """What nodes say of themselves, where its signature is good: the last record, else the one of now."""
        key = self._record_key(fact) if any(pod.started_at for pod in pods.values()) else ""
        found: dict[int, Record] = {}
        if not key:
            return found
        for node in range(fact.nodes):
            said = pods[node].message.encode() if node in pods else b""
            record = read_record(said, key, run=fact.name, node=node)
            if record is None and self._folders is not None:
                data, _all = self._folders.read(fact.name, "nodes", f"{node}.json", 0, _LONGEST_RECORD)
                record = read_record(data, key, run=fact.name, node=node)
            if record is not None:
                over = record.get("phase") == "ended"
                # Only a last record can not be one of before that was put in its place.
                found[node] = record if over else {**record, "causes": [], "started_at": None}
        return found

    def _record_key(self, fact: JobFact) -> str:
        with self._lock:
            if fact.uid in self._keys:
                return self._keys[fact.uid]
        secret = self._api.find(path_of("v1", "secrets", fact.namespace, fact.name)) or {}
        key = b64decode((secret.get("data") or {}).get("record_key", "")).decode()
        if key:
            with self._lock:
                self._keys[fact.uid] = key
                while len(self._keys) > _KEYS:
                    self._keys.popitem(last=False)
        return key

    def _waiting(self, job: Object, fact: JobFact, pods: Sequence[Object]) -> Waiting:
        uids = {fact.uid, *(pod["metadata"]["uid"] for pod in pods)}
        events: list[Object] = []
        workload = None
        # Without them there is less to say, and nothing else to lose.
        with contextlib.suppress(Refused):
            listed = self._events(fact.namespace)
            events = [one for one in listed if (one.get("involvedObject") or {}).get("uid") in uids]
        if fact.suspended:
            with contextlib.suppress(Refused):
                workload = self._workload(fact)
        unplaced = any(not pod["spec"].get("nodeName") for pod in pods)
        capacity = self._capacity() if unplaced else None
        return kubernetes_waiting.explain(job, pods, events, config=self._config, capacity=capacity, workload=workload)

    def _events(self, namespace: str) -> list[Object]:
        """The namespace's warnings, at most a second old: every run that waits asks for them."""
        at, listed = self._warned.get(namespace, (0.0, []))
        if time.monotonic() > at + _EVENTS_SECONDS:
            listed = self._api.list(path_of("v1", "events", namespace), fieldSelector="type!=Normal")["items"]
            self._warned[namespace] = (time.monotonic(), listed)
        return listed

    def _workload(self, fact: JobFact) -> Object | None:
        path = path_of("kueue.x-k8s.io/v1beta1", "workloads", fact.namespace)
        for one in self._api.list(path)["items"]:
            if any(owner["uid"] == fact.uid for owner in one["metadata"].get("ownerReferences") or []):
                found: Object = one
                return found
        return None

    # What is written on it

    def _keep(self, fact: JobFact, pods: Mapping[int, PodFact], status: RunStatus | None) -> None:
        """What would go with a pod: when the run began, and the last of pods that are being deleted."""
        notes: dict[str, str] = {}
        if status is not None and status.started_at is not None and fact.started_at is None:
            notes[STARTED] = repr(status.started_at)
        for node, pod in pods.items():
            if _is_worth_keeping(pod, fact.kept.get(node)):
                notes[f"{POD}{node}"] = pod.to_json()
        if notes:
            self._write(fact, {"metadata": {"annotations": notes}})

    def _write_end(self, fact: JobFact, pods: Mapping[int, PodFact], status: RunStatus) -> None:
        notes: dict[str, str | None] = {f"{POD}{node}": None for node in fact.kept}
        change: dict[str, Any] = {
            "metadata": {"annotations": {**notes, FINAL: pack_status(status)}, "labels": {ENDED_LABEL: "true"}}
        }
        left = [pod for pod in pods.values() if not pod.ended]
        if left and not fact.ended_as:
            change["spec"] = {"activeDeadlineSeconds": 1}
        self._write(fact, change)
        for pod in left if not fact.ended_as else ():
            # Its kubelet is not there to let it go: it is to go with its Job, without waiting for that.
            path = path_of("v1", "pods", fact.namespace, pod.name)
            with contextlib.suppress(Refused, BackendUnavailable):
                self._api.delete(path, grace_seconds=0, uid=pod.uid)

    def _write(self, fact: JobFact, change: Object) -> None:
        """Change this very Job; one that is gone, or another by now, is left alone."""
        change = {**change, "metadata": {**change.get("metadata", {}), "uid": fact.uid}}
        try:
            self._api.patch(path_of("batch/v1", "jobs", fact.namespace, fact.name), change)
        except Refused as refused:
            if refused.status not in {404, 409}:
                raise BackendUnavailable(f"The run '{fact.name}' could not be written to: {refused}") from refused


def _is_worth_keeping(pod: PodFact, kept: PodFact | None) -> bool:
    """Whether what a pod says now would be lost with it, and is more than what was kept of it."""
    if pod.node >= _MOST_NOTES or not (pod.disruption or (pod.ended and pod.deleted_at is not None)):
        return False
    return kept is None or kept.uid != pod.uid or (pod.exit_code is not None and kept.exit_code is None)


def _has_failed(pod: Object) -> bool:
    """Whether a pod has failed, or it is said why it goes."""
    fact = read_pod(pod)
    return fact is not None and bool(fact.disruption or (fact.ended and fact.exit_code != 0))


def _may_lose_pods_to_others(job: Object, fact: JobFact) -> bool:
    """Whether nobody who may has asked for the end of the run's pods; `job` is as it was after a pod was told to go."""
    return not (job["metadata"].get("deletionTimestamp") or fact.taken_down or fact.suspended or fact.final)


def owner_of(pod: Object) -> str:
    """The uid of the Job that a pod is of; empty for one that was parted from it."""
    owners = pod["metadata"].get("ownerReferences") or []
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def is_submitted(job: Object) -> bool:
    """Whether the run exists: its submission came to its end."""
    return SUBMITTED in (job["metadata"].get("annotations") or {})
