"""The Job controller of the fake cluster: Indexed Jobs as Kubernetes 1.31 and later runs them.

The one rule: it works from the state of things, never from events, so that it may look at any moment and as often as
it likes. What a real one deletes, it deletes: pods that still ran when a Job failed are gone with their status.
"""

from __future__ import annotations

import contextlib
import copy
import time

from tests.kubernetes.api import Api, add_condition, record_event
from tests.kubernetes.resources import BY_PLURAL, ApiError, Object, now, seconds_of

FINALIZER = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
_ENDED = ("Succeeded", "Failed")
BACKOFF_SECONDS = 0.5
"""After a pod could not be made; a real controller begins with seconds and doubles them."""


class JobController:
    """Reconciles every Job each time it is asked."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._store = api.store
        self._counted: dict[str, set[str]] = {}
        self._not_before: dict[str, float] = {}

    def reconcile(self) -> None:
        """One look at everything."""
        with self._store.changed:
            jobs = self._store.find("jobs")
            for job in jobs:
                self._job(job)
            uids = {job["metadata"]["uid"] for job in jobs}
            for pod in self._store.find("pods"):
                owner = _controller(pod)
                if owner and owner["kind"] == "Job" and owner["uid"] not in uids:
                    self._release(pod)  # nobody counts it any more

    def _job(self, job: Object) -> None:
        meta = job["metadata"]
        pods = [pod for pod in self._store.find("pods", meta["namespace"]) if _is_of(pod, meta["uid"])]
        status = copy.deepcopy(job.get("status") or {})
        draft = {**job, "status": status}
        if meta.get("deletionTimestamp") or _condition(draft, "Complete") or _condition(draft, "Failed"):
            for pod in pods:
                if pod["status"]["phase"] in _ENDED:
                    self._release(pod)
            return
        self._count(draft, pods)
        if not job["spec"]["suspend"] and not status.get("startTime"):
            status["startTime"] = now()
        self._suspension(draft, pods)
        self._advance(draft, pods)
        pods = [pod for pod in self._store.find("pods", meta["namespace"]) if _is_of(pod, meta["uid"])]
        live = [pod for pod in pods if pod["status"]["phase"] not in _ENDED]
        status["active"] = sum(not pod["metadata"].get("deletionTimestamp") for pod in live)
        status["terminating"] = len(live) - status["active"]
        status["ready"] = sum(_is_ready(pod) for pod in live if not pod["metadata"].get("deletionTimestamp"))
        status.setdefault("uncountedTerminatedPods", {})

        def store(found: Object) -> None:
            found["status"] = status

        if status != job.get("status"):
            self._store.edit("jobs", meta["namespace"], meta["name"], store)

    def _advance(self, job: Object, pods: list[Object]) -> None:
        """Fail it, complete it, or make the pods that it lacks."""
        spec, status = job["spec"], job["status"]
        target = _condition(job, "FailureTarget") or self._verdict(job, pods)
        active = [pod for pod in pods if pod["status"]["phase"] not in _ENDED]
        if target:
            for pod in active:
                self._delete(job, pod)
            add_condition(job, "FailureTarget", "True", target["reason"], target["message"])
            for pod in pods:
                self._release(pod)  # those that still run are as good as counted: they go as soon as they have ended
            if not active:
                add_condition(job, "Failed", "True", target["reason"], target["message"])
                record_event(self._api, job, "Warning", target["reason"], target["message"])
        elif len(_indexes(status.get("completedIndexes", ""))) >= spec["completions"]:
            message = "Reached expected number of succeeded pods"
            add_condition(job, "SuccessCriteriaMet", "True", "CompletionsReached", message)
            if not active:
                status["completionTime"] = now()
                add_condition(job, "Complete", "True", "CompletionsReached", message)
                record_event(self._api, job, "Normal", "Completed", "Job completed")
        elif not spec["suspend"]:
            self._fill(job, pods)

    def _count(self, job: Object, pods: list[Object]) -> None:
        """Take ended pods into the Job's numbers; only then may they go."""
        status, meta = job["status"], job["metadata"]
        counted = self._counted.setdefault(meta["uid"], set())
        done, failed = _indexes(status.get("completedIndexes", "")), _indexes(status.get("failedIndexes", ""))
        for pod in pods:
            leaving = bool(pod["metadata"].get("deletionTimestamp")) and not _waits_for_end(job)
            ended = pod["status"]["phase"] in _ENDED or leaving
            if not ended or FINALIZER not in pod["metadata"].get("finalizers", []):
                continue
            if pod["metadata"]["uid"] not in counted:
                counted.add(pod["metadata"]["uid"])
                if pod["status"]["phase"] == "Succeeded":
                    done.add(_index(pod))
                    status["succeeded"] = len(done)
                elif not self._is_ignored(job, pod):
                    status["failed"] = status.get("failed", 0) + 1
                    if "backoffLimitPerIndex" in job["spec"]:
                        failed.add(_index(pod))
            self._release(pod)
        for name, indexes in (("completedIndexes", done), ("failedIndexes", failed)):
            if indexes:
                status[name] = _compressed(indexes)

    def _is_ignored(self, job: Object, pod: Object) -> bool:
        rule = _matching_rule(job, pod)
        return rule is not None and rule["action"] == "Ignore"

    def _verdict(self, job: Object, pods: list[Object]) -> Object | None:
        """Why the Job has failed, or None."""
        spec, status = job["spec"], job["status"]
        for pod in pods:
            rule = _matching_rule(job, pod) if pod["status"]["phase"] == "Failed" else None
            if rule is not None and rule["action"] == "FailJob":
                message = f"Pod {pod['metadata']['namespace']}/{pod['metadata']['name']} matching {rule['action']} rule"
                return {"reason": "PodFailurePolicy", "message": message}
        failed, done = (_indexes(status.get(name, "")) for name in ("failedIndexes", "completedIndexes"))
        if len(failed) > spec.get("maxFailedIndexes", spec["completions"]):
            message = "Job has exceeded the specified maximal number of failed indexes"
            return {"reason": "MaxFailedIndexesExceeded", "message": message}
        if failed and len(failed) + len(done) >= spec["completions"]:
            return {"reason": "FailedIndexes", "message": "Job has failed indexes"}
        if status.get("failed", 0) > spec["backoffLimit"]:
            return {"reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit"}
        limit = spec.get("activeDeadlineSeconds")
        if limit is not None and not spec["suspend"] and time.time() >= seconds_of(status["startTime"]) + limit:
            return {"reason": "DeadlineExceeded", "message": "Job was active longer than specified deadline"}
        return None

    def _suspension(self, job: Object, pods: list[Object]) -> None:
        if job["spec"]["suspend"]:
            for pod in pods:
                if pod["status"]["phase"] not in _ENDED:
                    self._delete(job, pod)
                    self._release(pod)
            if not _condition(job, "Suspended"):
                record_event(self._api, job, "Normal", "Suspended", "Job suspended")
            add_condition(job, "Suspended", "True", "JobSuspended", "Job suspended")
            job["status"].pop("startTime", None)
        elif _condition(job, "Suspended"):
            add_condition(job, "Suspended", "False", "JobResumed", "Job resumed")
            record_event(self._api, job, "Normal", "Resumed", "Job resumed")
            job["status"]["startTime"] = now()

    def _fill(self, job: Object, pods: list[Object]) -> None:
        """Make the pods that are missing."""
        spec, meta = job["spec"], job["metadata"]
        taken = _indexes(job["status"].get("completedIndexes", "")) | _indexes(job["status"].get("failedIndexes", ""))
        for pod in pods:
            ended = pod["status"]["phase"] in _ENDED
            leaving = bool(pod["metadata"].get("deletionTimestamp"))
            if not ended and (_waits_for_end(job) or not leaving):
                taken.add(_index(pod))
        missing = [index for index in range(spec["completions"]) if index not in taken]
        if time.monotonic() < self._not_before.get(meta["uid"], 0):
            return
        for index in missing[: spec["parallelism"]]:
            try:
                made = self._api.create(BY_PLURAL["pods"], meta["namespace"], _pod(job, index))
            except ApiError as error:
                self._not_before[meta["uid"]] = time.monotonic() + BACKOFF_SECONDS
                record_event(self._api, job, "Warning", "FailedCreate", f"Error creating: {error.message}")
                return
            told = f"Created pod: {made['metadata']['name']}"
            record_event(self._api, job, "Normal", "SuccessfulCreate", told)

    def _delete(self, job: Object, pod: Object) -> None:
        """Tell a pod to go, and say so; one that goes already is not told again."""
        meta = pod["metadata"]
        if not meta.get("deletionTimestamp"):
            with contextlib.suppress(ApiError):
                self._store.delete("pods", meta["namespace"], meta["name"])
                record_event(self._api, job, "Normal", "SuccessfulDelete", f"Deleted pod: {meta['name']}")

    def _release(self, pod: Object) -> None:
        meta = pod["metadata"]
        if FINALIZER in meta.get("finalizers", []):
            self._store.remove_finalizer("pods", meta["namespace"], meta["name"], FINALIZER)


def _pod(job: Object, index: int) -> Object:
    meta, template = job["metadata"], job["spec"]["template"]
    told = template.get("metadata") or {}
    spec = copy.deepcopy(template["spec"])
    spec.setdefault("hostname", f"{meta['name']}-{index}")
    path = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}
    for container in spec["containers"]:
        container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": path})
    return {
        "metadata": {
            "generateName": f"{meta['name']}-{index}-",
            "namespace": meta["namespace"],
            "labels": {**(told.get("labels") or {}), INDEX: str(index)},
            "annotations": {**(told.get("annotations") or {}), INDEX: str(index)},
            "finalizers": [FINALIZER],
            "ownerReferences": [
                {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"],
                 "controller": True, "blockOwnerDeletion": True},
            ],
        },
        "spec": spec,
    }  # fmt: skip


def _matching_rule(job: Object, pod: Object) -> Object | None:
    """The first rule of the Job's podFailurePolicy that speaks of this pod's end."""
    for rule in (job["spec"].get("podFailurePolicy") or {}).get("rules", []):
        codes = rule.get("onExitCodes")
        if codes:
            for status in pod["status"].get("containerStatuses", []):
                ended = status["state"].get("terminated")
                wanted = codes.get("containerName") in {None, status["name"]}
                told = bool(ended and wanted and ended["exitCode"])
                if told and (ended["exitCode"] in codes["values"]) == (codes["operator"] == "In"):
                    return dict(rule)
        for condition in rule.get("onPodConditions") or []:
            for have in pod["status"].get("conditions", []):
                if have["type"] == condition["type"] and have["status"] == condition["status"]:
                    return dict(rule)
    return None


def _waits_for_end(job: Object) -> bool:
    """Whether a pod that is leaving is replaced, and counted, only when it has ended: never where its node is dead."""
    return bool(job["spec"]["podReplacementPolicy"] == "Failed")


def _condition(found: Object, kind: str) -> Object | None:
    for condition in (found.get("status") or {}).get("conditions", []):
        if condition["type"] == kind and condition["status"] == "True":
            return dict(condition)
    return None


def _controller(pod: Object) -> Object | None:
    return next((owner for owner in pod["metadata"].get("ownerReferences", []) if owner.get("controller")), None)


def _is_of(pod: Object, uid: str) -> bool:
    owner = _controller(pod)
    return owner is not None and owner["uid"] == uid


def _is_ready(pod: Object) -> bool:
    return _condition(pod, "Ready") is not None


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _indexes(text: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _compressed(indexes: set[int]) -> str:
    """`{0, 1, 2, 5}` as "0-2,5"."""
    parts: list[list[int]] = []
    for index in sorted(indexes):
        if parts and parts[-1][-1] == index - 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
