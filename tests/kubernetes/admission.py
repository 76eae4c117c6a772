"""Validate objects and set defaults, as a real API server does.

An object must match its published schema. Other rules are checked only if a run's name, settings or files can break
them.
"""

from __future__ import annotations

import copy
import re
import secrets
from typing import Any

import jsonschema

from tests.kubernetes import schemas
from tests.kubernetes.resources import LABEL, SUBDOMAIN, ApiError, Object, Resource, quantity

SCHEMA_VERSION = "1.36"
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected",
                       "secret"}  # fmt: skip
_IMMUTABLE = "Invalid value: field is immutable"

Causes = list[tuple[str, str]]


def check_schema(resource: Resource, body: Object) -> None:
    """Raise ApiError 400 for an unknown field or a wrong type, as under strict field validation."""
    try:
        schemas.validate(body, SCHEMA_VERSION)
    except jsonschema.ValidationError as error:
        path = ".".join(str(part) for part in error.path)
        message = f'{resource.kind} in version "{resource.version}" cannot be handled: strict decoding error: {path}: '
        raise ApiError(400, "BadRequest", message + error.message) from error


def prepare(resource: Resource, body: Object, old: Object | None) -> Object:
    """Return the object with defaults. `old` is what it replaces. Raises ApiError 422."""
    new = copy.deepcopy(body)
    causes = _metadata(resource, new)
    match resource.plural:
        case "jobs":
            _default_job(new)
            causes += _job(new) + (_job_update(new, old) if old else [])
        case "pods":
            _default_pod(new["spec"])
            causes += _pod(new["spec"], "spec")
        case "configmaps" | "secrets":
            causes += _data(resource, new, old)
        case "services":
            new["spec"].setdefault("clusterIP", f"10.96.{secrets.randbelow(255)}.{secrets.randbelow(254) + 1}")
        case "networkpolicies":
            new["spec"].setdefault("policyTypes", ["Ingress"] + (["Egress"] if "egress" in new["spec"] else []))
    if causes:
        raise resource.invalid(new["metadata"].get("name", ""), causes)
    return new


def _metadata(resource: Resource, obj: Object) -> Causes:
    meta = obj["metadata"]
    causes: Causes = []
    name = meta.get("name") or f"{meta.get('generateName', '')}x"  # x stands for the random end of the name
    pattern, longest = (LABEL, 63) if resource.plural in {"services", "namespaces"} else (SUBDOMAIN, 253)
    if resource.group == "rbac.authorization.k8s.io":
        pattern = re.compile(r"[^/%]+")
    if not pattern.fullmatch(name) or len(name) > longest:
        causes.append(("metadata.name", f'Invalid value: "{name}": a lowercase RFC 1123 name must consist of ...'))
    for key, value in (meta.get("labels") or {}).items():
        if not _LABEL_NAME.fullmatch(key.rpartition("/")[2]) or not _LABEL_VALUE.fullmatch(value):
            causes.append(("metadata.labels", f'Invalid value: "{key}: {value}": a valid label must be ...'))
    if sum(len(key) + len(value) for key, value in (meta.get("annotations") or {}).items()) > 256 * 1024:
        causes.append(("metadata.annotations", "Too long: may not be more than 262144 bytes"))
    return causes


def _default_job(obj: Object) -> None:
    spec, meta = obj["spec"], obj["metadata"]
    retries = 2**31 - 1 if "backoffLimitPerIndex" in spec else 6
    defaults = {"parallelism": 1, "completionMode": "NonIndexed", "backoffLimit": retries, "suspend": False}
    for name, value in defaults.items():
        spec.setdefault(name, value)
    spec.setdefault("podReplacementPolicy", "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed")
    _default_pod(spec["template"]["spec"])
    if "uid" in meta:
        labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
        for prefix in ("", "batch.kubernetes.io/"):
            labels[f"{prefix}controller-uid"], labels[f"{prefix}job-name"] = meta["uid"], meta["name"]
        spec.setdefault("selector", {"matchLabels": {"batch.kubernetes.io/controller-uid": meta["uid"]}})


def _job(obj: Object) -> Causes:
    spec, name = obj["spec"], obj["metadata"].get("name", "")
    causes = _pod(spec["template"]["spec"], "spec.template.spec")
    if spec["template"]["spec"]["restartPolicy"] != "Never":
        causes.append(("spec.template.spec.restartPolicy", 'Required value: valid values: "Never"'))
    # A real server also accepts other Jobs, but all Jobs of runs are Indexed.
    if spec["completionMode"] != "Indexed" or spec.get("completions") is None:
        causes.append(("spec.completions", "Required value: when completion mode is Indexed"))
    elif not LABEL.fullmatch(f"{name}-{max(0, spec['completions'] - 1)}"):
        message = f'Invalid value: "{name}": will not able to create pod with invalid DNS label'
        causes.append(("metadata.name", message))
    return causes + (_failure_policy(spec) if "podFailurePolicy" in spec else [])


def _failure_policy(spec: Object) -> Causes:
    causes: Causes = []
    if spec["podReplacementPolicy"] != "Failed":
        causes.append(("spec.podReplacementPolicy", 'Unsupported value: only "Failed" with a podFailurePolicy'))
    for index, rule in enumerate(spec["podFailurePolicy"].get("rules", [])):
        if not all("status" in one for one in rule.get("onPodConditions") or [{}]):
            # Kubernetes sets a default only since 1.37.
            causes.append((f"spec.podFailurePolicy.rules[{index}].onPodConditions", "Required value: status"))
    return causes


def _job_update(obj: Object, old: Object) -> Causes:
    new, was = obj["spec"], old["spec"]
    # A real server also lets a queue such as Kueue place the Pods of a Job that has not started.
    parts = ["selector", "completionMode", "podFailurePolicy", "podReplacementPolicy", "template"]
    if new.get("completions") != new.get("parallelism"):  # equal ones may change together, as on a real server
        parts.append("completions")
    return [(f"spec.{part}", _IMMUTABLE) for part in parts if new.get(part) != was.get(part)]


def _default_pod(spec: Object) -> None:
    defaults = {
        "restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler",
        "terminationGracePeriodSeconds": 30, "securityContext": {}, "enableServiceLinks": True,
    }  # fmt: skip
    for name, value in defaults.items():
        spec.setdefault(name, value)
    for container in spec.get("containers", []):
        container.setdefault("imagePullPolicy", "IfNotPresent")
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        resources = container.setdefault("resources", {})
        for name, value in (resources.get("limits") or {}).items():
            resources.setdefault("requests", {}).setdefault(name, value)
    for volume in spec.get("volumes") or []:
        for kind in ("configMap", "secret"):
            if kind in volume:
                volume[kind].setdefault("defaultMode", 0o644)
        if "hostPath" in volume:
            volume["hostPath"].setdefault("type", "")


def _pod(spec: Object, where: str) -> Causes:
    causes: Causes = []
    volumes = {volume["name"]: volume for volume in spec.get("volumes") or []}
    for index, container in enumerate(spec.get("containers") or []):
        causes += _container(container, f"{where}.containers[{index}]", volumes)
    for name, volume in volumes.items():
        if not LABEL.fullmatch(name) or len(volume) != 2:
            causes.append((f"{where}.volumes[{name}]", "Invalid value: a DNS label and one volume type are required"))
    return causes


def _container(container: Object, where: str, volumes: dict[str, Any]) -> Causes:
    causes: Causes = []
    if not container.get("image") or container["image"] != container["image"].strip():
        causes.append((f"{where}.image", "Required value"))
    resources = container.get("resources") or {}
    for part in ("limits", "requests"):
        for name, value in (resources.get(part) or {}).items():
            try:
                limit = quantity((resources.get("limits") or {}).get(name, value))
                if not 0 <= quantity(value) <= limit:
                    causes.append(
                        (f"{where}.resources.{part}", f"Invalid value: {value}: must be at most {name} limit")
                    )
            except ValueError as error:
                causes.append((f"{where}.resources.{part}.{name}", str(error)))
    mounts = container.get("volumeMounts") or []
    for mount in mounts:
        if mount["name"] not in volumes:
            causes.append((f"{where}.volumeMounts.name", f'Not found: "{mount["name"]}"'))
        if mount.get("subPath", "").startswith("/") or ".." in mount.get("subPath", "").split("/"):
            causes.append((f"{where}.volumeMounts.subPath", "Invalid value: must be a relative path"))
    if len({mount["mountPath"] for mount in mounts}) != len(mounts):
        causes.append((f"{where}.volumeMounts.mountPath", "Invalid value: must be unique"))
    return causes


def _data(resource: Resource, obj: Object, old: Object | None) -> Causes:
    causes: Causes = []
    parts = ("data", "binaryData")
    is_pull_secret = obj.get("type") == "kubernetes.io/dockerconfigjson"
    if is_pull_secret and ".dockerconfigjson" not in obj.get("data", {}):
        causes.append(("data[.dockerconfigjson]", "Required value"))
    if sum(len(value) for part in parts for value in (obj.get(part) or {}).values()) > 1 << 20:
        causes.append(("data", "Too long: may not be more than 1048576 bytes"))
    if old and old.get("immutable") and any(obj.get(part) != old.get(part) for part in (*parts, "immutable")):
        causes.append(("data", "Forbidden: field is immutable when `immutable` is set"))
    return causes


def pod_security_violations(spec: Object, level: str) -> list[str]:
    """Return how a Pod violates a Pod Security Standard. Rules that no training Pod can break are left out."""
    if level == "privileged":
        return []
    volumes, containers = spec.get("volumes") or [], spec["containers"]
    broken = [f"{name}=true" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    broken += [f'hostPath volumes (volume "{volume["name"]}")' for volume in volumes if "hostPath" in volume]
    broken += ["privileged" for one in containers if one.get("securityContext", {}).get("privileged")]
    if level == "restricted":
        broken += [
            f'restricted volume types (volume "{volume["name"]}")'
            for volume in volumes
            if not {*_RESTRICTED_VOLUMES, "hostPath"} & set(volume)  # `hostPath` is reported above
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
