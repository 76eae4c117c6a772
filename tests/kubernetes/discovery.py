"""What the fake API server says of itself: its version, its groups, their resources. PURE."""

from __future__ import annotations

from tests.kubernetes.api import VERSION, Api
from tests.kubernetes.resources import Object


def discovery(api: Api, path: str) -> Object | None:
    """What the server says of itself."""
    groups = sorted({(one.group, one.version) for one in api.served})
    path = path.rstrip("/")
    if path == "/version":
        return VERSION
    if path in {"/healthz", "/livez", "/readyz"}:
        return {"status": "ok"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {
                    "name": group,
                    "versions": [{"groupVersion": f"{group}/{version}", "version": version}],
                    "preferredVersion": {"groupVersion": f"{group}/{version}", "version": version},
                }
                for group, version in groups
                if group
            ],
        }
    for group, version in groups:
        if path == (f"/apis/{group}/{version}" if group else f"/api/{version}"):
            return _resource_list(api, group, version)
    return None


def _resource_list(api: Api, group: str, version: str) -> Object:
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    found = [one for one in api.served if (one.group, one.version) == (group, version)]
    entries = [
        {
            "name": one.plural,
            "singularName": one.kind.lower(),
            "namespaced": one.namespaced,
            "kind": one.kind,
            "verbs": verbs,
        }
        for one in found
    ]
    entries += [
        {"name": f"{one.plural}/{sub}", "singularName": "", "namespaced": one.namespaced, "kind": one.kind,
         "verbs": ["get", "patch", "update"]}
        for one in found for sub in sorted(one.subresources)
    ]  # fmt: skip
    told = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": told, "resources": entries}
