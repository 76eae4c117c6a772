"""The fake API server without HTTP: verbs on resources, admission, patches, subresources.

Controllers create their objects through it too, so that quotas and validation apply to all.
"""

from __future__ import annotations

import base64
import copy
import json
import uuid
from collections.abc import Callable
from typing import Any

from tests.kubernetes import admission, selectors
from tests.kubernetes.portforward import Dial
from tests.kubernetes.rbac import Access
from tests.kubernetes.resources import BY_PLURAL, TABLE, ApiError, Object, Resource, now, quantity
from tests.kubernetes.store import Store

Query = dict[str, str]
VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0-fake"}
ENDED = ("Succeeded", "Failed")
"""The phases of a Pod that has ended."""


class Api:
    """One cluster's API. `log_of(namespace, pod, with_times)` returns a Pod's output.

    `dial_of(namespace, pod)` returns a function that connects to its ports. Raises ApiError 500 if its node is down.
    """

    def __init__(self, store: Store, access: Access) -> None:
        self.store, self.access = store, access
        self.log_of: Callable[[str, str, bool], bytes] = lambda _namespace, _pod, _with_times: b""
        self.dial_of: Callable[[str, str], Dial]
        self.checks_schemas = True  # a test that creates very many objects sets it to False

    def resource(self, group: str, version: str, plural: str) -> Resource:
        """Return a resource of the table. Raises ApiError 404."""
        for known in TABLE:
            if (known.group, known.version, known.plural) == (group, version, plural):
                return known
        raise ApiError(404, "NotFound", "the server could not find the requested resource")

    # Reading

    def matching(self, resource: Resource, namespace: str, query: Query) -> Callable[[Object], bool]:
        """Return a function that tells whether an object is in this namespace and matches the query's selectors."""
        by_label = selectors.labels(query.get("labelSelector", ""))
        by_field = selectors.fields(resource.plural, query.get("fieldSelector", ""))
        return lambda obj: namespace in {"", obj["metadata"].get("namespace", "")} and by_label(obj) and by_field(obj)

    def list(self, resource: Resource, namespace: str, query: Query, past: Store | None = None) -> Object:
        """Return a collection, in pages if the query has a `limit`. As on a real server, items have no `kind`.

        `past` is the earlier state that a stale read returns.
        """
        store = past or self.store
        with store.changed:
            start, version = 0, store.version
            if token := query.get("continue"):
                start, version = json.loads(base64.b64decode(token))
                if version < store.compacted:
                    raise ApiError(410, "Expired", "The provided continue parameter is too old")
                store = store.as_of(version)
            objects = store.find(resource.plural, namespace, self.matching(resource, namespace, query))
        end = start + int(query.get("limit") or len(objects))
        meta: Object = {"resourceVersion": str(version)}
        if objects[end:]:
            meta["continue"] = base64.b64encode(json.dumps([end, version]).encode()).decode()
        for item in objects:
            del item["kind"], item["apiVersion"]
        items = objects[start:end]
        return {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": meta, "items": items}

    # Writing

    def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        """Add an object. Raises ApiError 400, 403, 404, 409, 422."""
        new = _identified(resource, namespace, body)
        if resource.namespaced:
            self._demand_namespace(namespace)
        self._check_schema(resource, new)
        new["metadata"]["uid"] = str(uuid.uuid4())
        new = admission.prepare(resource, new, None)
        if resource.plural == "pods":
            self._demand_service_account(namespace, new)
            self._demand_pod_security(namespace, new)
        with self.store.changed:
            if resource.plural == "pods":
                new["status"] = {"phase": "Pending", "qosClass": "Guaranteed"}
                self._demand_quota(namespace, new)
            # The creators of Nodes and claims set their status.
            elif resource.has_status and resource.plural not in {"nodes", "persistentvolumeclaims"}:
                new["status"] = {}
            if resource.plural == "namespaces":
                new["metadata"]["finalizers"], new["status"] = ["kubernetes"], {"phase": "Active"}
            return self.store.create(resource, new)

    def patch(self, resource: Resource, namespace: str, name: str, body: Object, kind: str) -> Object:
        """Merge `body` into an object, or apply it (server-side apply, forced). Raises as `create`.

        Here an apply only merges. A real one also removes what only the last apply set, which no run needs.
        """
        is_apply = kind == "application/apply-patch+yaml"
        if not is_apply and kind not in {"application/merge-patch+json", "application/strategic-merge-patch+json"}:
            message = f"the body of the request was in an unknown format: {kind}"
            raise ApiError(415, "UnsupportedMediaType", message)
        if is_apply:
            body = _identified(resource, namespace, body)
            self._check_schema(resource, body)
        with self.store.changed:
            try:
                old = self.store.get(resource.plural, namespace, name)
            except ApiError:
                if not is_apply:
                    raise
                if uid := body["metadata"].get("uid"):
                    why = f"uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                    raise resource.conflict(name, why) from None
                return self.create(resource, namespace, body)
            new = merge_patch(copy.deepcopy(old), body)
            if "resourceVersion" not in body.get("metadata", {}):
                new["metadata"].pop("resourceVersion", None)
            uid = new["metadata"].get("uid", old["metadata"]["uid"])
            if uid != old["metadata"]["uid"]:  # 422 as on a real server, which answers 409 only to PUT and DELETE
                raise resource.invalid(name, [("metadata.uid", f'Invalid value: "{uid}": field is immutable')])
            new = admission.prepare(resource, new, old)
            self._check_schema(resource, {**new, "status": {}} if "status" in new else new)
            return self.store.update(resource, new)

    def _check_schema(self, resource: Resource, body: Object) -> None:
        if self.checks_schemas:
            admission.check_schema(resource, body)

    # Subresources and reviews

    def evict(self, namespace: str, name: str, body: Object) -> Object:
        """Evict a Pod (`POST pods/eviction`), as `kubectl drain` does."""
        self.store.get("pods", namespace, name)
        condition = ("DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting")
        self.store.edit("pods", namespace, name, lambda pod: set_condition(pod, *condition))
        self.store.delete("pods", namespace, name, body.get("deleteOptions"))
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def review(self, user: str, body: Object) -> Object:
        """Answer a SelfSubjectAccessReview."""
        asked = body["spec"]["resourceAttributes"]
        what = asked.get("resource", "*") + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        allowed = self.access.allows(
            user, verb=asked.get("verb", "*"), group=asked.get("group", ""), what=what,
            namespace=asked.get("namespace", ""), name=asked.get("name", ""),
        )  # fmt: skip
        return {**body, "status": {"allowed": allowed}}

    # Admission of new objects

    def _demand_namespace(self, namespace: str) -> None:
        if self.store.get("namespaces", "", namespace)["metadata"].get("deletionTimestamp"):
            message = f"forbidden: unable to create new content in namespace {namespace} because it is being terminated"
            raise ApiError(403, "Forbidden", message, {"causes": [{"reason": "NamespaceTerminating"}]})

    def _demand_service_account(self, namespace: str, pod: Object) -> None:
        account = pod["spec"].get("serviceAccountName", "default")
        if not self.store.find("serviceaccounts", namespace, lambda one: one["metadata"]["name"] == account):
            why = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
            raise ApiError(403, "Forbidden", f'pods "{pod["metadata"].get("name", "")}" is forbidden: {why}')

    def _demand_pod_security(self, namespace: str, pod: Object) -> None:
        labels = self.store.get("namespaces", "", namespace)["metadata"].get("labels", {})
        level = labels.get("pod-security.kubernetes.io/enforce", "privileged")
        if broken := admission.pod_security_violations(pod["spec"], level):
            message = f'violates PodSecurity "{level}:latest": {", ".join(broken)}'
            raise ApiError(403, "Forbidden", f'pods "{pod["metadata"].get("name", "")}" is forbidden: {message}')

    def _demand_quota(self, namespace: str, pod: Object) -> None:
        """Keep the number of Pods within the quotas. Quotas of CPUs and memory are left out."""
        used = len(self.store.find("pods", namespace, lambda one: one["status"].get("phase") not in ENDED))
        for quota in self.store.find("resourcequotas", namespace):
            limit = quota["spec"]["hard"]["pods"]
            if used + 1 > quantity(limit):
                message = f'pods "{pod["metadata"].get("name", "")}" is forbidden: exceeded quota: '
                figures = f"requested: pods=1, used: pods={used}, limited: pods={limit}"
                raise ApiError(403, "Forbidden", f"{message}{quota['metadata']['name']}, {figures}")


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386): null removes, lists are replaced."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    new = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            new.pop(name, None)
        else:
            new[name] = merge_patch(new.get(name), value)
    return new


def _identified(resource: Resource, namespace: str, body: Object) -> Object:
    """Return the body with the kind and namespace of the URL. Raises ApiError 400 if it has others."""
    if not isinstance(body, dict) or not isinstance(body.get("metadata"), dict):
        raise ApiError(400, "BadRequest", "the body is not an object with metadata")
    new = copy.deepcopy(body)
    kind = (new.setdefault("apiVersion", resource.api_version), new.setdefault("kind", resource.kind))
    if kind != (resource.api_version, resource.kind):
        message = f"the API version or kind in the data {kind} does not match the expected {resource.kind}"
        raise ApiError(400, "BadRequest", message)
    if resource.namespaced and new["metadata"].setdefault("namespace", namespace) != namespace:
        raise ApiError(400, "BadRequest", "the namespace of the provided object does not match the request")
    return new


def set_condition(obj: Object, kind: str, status: str, reason: str, message: str = "") -> None:
    """Set a condition in an object's status."""
    conditions = obj.setdefault("status", {}).setdefault("conditions", [])
    new = {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}
    for old in conditions:
        if old["type"] == kind:
            if old["status"] == status:
                new["lastTransitionTime"] = old["lastTransitionTime"]
            old.update(new)
            return
    conditions.append(new)


def record_event(api: Api, about: Object, kind: str, reason: str, message: str) -> None:
    """Record an event about an object; a repetition increases its count."""
    meta = about["metadata"]
    namespace = meta.get("namespace", "default")

    def is_same(event: Object) -> bool:
        return bool(
            (event["involvedObject"]["uid"], event["reason"], event["message"]) == (meta["uid"], reason, message)
        )

    with api.store.changed:
        if same := api.store.find("events", namespace, is_same):
            repeated = {"count": same[0]["count"] + 1, "lastTimestamp": now()}
            api.store.edit("events", namespace, same[0]["metadata"]["name"], lambda obj: obj.update(repeated))
            return
        event = {
            "metadata": {"name": f"{meta['name']}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
            "involvedObject": {
                "kind": about["kind"], "name": meta["name"], "namespace": namespace, "uid": meta["uid"],
                "apiVersion": about["apiVersion"],
            },
            "type": kind, "reason": reason, "message": message, "count": 1,
            "firstTimestamp": now(), "lastTimestamp": now(), "source": {"component": "fake"},
        }  # fmt: skip
        api.store.create(BY_PLURAL["events"], event)
