"""The Job controller of the fake cluster: Indexed Jobs whose Pods are replaced only once they have ended.

It works from the present state, so it may run at any moment.
"""

from __future__ import annotations

import contextlib
import copy
import time

from tests.kubernetes.api import ENDED, Api, record_event, set_condition
from tests.kubernetes.resources import BY_PLURAL, ApiError, Object, now, seconds_of

FINALIZER = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
BACKOFF_SECONDS = 0.5
"""The pause after a Pod could not be created. A real controller begins with seconds and doubles them."""


class JobController:
    """Reconciles every Job each time it is called."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._store = api.store
        self._counted: set[str] = set()  # UIDs of the ended Pods that are counted
        self._not_before: dict[str, float] = {}  # by the Job's UID: when it may create Pods again (monotonic)

    def reconcile(self) -> None:
        """Reconcile once."""
        with self._store.changed:
            jobs = self._store.find("jobs")
            for job in jobs:
                self._reconcile_job(job)
            uids = {job["metadata"]["uid"] for job in jobs}
            for pod in self._store.find("pods", "", lambda one: _owner(one) not in {"", *uids}):
                self._release(pod)  # its Job is deleted

    def _pods_of(self, job: Object) -> list[Object]:
        meta = job["metadata"]
        return self._store.find("pods", meta["namespace"], lambda one: _owner(one) == meta["uid"])

    def _reconcile_job(self, job: Object) -> None:
        meta, status = job["metadata"], copy.deepcopy(job.get("status") or {})
        draft = {**job, "status": status}
        pods = self._pods_of(job)
        if meta.get("deletionTimestamp") or condition_of(draft, "Complete") or condition_of(draft, "Failed"):
            for pod in pods:
                if pod["status"]["phase"] in ENDED:
                    self._release(pod)
            return
        self._count(draft, pods)
        if not job["spec"]["suspend"] and not status.get("startTime"):
            status["startTime"] = now()
        self._suspend_or_resume(draft, pods)
        self._advance(draft, pods)
        live = [pod for pod in self._pods_of(job) if pod["status"]["phase"] not in ENDED]
        active = [pod for pod in live if not pod["metadata"].get("deletionTimestamp")]
        status["active"], status["terminating"] = len(active), len(live) - len(active)
        status["ready"] = sum(condition_of(pod, "Ready") is not None for pod in active)
        status.setdefault("uncountedTerminatedPods", {})
        self._store.edit("jobs", meta["namespace"], meta["name"], lambda obj: obj.update(status=status))

    def _advance(self, job: Object, pods: list[Object]) -> None:
        """Fail the Job, complete it, or create the Pods that it lacks."""
        spec, status = job["spec"], job["status"]
        failure = condition_of(job, "FailureTarget") or self._failure(job, pods)
        active = [pod for pod in pods if pod["status"]["phase"] not in ENDED]
        if failure:
            for pod in active:
                self._delete(job, pod)
            set_condition(job, "FailureTarget", "True", failure["reason"], failure["message"])
            for pod in pods:
                self._release(pod)  # a Pod that still runs too: it is then removed as soon as it has ended
            if not active:
                set_condition(job, "Failed", "True", failure["reason"], failure["message"])
                record_event(self._api, job, "Warning", failure["reason"], failure["message"])
        elif len(_indexes(status.get("completedIndexes", ""))) >= spec["completions"]:
            message = "Reached expected number of succeeded pods"
            set_condition(job, "SuccessCriteriaMet", "True", "CompletionsReached", message)
            if not active:
                status["completionTime"] = now()
                set_condition(job, "Complete", "True", "CompletionsReached", message)
                record_event(self._api, job, "Normal", "Completed", "Job completed")
        elif not spec["suspend"]:
            self._create_missing(job, pods)

    def _count(self, job: Object, pods: list[Object]) -> None:
        """Count ended Pods in the Job's status; only then may they be removed."""
        status = job["status"]
        done, failed = _indexes(status.get("completedIndexes", "")), _indexes(status.get("failedIndexes", ""))
        for pod in pods:
            uid = pod["metadata"]["uid"]
            if pod["status"]["phase"] not in ENDED or FINALIZER not in pod["metadata"].get("finalizers", []):
                continue
            if uid not in self._counted:
                self._counted.add(uid)
                if pod["status"]["phase"] == "Succeeded":
                    done.add(_index(pod))
                    status["succeeded"] = len(done)
                else:
                    status["failed"] = status.get("failed", 0) + 1
                    if "backoffLimitPerIndex" in job["spec"]:
                        failed.add(_index(pod))
            self._release(pod)
        for name, indexes in (("completedIndexes", done), ("failedIndexes", failed)):
            if indexes:
                status[name] = ",".join(map(str, sorted(indexes)))

    def _failure(self, job: Object, pods: list[Object]) -> Object | None:
        """Return why the Job has failed, or None."""
        spec, status = job["spec"], job["status"]
        for pod in pods:
            if pod["status"]["phase"] == "Failed" and _matches_failure_policy(job, pod):
                message = f"Pod {pod['metadata']['namespace']}/{pod['metadata']['name']} matching FailJob rule"
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

    def _suspend_or_resume(self, job: Object, pods: list[Object]) -> None:
        if job["spec"]["suspend"]:
            for pod in pods:
                if pod["status"]["phase"] not in ENDED:
                    self._delete(job, pod)
                    self._release(pod)
            if not condition_of(job, "Suspended"):
                record_event(self._api, job, "Normal", "Suspended", "Job suspended")
            set_condition(job, "Suspended", "True", "JobSuspended", "Job suspended")
            job["status"].pop("startTime", None)
        elif condition_of(job, "Suspended"):
            set_condition(job, "Suspended", "False", "JobResumed", "Job resumed")
            record_event(self._api, job, "Normal", "Resumed", "Job resumed")
            job["status"]["startTime"] = now()

    def _create_missing(self, job: Object, pods: list[Object]) -> None:
        spec, status, meta = job["spec"], job["status"], job["metadata"]
        taken = _indexes(status.get("completedIndexes", "")) | _indexes(status.get("failedIndexes", ""))
        taken |= {_index(pod) for pod in pods if pod["status"]["phase"] not in ENDED}
        missing = [index for index in range(spec["completions"]) if index not in taken]
        if time.monotonic() < self._not_before.get(meta["uid"], 0):
            return
        for index in missing[: spec["parallelism"]]:
            try:
                new = self._api.create(BY_PLURAL["pods"], meta["namespace"], _pod(job, index))
            except ApiError as error:
                self._not_before[meta["uid"]] = time.monotonic() + BACKOFF_SECONDS
                record_event(self._api, job, "Warning", "FailedCreate", f"Error creating: {error.message}")
                return
            message = f"Created pod: {new['metadata']['name']}"
            record_event(self._api, job, "Normal", "SuccessfulCreate", message)

    def _delete(self, job: Object, pod: Object) -> None:
        """Delete a Pod and record it, unless it is terminating already."""
        meta = pod["metadata"]
        if not meta.get("deletionTimestamp"):
            with contextlib.suppress(ApiError):
                self._store.delete("pods", meta["namespace"], meta["name"])
                record_event(self._api, job, "Normal", "SuccessfulDelete", f"Deleted pod: {meta['name']}")

    def _release(self, pod: Object) -> None:
        """Remove the controller's finalizer, without which the Pod's object can be deleted."""
        meta = pod["metadata"]
        if FINALIZER in meta.get("finalizers", []):
            self._store.remove_finalizer("pods", meta["namespace"], meta["name"], FINALIZER)


def _pod(job: Object, index: int) -> Object:
    meta, template = job["metadata"], job["spec"]["template"]
    given = template.get("metadata") or {}
    spec = copy.deepcopy(template["spec"])
    spec.setdefault("hostname", f"{meta['name']}-{index}")
    path = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}
    for container in spec["containers"]:
        container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": path})
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    return {
        "metadata": {
            "generateName": f"{meta['name']}-{index}-",
            "namespace": meta["namespace"],
            "labels": {**(given.get("labels") or {}), INDEX: str(index)},
            "annotations": {**(given.get("annotations") or {}), INDEX: str(index)},
            "finalizers": [FINALIZER],
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": spec,
    }


def _matches_failure_policy(job: Object, pod: Object) -> bool:
    """Whether a rule of the Job's podFailurePolicy, which all fail the Job, matches a Pod's conditions."""
    return any(
        (condition_of(pod, condition["type"]) or {}).get("status") == condition["status"]
        for rule in (job["spec"].get("podFailurePolicy") or {}).get("rules", [])
        for condition in rule["onPodConditions"]
    )


def condition_of(obj: Object, kind: str) -> Object | None:
    """Return an object's condition of this type if it is true."""
    conditions = (obj.get("status") or {}).get("conditions", [])
    return next((one for one in conditions if (one["type"], one["status"]) == (kind, "True")), None)


def _owner(pod: Object) -> str:
    """Return the UID of the Job that controls a Pod, or an empty string."""
    owners = pod["metadata"].get("ownerReferences", [])
    return next((one["uid"] for one in owners if one.get("controller") and one["kind"] == "Job"), "")


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _indexes(text: str) -> set[int]:
    return set(map(int, filter(None, text.split(","))))
