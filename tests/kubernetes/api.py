"""The fake API server without its socket: verbs on resources, admission, subresources.

The one rule: whatever enters the store comes through here, the controllers' own objects too, so that quotas and checks
hold for everybody.
"""

from __future__ import annotations

import base64
import copy
import json
import uuid
from collections.abc import Callable
from typing import Any

from tests.kubernetes import admission, patching, podsecurity, selectors
from tests.kubernetes.access import Access
from tests.kubernetes.resources import BY_PLURAL, KUEUE, TABLE, ApiError, Object, Resource, now, quantity
from tests.kubernetes.store import Store

Query = dict[str, str]
VERSION = {
    "major": "1", "minor": "36", "gitVersion": "v1.36.0-fake", "gitCommit": "0" * 40, "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z", "goVersion": "go1.25", "compiler": "gc", "platform": "linux/amd64",
}  # fmt: skip


class Api:
    """One cluster's API. `log_of(namespace, pod, query)` is the kubelets' answer about a pod's output."""

    def __init__(self, store: Store, access: Access) -> None:
        self.store, self.access = store, access
        self.served = list(TABLE)
        self.log_of: Callable[[str, str, Query], bytes] = lambda _namespace, _pod, _query: b""
        self.applied: dict[str, dict[str, Object]] = {}
        self.checks_schemas = True

    def install_kueue(self) -> None:
        """Serve Kueue's kinds."""
        self.served += KUEUE

    def resource(self, group: str, version: str, plural: str) -> Resource:
        """The resource. Raises ApiError 404 for what is not served."""
        for known in self.served:
            if (known.group, known.version, known.plural) == (group, version, plural):
                return known
        raise ApiError(404, "NotFound", "the server could not find the requested resource")

    # Reading

    def get(self, resource: Resource, namespace: str, name: str, past: Store | None = None) -> Object:
        """One object."""
        return (past or self.store).get(resource.plural, namespace, name)

    def matching(self, resource: Resource, namespace: str, query: Query) -> Callable[[Object], bool]:
        """Whether an object is of this namespace and these selectors."""
        by_label = selectors.labels(query.get("labelSelector", ""))
        by_field = selectors.fields(resource.plural, query.get("fieldSelector", ""))
        return lambda found: (
            namespace in {"", found["metadata"].get("namespace", "")} and by_label(found) and by_field(found)
        )

    def list(self, resource: Resource, namespace: str, query: Query, past: Store | None = None) -> Object:
        """Objects, in pages where `limit` asks for that. Items do not say their kind, as a real server's don't."""
        store = past or self.store
        with store.changed:
            start, version = 0, store.version
            if token := query.get("continue"):
                start, version = json.loads(base64.b64decode(token))
                if version < store.compacted:
                    raise ApiError(410, "Expired", "The provided continue parameter is too old")
                store = store.as_of(version)
            found = store.find(resource.plural, namespace, self.matching(resource, namespace, query))
        limit = int(query.get("limit") or 0) or len(found)
        page, rest = found[start : start + limit], found[start + limit :]
        meta: Object = {"resourceVersion": str(version)}
        if rest:
            meta["continue"] = base64.b64encode(json.dumps([start + limit, version]).encode()).decode()
            meta["remainingItemCount"] = len(rest)
        for item in page:
            del item["kind"], item["apiVersion"]
        return {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": meta, "items": page}

    # Writing

    def create(self, resource: Resource, namespace: str, body: Object, *, dry: bool = False) -> Object:
        """A new object. Raises ApiError 400, 403, 404, 409, 422."""
        made = _named(resource, namespace, body)
        self._demand_namespace(resource, namespace)
        self._check(resource, made)
        made["metadata"]["uid"] = str(uuid.uuid4())
        made = admission.prepare(resource, made, None)
        if resource.plural == "pods":
            self._demand_account(namespace, made)
            podsecurity.admit(self.store, namespace, made)
        with self.store.changed:
            if resource.plural == "pods":
                made["status"] = {"phase": "Pending", "qosClass": "Guaranteed"}
                self._demand_quota(namespace, made)
            elif "status" in resource.subresources and resource.plural not in {"nodes", "persistentvolumeclaims"}:
                made["status"] = {}
            if resource.plural == "namespaces":
                made["metadata"]["finalizers"], made["status"] = ["kubernetes"], {"phase": "Active"}
            if dry:
                return made
            return self.store.create(resource, made)

    def replace(self, resource: Resource, namespace: str, name: str, body: Object, *, sub: str = "") -> Object:
        """PUT."""
        made = _named(resource, namespace, body)
        if made["metadata"]["name"] != name:
            raise ApiError(400, "BadRequest", "the name of the object does not match the name on the URL")
        with self.store.changed:
            old = self.store.get(resource.plural, namespace, name)
            return self._store(resource, made, old, sub)

    def patch(
        self, resource: Resource, namespace: str, name: str, body: Any, *, query: Query, kind: str, sub: str
    ) -> Object:
        """PATCH, of the four kinds."""
        if kind == "application/apply-patch+yaml":
            return self._apply(resource, namespace, name, body, query)
        with self.store.changed:
            old = self.store.get(resource.plural, namespace, name)
            match kind:
                case "application/json-patch+json":
                    made = patching.json_patch(old, body)
                case "application/merge-patch+json":
                    made = patching.merge_patch(old, body)
                case "application/strategic-merge-patch+json":
                    made = patching.strategic_patch(old, body)
                case _:
                    raise ApiError(
                        415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {kind}"
                    )
            given = body.get("metadata", {}) if isinstance(body, dict) else {}
            if "resourceVersion" not in given and not isinstance(body, list):
                made["metadata"].pop("resourceVersion", None)
            _demand_uid(resource, name, made, old)
            return self._store(resource, made, old, sub)

    def _apply(self, resource: Resource, namespace: str, name: str, body: Object, query: Query) -> Object:
        manager = query.get("fieldManager")
        if not manager:
            raise ApiError(400, "BadRequest", "fieldManager: Required value: is required for apply patch")
        if not body.get("apiVersion") or not body.get("kind"):
            raise ApiError(400, "BadRequest", "invalid object type: apiVersion and kind are required")
        if body.get("metadata", {}).get("managedFields"):
            raise ApiError(400, "BadRequest", "metadata.managedFields must be nil")
        given = _named(resource, namespace, body)
        self._check(resource, given)
        with self.store.changed:
            try:
                old = self.store.get(resource.plural, namespace, name)
            except ApiError:
                if uid := given["metadata"].get("uid"):
                    why = f"the provided object specified uid {uid}, and no existing object was found"
                    raise resource.conflict(name, f"uid mismatch: {why}") from None
                made = self.create(resource, namespace, given)
                self.applied[made["metadata"]["uid"]] = {manager: copy.deepcopy(given)}
                return made
            said = self.applied.setdefault(old["metadata"]["uid"], {})
            made = patching.apply(old, given, said, manager, force=query.get("force", "").lower() == "true")
            if "resourceVersion" not in given["metadata"]:
                made["metadata"].pop("resourceVersion", None)
            _demand_uid(resource, name, made, old)
            return self._store(resource, made, old, "")

    def _store(self, resource: Resource, made: Object, old: Object, sub: str) -> Object:
        if sub == "status":
            return self.store.update(resource, made, status=True)
        if resource.plural != "nodes":
            made = admission.prepare(resource, made, old)
            self._check(resource, {**made, "status": {}} if "status" in made else made)
        return self.store.update(resource, made)

    def _check(self, resource: Resource, body: Object) -> None:
        if self.checks_schemas:
            admission.check_schema(resource, body)

    # Subresources and reviews

    def evict(self, namespace: str, name: str, body: Object) -> Object:
        """POST pods/eviction: what `kubectl drain` does."""

        def mark(pod: Object) -> None:
            add_condition(pod, "DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting")

        self.store.get("pods", namespace, name)
        self.store.edit("pods", namespace, name, mark)
        self.store.delete("pods", namespace, name, body.get("deleteOptions"))
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def review(self, user: str, body: Object) -> Object:
        """POST selfsubjectaccessreviews."""
        asked = body["spec"]["resourceAttributes"]
        what = asked.get("resource", "*") + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        allowed = self.access.allows(
            user, verb=asked.get("verb", "*"), group=asked.get("group", ""), what=what,
            namespace=asked.get("namespace", ""), name=asked.get("name", ""),
        )  # fmt: skip
        return {**body, "status": {"allowed": allowed}}

    def _demand_namespace(self, resource: Resource, namespace: str) -> None:
        if not resource.namespaced:
            return
        found = self.store.get("namespaces", "", namespace)
        if found["metadata"].get("deletionTimestamp"):
            message = f"forbidden: unable to create new content in namespace {namespace} because it is being terminated"
            raise ApiError(403, "Forbidden", message, {"causes": [{"reason": "NamespaceTerminating"}]})

    def _demand_account(self, namespace: str, pod: Object) -> None:
        """Raises ApiError 403 for a pod whose service account is not there, or not yet."""
        account = pod["spec"].get("serviceAccountName", "default")
        try:
            self.store.get("serviceaccounts", namespace, account)
        except ApiError as error:
            why = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
            raise ApiError(403, "Forbidden", f'pods "{pod["metadata"].get("name", "")}" is forbidden: {why}') from error

    def _demand_quota(self, namespace: str, pod: Object) -> None:
        """Raises ApiError 403 where a ResourceQuota has no room for the pod."""
        for quota in self.store.find("resourcequotas", namespace):
            live = self.store.find(
                "pods", namespace, lambda one: one["status"].get("phase") not in {"Succeeded", "Failed"}
            )
            for name, most in quota["spec"]["hard"].items():
                used = sum(_uses(one, name) for one in live)
                wanted = _uses(pod, name)
                if wanted and used + wanted > quantity(most):
                    told = f"requested: {name}={wanted:g}, used: {name}={used:g}, limited: {name}={most}"
                    message = f'pods "{pod["metadata"].get("name", "")}" is forbidden: exceeded quota: '
                    raise ApiError(403, "Forbidden", f"{message}{quota['metadata']['name']}, {told}")


def _demand_uid(resource: Resource, name: str, made: Object, old: Object) -> None:
    """Raises ApiError 422 for a patch that names another object's uid: only PUT and DELETE call that a conflict."""
    uid = made["metadata"].get("uid", old["metadata"]["uid"])
    if uid != old["metadata"]["uid"]:
        raise resource.invalid(name, [("metadata.uid", f'Invalid value: "{uid}": field is immutable')])


def _uses(pod: Object, name: str) -> float:
    """What a pod takes of a quota's line."""
    if name in {"pods", "count/pods"}:
        return 1
    kind, _, what = name.partition(".") if name.startswith(("requests.", "limits.")) else ("requests", "", name)
    containers = pod["spec"]["containers"]
    return sum(quantity((one["resources"].get(kind) or {}).get(what, 0)) for one in containers)


def _named(resource: Resource, namespace: str, body: Object) -> Object:
    """The body, of the kind and namespace that the address says."""
    if not isinstance(body, dict) or not isinstance(body.get("metadata"), dict):
        raise ApiError(400, "BadRequest", "the body is not an object with metadata")
    made = copy.deepcopy(body)
    told = (made.setdefault("apiVersion", resource.api_version), made.setdefault("kind", resource.kind))
    if told != (resource.api_version, resource.kind):
        message = f"the API version or kind in the data {told} does not match the expected {resource.kind}"
        raise ApiError(400, "BadRequest", message)
    if resource.namespaced and made["metadata"].setdefault("namespace", namespace) != namespace:
        raise ApiError(400, "BadRequest", "the namespace of the provided object does not match the request")
    return made


def add_condition(found: Object, kind: str, status: str, reason: str, message: str = "") -> None:
    """Set a condition in an object's status."""
    conditions = found.setdefault("status", {}).setdefault("conditions", [])
    for old in conditions:
        if old["type"] == kind:
            if (old["status"], old.get("reason"), old.get("message")) == (status, reason, message):
                return
            changed = old["status"] != status
            old.update(status=status, reason=reason, message=message)
            if changed:
                old["lastTransitionTime"] = now()
            return
    conditions.append(
        {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}
    )


def record_event(api: Api, about: Object, kind: str, reason: str, message: str) -> None:
    """An event about an object; the same again raises its count."""
    meta = about["metadata"]
    namespace = meta.get("namespace", "default")
    resource = BY_PLURAL["events"]

    def same(event: Object) -> bool:
        told = (event["involvedObject"]["uid"], event["reason"], event["message"])
        return told == (meta["uid"], reason, message)

    with api.store.changed:
        for old in api.store.find("events", namespace, same):
            api.store.update(resource, {**old, "count": old["count"] + 1, "lastTimestamp": now()})
            return
        try:
            api.store.create(
                resource,
                {
                    "metadata": {"name": f"{meta['name']}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
                    "involvedObject": {
                        "kind": about["kind"], "name": meta["name"], "namespace": namespace, "uid": meta["uid"],
                        "apiVersion": about["apiVersion"],
                    },
                    "type": kind, "reason": reason, "message": message, "count": 1,
                    "firstTimestamp": now(), "lastTimestamp": now(), "source": {"component": "fake"},
                },
            )  # fmt: skip
        except ApiError:  # the namespace has gone
            return
