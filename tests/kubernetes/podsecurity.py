"""The Pod Security Standards that a namespace's label enforces: what of them a training pod could break.

The one rule: a pod of a namespace with `pod-security.kubernetes.io/enforce` is refused (403) for the same reasons as by
a real server's admission plugin.
"""

from __future__ import annotations

from tests.kubernetes.resources import ApiError, Object
from tests.kubernetes.store import Store

LABEL = "pod-security.kubernetes.io/enforce"
_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def admit(store: Store, namespace: str, pod: Object) -> None:
    """Raises ApiError 403."""
    level = store.get("namespaces", "", namespace)["metadata"].get("labels", {}).get(LABEL, "privileged")
    broken = violations(pod["spec"], level)
    if broken:
        message = f'violates PodSecurity "{level}:latest": {", ".join(broken)}'
        raise ApiError(403, "Forbidden", f'pods "{pod["metadata"].get("name", "")}" is forbidden: {message}')


def violations(spec: Object, level: str) -> list[str]:
    """What of the pod the level forbids."""
    if level == "privileged":
        return []
    volumes = spec.get("volumes") or []
    containers = [*spec["containers"], *(spec.get("initContainers") or [])]
    broken = [f"{name}=true" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    broken += [f'hostPath volumes (volume "{volume["name"]}")' for volume in volumes if "hostPath" in volume]
    broken += ["privileged" for one in containers if one.get("securityContext", {}).get("privileged")]
    if level == "restricted":
        broken += [
            f'restricted volume types (volume "{volume["name"]}")'
            for volume in volumes
            if not _VOLUMES & set(volume) and "hostPath" not in volume
        ]
        for container in containers:
            broken += _restricted(spec.get("securityContext") or {}, container)
    return broken


def _restricted(pod: Object, container: Object) -> list[str]:
    own = container.get("securityContext") or {}
    both = {**pod, **own}
    rules = {
        "allowPrivilegeEscalation != false": own.get("allowPrivilegeEscalation") is False,
        "unrestricted capabilities": "ALL" in (own.get("capabilities") or {}).get("drop", []),
        "runAsNonRoot != true": both.get("runAsNonRoot") is True,
        "runAsUser=0": both.get("runAsUser") != 0,
        "seccompProfile": (both.get("seccompProfile") or {}).get("type") in {"RuntimeDefault", "Localhost"},
    }
    return [f'{what} (container "{container["name"]}")' for what, kept in rules.items() if not kept]
