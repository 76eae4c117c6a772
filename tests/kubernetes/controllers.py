"""What else runs in a cluster: the scheduler, the garbage collector, the watch over nodes, the end of namespaces.

The one rule: each looks at the whole state and does the next thing, so that they meet in any order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field

from tests.kubernetes.api import Api, add_condition, record_event
from tests.kubernetes.jobs import JobController
from tests.kubernetes.resources import BY_PLURAL, ApiError, Object, quantity

UNREACHABLE = "node.kubernetes.io/unreachable"
NOT_READY = "node.kubernetes.io/not-ready"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_TICK_SECONDS = 0.05
_ENDED = ("Succeeded", "Failed")
_CLUSTER_SCOPED = {"namespaces", "nodes", "persistentvolumes", "storageclasses", "clusterroles", "clusterrolebindings",
                   "priorityclasses", "clusterqueues"}  # fmt: skip


@dataclass
class Pace:
    """How long things take here that take much longer in a real cluster."""

    node_grace_seconds: float = 1.0
    """Without a heartbeat, a node is NotReady (40 to 50 s)."""
    toleration_scale: float = 0.02
    """A pod's tolerationSeconds count so much."""
    schedule_retry_seconds: float = 0.5
    account_seconds: float = 0.2
    """A namespace has its default service account so long after it was made."""
    collect_seconds: float = 0.5
    """What belonged to a deleted object is still there for so long, its ended pods too."""


@dataclass
class Controllers:
    """A thread that reconciles until `stop`."""

    api: Api
    pace: Pace = field(default_factory=Pace)
    heartbeats: dict[str, float] = field(default_factory=dict)
    """When each node's kubelet was last heard of, by the monotonic clock; infinite for one that lives, so that no node
    passes for a crashed one because the tests' machine is slow."""

    def __post_init__(self) -> None:
        self._store = self.api.store
        self._jobs = JobController(self.api)
        self._ending = threading.Event()
        self._retry_at: dict[str, float] = {}
        self.paused = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Raises what went wrong in it."""
        self._ending.set()
        with self._store.changed:
            self._store.changed.notify_all()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        seen = -1
        try:
            while not self._ending.is_set():
                with self._store.changed:
                    if seen == self._store.version:
                        self._store.changed.wait(_TICK_SECONDS)
                    seen = self._store.version
                if not self.paused.is_set():
                    self.reconcile()
        except BaseException as error:
            self.failure = error
            raise

    def reconcile(self) -> None:
        """One look by everybody."""
        self._jobs.reconcile()
        self._schedule()
        self._watch_nodes()
        self._sweep_pods()
        self._collect()
        self._end_namespaces()
        self._give_accounts()

    # The scheduler

    def _schedule(self) -> None:
        with self._store.changed:
            waiting = [
                pod
                for pod in self._store.find("pods")
                if not pod["spec"].get("nodeName") and not pod["metadata"].get("deletionTimestamp")
                and pod["status"]["phase"] == "Pending"
            ]  # fmt: skip
            for pod in sorted(waiting, key=lambda pod: -pod["spec"].get("priority", 0)):
                uid = pod["metadata"]["uid"]
                if time.monotonic() >= self._retry_at.get(uid, 0):
                    self._place(pod)

    def _place(self, pod: Object) -> None:
        meta = pod["metadata"]
        nodes = self._store.find("nodes")
        reasons: dict[str, int] = {}
        good = []
        gates = pod["spec"].get("schedulingGates")
        claim = self._unbound_claim(pod)
        for node in nodes:
            why = self._why_not(pod, node)
            if why:
                reasons[why] = reasons.get(why, 0) + 1
            else:
                good.append(node)
        if gates or claim or not good:
            self._retry_at[meta["uid"]] = time.monotonic() + self.pace.schedule_retry_seconds
            told = f"0/{len(nodes)} nodes are available: "
            told += claim or ", ".join(f"{count} {why}" for why, count in sorted(reasons.items()))
            told += f". preemption: 0/{len(nodes)} nodes are available: {len(nodes)} No preemption victims found."
            reason = "SchedulingGated" if gates else "Unschedulable"

            def refuse(found: Object) -> None:
                add_condition(found, "PodScheduled", "False", reason, told)

            self._store.edit("pods", meta["namespace"], meta["name"], refuse)
            if not gates:
                record_event(self.api, pod, "Warning", "FailedScheduling", told)
            return
        chosen = min(good, key=lambda node: (-self._free(node)["cpu"], node["metadata"]["name"]))

        def bind(found: Object) -> None:
            found["spec"]["nodeName"] = chosen["metadata"]["name"]
            add_condition(found, "PodScheduled", "True", "")

        self._store.edit("pods", meta["namespace"], meta["name"], bind)
        record_event(self.api, pod, "Normal", "Scheduled", f"Successfully assigned to {chosen['metadata']['name']}")

    def _unbound_claim(self, pod: Object) -> str:
        for volume in pod["spec"].get("volumes") or []:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if not claim:
                continue
            try:
                found = self._store.get("persistentvolumeclaims", pod["metadata"]["namespace"], claim)
            except ApiError:
                return f'persistentvolumeclaim "{claim}" not found'
            if found.get("status", {}).get("phase") != "Bound":
                return "pod has unbound immediate PersistentVolumeClaims"
        return ""

    def _why_not(self, pod: Object, node: Object) -> str:
        """Why the node does not take the pod, in the scheduler's words; empty where it does."""
        spec = node["spec"]
        if spec.get("unschedulable"):
            return "node(s) were unschedulable"
        for taint in spec.get("taints") or []:
            hard = taint["effect"] in {"NoSchedule", "NoExecute"}
            if hard and _toleration(pod, taint) is None:
                return f"node(s) had untolerated taint(s) {{{taint['key']}: {taint.get('value', '')}}}"
        labels = node["metadata"].get("labels", {})
        selector = pod["spec"].get("nodeSelector") or {}
        if not selector.items() <= labels.items() or not _affine(pod, labels, node["metadata"]["name"]):
            return "node(s) didn't match Pod's node affinity/selector"
        free = self._free(node)
        for name, wanted in _requests(pod).items():
            if wanted > free.get(name, 0):
                return f"Insufficient {name}"
        return "" if free["pods"] >= 1 else "Too many pods"

    def _free(self, node: Object) -> dict[str, float]:
        free = {name: quantity(value) for name, value in node["status"]["allocatable"].items()}
        name = node["metadata"]["name"]
        for pod in self._store.find("pods", "", lambda one: one["spec"].get("nodeName") == name):
            if pod["status"]["phase"] not in _ENDED:
                free["pods"] -= 1
                for what, value in _requests(pod).items():
                    free[what] = free.get(what, 0) - value
        return free

    # Nodes that are not heard of any more

    def _watch_nodes(self) -> None:
        for node in self._store.find("nodes"):
            name = node["metadata"]["name"]
            silent = time.monotonic() - self.heartbeats.get(name, 0) > self.pace.node_grace_seconds
            taints = [
                taint for taint in node["spec"].get("taints") or [] if taint["key"] not in {UNREACHABLE, NOT_READY}
            ]
            if silent:
                taints += [{"key": UNREACHABLE, "effect": effect} for effect in ("NoSchedule", "NoExecute")]
            status = "Unknown" if silent else "True"
            told = (
                ("NodeStatusUnknown", "Kubelet stopped posting node status.") if silent else ("KubeletReady", "ready")
            )

            def mark(
                found: Object, taints: list[Object] = taints, status: str = status, told: tuple[str, str] = told
            ) -> None:
                found["spec"]["taints"] = taints
                add_condition(found, "Ready", status, *told)

            if taints != (node["spec"].get("taints") or []) or _status_of(node, "Ready") != status:
                self._store.edit("nodes", "", name, mark)
            for pod in self._store.find("pods", "", lambda one, name=name: one["spec"].get("nodeName") == name):  # type: ignore[misc]
                self._mind_taints(pod, taints, silent=silent)

    def _mind_taints(self, pod: Object, taints: list[Object], *, silent: bool) -> None:
        meta = pod["metadata"]
        if pod["status"]["phase"] in _ENDED:
            return
        if silent and _status_of(pod, "Ready") == "True":
            self._store.edit(
                "pods", meta["namespace"], meta["name"],
                lambda found: add_condition(found, "Ready", "False", "NodeNotReady"),
            )  # fmt: skip
            record_event(self.api, pod, "Warning", "NodeNotReady", "Node is not ready")
        for taint in taints:
            if taint["effect"] != "NoExecute":
                continue
            tolerated = _toleration(pod, taint)
            if tolerated is None and taint["key"] == UNREACHABLE:
                tolerated = {"tolerationSeconds": 300}  # what the admission plugin DefaultTolerationSeconds adds
            patience = 0.0 if tolerated is None else tolerated.get("tolerationSeconds")
            if patience is None:
                continue
            key = f"{meta['uid']} {taint['key']}"
            since = self._retry_at.setdefault(key, time.monotonic())
            if time.monotonic() - since >= patience * self.pace.toleration_scale and not meta.get("deletionTimestamp"):
                disrupt(self.api, pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")

    def _sweep_pods(self) -> None:
        """Pods that no kubelet will ever speak of again: never placed, or their machine is known to be gone."""
        nodes = {node["metadata"]["name"]: node for node in self._store.find("nodes")}
        for pod in self._store.find("pods"):
            meta, where = pod["metadata"], pod["spec"].get("nodeName")
            if pod["status"]["phase"] in _ENDED:
                continue
            gone = where not in nodes or any(
                taint["key"] == OUT_OF_SERVICE for taint in nodes[where]["spec"].get("taints", [])
            )
            if meta.get("deletionTimestamp") and not where:
                self._store.edit(
                    "pods", meta["namespace"], meta["name"], lambda found: found["status"].update(phase="Failed")
                )
            elif where and gone:
                self._store.edit(
                    "pods", meta["namespace"], meta["name"], lambda found: found["status"].update(phase="Failed")
                )
                disrupt(self.api, pod, "DeletionByPodGC", "PodGC: node no longer exists", grace=0)

    # What belongs to what has gone

    def _collect(self) -> None:
        with self._store.changed:
            uids = {found["metadata"]["uid"] for _key, found in self._store.items()}
            for (plural, namespace, name), found in self._store.items():
                meta = found["metadata"]
                owners = meta.get("ownerReferences") or []
                if owners and not any(owner["uid"] in uids for owner in owners) and not meta.get("deletionTimestamp"):
                    since = self._retry_at.setdefault(f"{meta['uid']} collected", time.monotonic())
                    if time.monotonic() < since + self.pace.collect_seconds:
                        continue
                    with contextlib.suppress(ApiError):
                        self._store.delete(plural, namespace, name, {"propagationPolicy": "Background"})
                if not meta.get("deletionTimestamp"):
                    continue
                if "orphan" in meta.get("finalizers", []):
                    self._orphan(meta["uid"])
                    self._store.remove_finalizer(plural, namespace, name, "orphan")
                if "foregroundDeletion" in meta.get("finalizers", []):
                    owned = self._store.owned_by(meta["uid"])
                    for key, one in owned:
                        if not one["metadata"].get("deletionTimestamp"):
                            self._store.delete(*key, {"propagationPolicy": "Background"})
                    if not owned:
                        self._store.remove_finalizer(plural, namespace, name, "foregroundDeletion")

    def _orphan(self, uid: str) -> None:
        for (plural, namespace, name), _found in self._store.owned_by(uid):

            def disown(found: Object) -> None:
                meta = found["metadata"]
                meta["ownerReferences"] = [owner for owner in meta["ownerReferences"] if owner["uid"] != uid]

            self._store.edit(plural, namespace, name, disown)

    def _give_accounts(self) -> None:
        """A new namespace has its account a moment later; until then it takes no pods."""
        for namespace in self._store.find("namespaces"):
            name, meta = namespace["metadata"]["name"], namespace["metadata"]
            since = self._retry_at.setdefault(f"{meta['uid']} made", time.monotonic())
            if meta.get("deletionTimestamp") or time.monotonic() < since + self.pace.account_seconds:
                continue
            with contextlib.suppress(ApiError):
                self.api.create(BY_PLURAL["serviceaccounts"], name, {"metadata": {"name": "default"}})

    def _end_namespaces(self) -> None:
        for namespace in self._store.find("namespaces", "", lambda one: bool(one["metadata"].get("deletionTimestamp"))):
            name = namespace["metadata"]["name"]
            inside = [key for key, _found in self._store.items() if key[1] == name and key[0] not in _CLUSTER_SCOPED]
            for plural, where, what in inside:
                with contextlib.suppress(ApiError):
                    found = self._store.get(plural, where, what)
                    if not found["metadata"].get("deletionTimestamp"):
                        self._store.delete(plural, where, what, {"propagationPolicy": "Background"})
            if not inside:
                self._store.remove_finalizer("namespaces", "", name, "kubernetes")


def disrupt(api: Api, pod: Object, reason: str, message: str, *, grace: int | None = None) -> None:
    """End a pod for the cluster's own reasons: drained, preempted, its node lost."""
    meta = pod["metadata"]
    api.store.edit(
        "pods", meta["namespace"], meta["name"],
        lambda found: add_condition(found, "DisruptionTarget", "True", reason, message),
    )  # fmt: skip
    with contextlib.suppress(ApiError):
        options: Object = {} if grace is None else {"gracePeriodSeconds": grace}
        api.store.delete("pods", meta["namespace"], meta["name"], options)


def make_node(api: Api, name: str, labels: dict[str, str], offers: dict[str, str]) -> None:
    """A node joins the cluster."""
    allocatable = {"pods": "110", "ephemeral-storage": "100Gi", **offers}
    made = api.create(BY_PLURAL["nodes"], "", {"metadata": {"name": name, "labels": labels}, "spec": {}})

    def offer(found: Object) -> None:
        found["status"] = {"capacity": allocatable, "allocatable": allocatable}
        add_condition(found, "Ready", "True", "KubeletReady", "ready")

    api.store.edit("nodes", "", made["metadata"]["name"], offer)


def _requests(pod: Object) -> dict[str, float]:
    total: dict[str, float] = {}
    for container in pod["spec"]["containers"]:
        for name, value in (container["resources"].get("requests") or {}).items():
            total[name] = total.get(name, 0) + quantity(value)
    for container in pod["spec"].get("initContainers") or []:
        for name, value in (container["resources"].get("requests") or {}).items():
            total[name] = max(total.get(name, 0), quantity(value))
    return total


def _toleration(pod: Object, taint: Object) -> Object | None:
    for one in pod["spec"].get("tolerations") or []:
        key = not one.get("key") or one["key"] == taint["key"]
        effect = not one.get("effect") or one["effect"] == taint["effect"]
        value = one.get("operator", "Equal") == "Exists" or one.get("value", "") == taint.get("value", "")
        if key and effect and value:
            return dict(one)
    return None


def _affine(pod: Object, labels: dict[str, str], name: str) -> bool:
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    return any(
        all(_expression(one, labels) for one in term.get("matchExpressions", []))
        and all(_expression(one, {"metadata.name": name}) for one in term.get("matchFields", []))
        for term in required["nodeSelectorTerms"]
    )


def _expression(one: Object, labels: dict[str, str]) -> bool:
    match one["operator"]:
        case "In":
            return labels.get(one["key"]) in one["values"]
        case "NotIn":
            return labels.get(one["key"]) not in one["values"]
        case "Exists":
            return one["key"] in labels
        case "DoesNotExist":
            return one["key"] not in labels
        case other:
            raise NotImplementedError(other)


def _status_of(found: Object, kind: str) -> str:
    conditions = found.get("status", {}).get("conditions", [])
    return next((one["status"] for one in conditions if one["type"] == kind), "")
