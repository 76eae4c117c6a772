"""The fake cluster's controllers besides Jobs: scheduler, garbage collector, node, namespace and account controllers.

Each one reads the whole state and does the next step, so their order does not matter.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field

from tests.kubernetes.api import ENDED, Api, record_event, set_condition
from tests.kubernetes.jobs import JobController, condition_of
from tests.kubernetes.resources import BY_PLURAL, ApiError, Object, quantity
from tests.kubernetes.volumes import volume_of

UNREACHABLE = "node.kubernetes.io/unreachable"
_TICK_SECONDS = 0.05


@dataclass
class Pace:
    """How long steps take that take much longer in a real cluster."""

    node_grace_seconds: float = 1.0
    """The age of a heartbeat at which a node becomes NotReady (40 to 50 s in a real cluster)."""
    toleration_scale: float = 0.02
    """The factor for a Pod's tolerationSeconds."""
    schedule_retry_seconds: float = 0.5
    account_seconds: float = 0.2
    """The age at which a namespace gets its default service account."""
    collect_seconds: float = 0.5
    """How long the dependents of a deleted object, also ended Pods, outlive it."""


@dataclass
class Controllers:
    """All controllers, in one thread that reconciles until `stop`."""

    api: Api
    pace: Pace = field(default_factory=Pace)
    heartbeats: dict[str, float] = field(default_factory=dict)
    """The last heartbeat of each node (monotonic). Infinite for a kubelet that lives, so that none is lost only because
    the machine is slow."""

    def __post_init__(self) -> None:
        self._store = self.api.store
        self._jobs = JobController(self.api)
        self._closing = threading.Event()
        # By the key of `_has_waited`: when that was first called. By a Pod's UID: when placing the Pod last failed.
        self._since: dict[str, float] = {}
        self.paused = threading.Event()  # while a test has set it, nothing is reconciled
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Raises what it raised."""
        self._closing.set()
        with self._store.changed:
            self._store.changed.notify_all()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        seen = -1
        try:
            while not self._closing.is_set():
                with self._store.changed:
                    if seen == self._store.version:
                        self._store.changed.wait(_TICK_SECONDS)
                    seen = self._store.version
                if not self.paused.is_set():
                    self._reconcile()
        except BaseException as error:
            self.failure = error
            raise

    def _reconcile(self) -> None:
        self._jobs.reconcile()
        self._schedule()
        self._check_nodes()
        self._fail_unreachable_pods()
        self._collect_garbage()
        self._finish_namespaces()
        self._create_accounts()

    def _has_waited(self, key: str, seconds: float) -> bool:
        """Whether this was first called with the key at least `seconds` ago."""
        return time.monotonic() - self._since.setdefault(key, time.monotonic()) >= seconds

    # Scheduler

    def _schedule(self) -> None:
        def is_waiting(pod: Object) -> bool:
            is_new = not pod["spec"].get("nodeName") and not pod["metadata"].get("deletionTimestamp")
            return bool(is_new and pod["status"]["phase"] == "Pending")

        with self._store.changed:
            for pod in self._store.find("pods", "", is_waiting):
                uid = pod["metadata"]["uid"]
                if uid not in self._since or self._has_waited(uid, self.pace.schedule_retry_seconds):
                    self._since.pop(uid, None)
                    self._place(pod)

    def _place(self, pod: Object) -> None:
        meta = pod["metadata"]
        nodes = self._store.find("nodes")
        problem = self._unbound_claim(pod)
        reasons = {} if problem else {node["metadata"]["name"]: self._why_not(pod, node) for node in nodes}
        fitting = [node for node in nodes if reasons.get(node["metadata"]["name"]) == ""]
        if not fitting:
            self._since[meta["uid"]] = time.monotonic()
            counts = [f"{list(reasons.values()).count(why)} {why}" for why in sorted(set(reasons.values()))]
            message = f"0/{len(nodes)} nodes are available: {problem or ', '.join(counts)}. "
            message += f"preemption: 0/{len(nodes)} nodes are available: {len(nodes)} No preemption victims found."
            condition = ("PodScheduled", "False", "Unschedulable", message)
            self._store.edit("pods", meta["namespace"], meta["name"], lambda obj: set_condition(obj, *condition))
            record_event(self.api, pod, "Warning", "FailedScheduling", message)
            return
        chosen = min(fitting, key=lambda node: (-self._free(node)["cpu"], node["metadata"]["name"]))

        def bind(obj: Object) -> None:
            obj["spec"]["nodeName"] = chosen["metadata"]["name"]
            set_condition(obj, "PodScheduled", "True", "")

        self._store.edit("pods", meta["namespace"], meta["name"], bind)
        record_event(self.api, pod, "Normal", "Scheduled", f"Successfully assigned to {chosen['metadata']['name']}")

    def _unbound_claim(self, pod: Object) -> str:
        for claim in _claims(pod):
            claims = self._store.find(
                "persistentvolumeclaims", pod["metadata"]["namespace"],
                lambda one, claim=claim: one["metadata"]["name"] == claim,
            )  # fmt: skip
            if not claims:
                return f'persistentvolumeclaim "{claim}" not found'
            if claims[0].get("status", {}).get("phase") != "Bound":
                return "pod has unbound immediate PersistentVolumeClaims"
        return ""

    def _why_not(self, pod: Object, node: Object) -> str:
        """Return why a node does not fit a Pod, in the scheduler's words, or an empty string."""
        if node["spec"].get("unschedulable"):
            return "node(s) were unschedulable"
        for taint in node["spec"].get("taints") or []:
            if taint["effect"] in {"NoSchedule", "NoExecute"} and _toleration(pod, taint) is None:
                return f"node(s) had untolerated taint(s) {{{taint['key']}: {taint.get('value', '')}}}"
        # With the name, so that `_matches` can treat `matchFields` like labels.
        labels = {**node["metadata"].get("labels", {}), "metadata.name": node["metadata"]["name"]}
        affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
        if not (pod["spec"].get("nodeSelector") or {}).items() <= labels.items() or not _matches(required, labels):
            return "node(s) didn't match Pod's node affinity/selector"
        volumes = [volume_of(self._store, pod["metadata"]["namespace"], claim) for claim in _claims(pod)]
        if not all(_matches((one["spec"].get("nodeAffinity") or {}).get("required"), labels) for one in volumes):
            return "node(s) didn't match PersistentVolume's node affinity"
        free = self._free(node)
        for name, wanted in _requests(pod).items():
            if wanted > free.get(name, 0):
                return f"Insufficient {name}"
        return "" if free["pods"] >= 1 else "Too many pods"

    def _free(self, node: Object) -> dict[str, float]:
        free = {name: quantity(value) for name, value in node["status"]["allocatable"].items()}
        for pod in self._pods_on(node["metadata"]["name"]):
            if pod["status"]["phase"] not in ENDED:
                free["pods"] -= 1
                for what, value in _requests(pod).items():
                    free[what] = free.get(what, 0) - value
        return free

    def _pods_on(self, node: str) -> list[Object]:
        return self._store.find("pods", "", lambda one: one["spec"].get("nodeName") == node)

    # Nodes without heartbeats

    def _check_nodes(self) -> None:
        for node in self._store.find("nodes"):
            name = node["metadata"]["name"]
            is_lost = time.monotonic() - self.heartbeats.get(name, 0) > self.pace.node_grace_seconds
            taints = [taint for taint in node["spec"].get("taints") or [] if taint["key"] != UNREACHABLE]
            if is_lost:
                taints += [{"key": UNREACHABLE, "effect": effect} for effect in ("NoSchedule", "NoExecute")]
            status = ("Unknown", "NodeStatusUnknown") if is_lost else ("True", "KubeletReady")

            def mark(obj: Object, taints: list[Object] = taints, status: tuple[str, str] = status) -> None:
                obj["spec"]["taints"] = taints
                set_condition(obj, "Ready", *status)

            self._store.edit("nodes", "", name, mark)
            for pod in self._pods_on(name):
                if pod["status"]["phase"] not in ENDED:
                    self._apply_taints(pod, taints, is_lost=is_lost)

    def _apply_taints(self, pod: Object, taints: list[Object], *, is_lost: bool) -> None:
        meta = pod["metadata"]
        if is_lost and condition_of(pod, "Ready"):
            condition = ("Ready", "False", "NodeNotReady")
            self._store.edit("pods", meta["namespace"], meta["name"], lambda obj: set_condition(obj, *condition))
            record_event(self.api, pod, "Warning", "NodeNotReady", "Node is not ready")
        for taint in taints:
            if taint["effect"] != "NoExecute":
                continue
            tolerated = _toleration(pod, taint)
            if tolerated is None and taint["key"] == UNREACHABLE:
                tolerated = {"tolerationSeconds": 300}  # which the admission plugin DefaultTolerationSeconds adds
            seconds = 0.0 if tolerated is None else tolerated.get("tolerationSeconds")
            if seconds is None or meta.get("deletionTimestamp"):
                continue
            if self._has_waited(f"{meta['uid']} {taint['key']}", seconds * self.pace.toleration_scale):
                message = "Taint manager: deleting due to NoExecute taint"
                self._disrupt(pod, "DeletionByTaintManager", message)

    def _fail_unreachable_pods(self) -> None:
        """Fail the Pods that no kubelet will report: deleted before they were placed, or on a deleted node."""
        nodes = {node["metadata"]["name"] for node in self._store.find("nodes")}
        for pod in self._store.find("pods", "", lambda one: one["status"]["phase"] not in ENDED):
            meta, node = pod["metadata"], pod["spec"].get("nodeName")
            if node in nodes or (not node and not meta.get("deletionTimestamp")):
                continue
            self._store.edit("pods", meta["namespace"], meta["name"], lambda obj: obj["status"].update(phase="Failed"))
            if node:
                self._disrupt(pod, "DeletionByPodGC", "PodGC: node no longer exists", grace=0)

    def _disrupt(self, pod: Object, reason: str, message: str, *, grace: int | None = None) -> None:
        """Delete a Pod for a reason of the cluster."""
        meta = pod["metadata"]
        condition = ("DisruptionTarget", "True", reason, message)
        self._store.edit("pods", meta["namespace"], meta["name"], lambda obj: set_condition(obj, *condition))
        with contextlib.suppress(ApiError):
            self._store.delete("pods", meta["namespace"], meta["name"], {"gracePeriodSeconds": grace})

    # Garbage collection

    def _collect_garbage(self) -> None:
        with self._store.changed:
            objects = self._store.items()
            uids = {obj["metadata"]["uid"] for _key, obj in objects}
            for key, obj in objects:
                meta = obj["metadata"]
                owners = meta.get("ownerReferences") or []
                if not owners or meta.get("deletionTimestamp") or any(owner["uid"] in uids for owner in owners):
                    continue
                if self._has_waited(f"{meta['uid']} orphaned", self.pace.collect_seconds):
                    self._store.delete(*key)

    def _create_accounts(self) -> None:
        account = {"metadata": {"name": "default"}}
        accounts = self._store.find("serviceaccounts", "", lambda one: one["metadata"]["name"] == "default")
        with_account = {one["metadata"]["namespace"] for one in accounts}
        for namespace in self._store.find("namespaces", "", lambda one: one["metadata"]["name"] not in with_account):
            meta = namespace["metadata"]
            is_due = self._has_waited(f"{meta['uid']} created", self.pace.account_seconds)
            if is_due and not meta.get("deletionTimestamp"):
                with contextlib.suppress(ApiError):
                    self.api.create(BY_PLURAL["serviceaccounts"], meta["name"], account)

    def _finish_namespaces(self) -> None:
        for namespace in self._store.find("namespaces", "", lambda one: bool(one["metadata"].get("deletionTimestamp"))):
            name = namespace["metadata"]["name"]
            inside = [(key, one) for key, one in self._store.items() if key[1] == name and BY_PLURAL[key[0]].namespaced]
            for key, obj in inside:
                if not obj["metadata"].get("deletionTimestamp"):
                    with contextlib.suppress(ApiError):
                        self._store.delete(*key)
            if not inside:
                self._store.remove_finalizer("namespaces", "", name, "kubernetes")


def make_node(api: Api, name: str, labels: dict[str, str], offers: dict[str, str]) -> None:
    """Add a ready Node with these resources."""
    allocatable = {"pods": "110", "ephemeral-storage": "100Gi", **offers}

    def offer(obj: Object) -> None:
        obj["status"] = {"capacity": allocatable, "allocatable": allocatable}
        set_condition(obj, "Ready", "True", "KubeletReady")

    with api.store.changed:  # the scheduler must not see a Node without its resources
        api.create(BY_PLURAL["nodes"], "", {"metadata": {"name": name, "labels": labels}, "spec": {}})
        api.store.edit("nodes", "", name, offer)


def _claims(pod: Object) -> list[str]:
    volumes = pod["spec"].get("volumes") or []
    return [one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one]


def _requests(pod: Object) -> dict[str, float]:
    total: dict[str, float] = {}
    for container in pod["spec"]["containers"]:
        for name, value in (container["resources"].get("requests") or {}).items():
            total[name] = total.get(name, 0) + quantity(value)
    return total


def _toleration(pod: Object, taint: Object) -> Object | None:
    """Return the Pod's toleration of a taint, or None."""
    for one in pod["spec"].get("tolerations") or []:
        key_fits = not one.get("key") or one["key"] == taint["key"]
        effect_fits = not one.get("effect") or one["effect"] == taint["effect"]
        value_fits = one.get("operator", "Equal") == "Exists" or one.get("value", "") == taint.get("value", "")
        if key_fits and effect_fits and value_fits:
            return dict(one)
    return None


def _matches(selector: Object | None, labels: dict[str, str]) -> bool:
    """Whether a node with these labels matches a NodeSelector (with `In` alone), if there is one."""
    return not selector or any(
        all(one["operator"] == "In" and labels.get(one["key"]) in one["values"] for one in expressions)
        for term in selector["nodeSelectorTerms"]
        for expressions in [[*term.get("matchExpressions", []), *term.get("matchFields", [])]]
    )
