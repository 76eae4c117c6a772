"""What the fake API server makes of a body before it stores it: checks as strict as a real server's, and defaults.

The one rule: whoever is refused here is refused by a real server too (with 400, 403 or 422); what is not known here is
left to `kubernetes-validate`, which knows every field and its type.
"""

from __future__ import annotations

import copy
import re
import secrets
from typing import Any

import kubernetes_validate

from tests.kubernetes.resources import LABEL, SUBDOMAIN, ApiError, Object, Resource, quantity

SCHEMA_VERSION = "1.36"
DNS_LABEL_NAMES = {"services", "namespaces"}
# Which kinds the published schemas know; a CRD's instances are checked by its own schema on a real server.
_WITHOUT_SCHEMA = {"localqueues", "clusterqueues", "workloads"}
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_ENV_NAME = re.compile(r"[^=\x00-\x1f\x7f]+")
_LONGEST_OBJECT = 1 << 20

Causes = list[tuple[str, str]]


def check_schema(resource: Resource, body: Object) -> None:
    """Raises ApiError 400 for an unknown field or a wrong type, as a server does under strict field validation."""
    if resource.plural in _WITHOUT_SCHEMA or resource.plural == "events":
        return
    try:
        kubernetes_validate.validate(body, SCHEMA_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        path = ".".join(str(part) for part in error.path)
        message = f'{resource.kind} in version "{resource.version}" cannot be handled: strict decoding error: {path}: '
        raise ApiError(400, "BadRequest", message + error.message) from error


def prepare(resource: Resource, body: Object, old: Object | None) -> Object:
    """The object as it will be stored. Raises ApiError 422."""
    made = copy.deepcopy(body)
    causes = _metadata(resource, made)
    match resource.plural:
        case "jobs":
            _default_job(made)
            causes += _job(made) + (_job_update(made, old) if old else [])
        case "pods":
            _default_pod(made["spec"])
            causes += _pod(made["spec"], "spec") + (_pod_update(made, old) if old else [])
        case "configmaps" | "secrets":
            causes += _data(resource, made, old)
        case "services":
            made["spec"].setdefault("type", "ClusterIP")
            made["spec"].setdefault("sessionAffinity", "None")
            made["spec"].setdefault("clusterIP", f"10.96.{secrets.randbelow(255)}.{secrets.randbelow(254) + 1}")
            if old and made["spec"]["clusterIP"] != old["spec"]["clusterIP"]:
                causes.append(("spec.clusterIP", "Invalid value: field is immutable"))
        case "networkpolicies":
            made["spec"].setdefault("policyTypes", ["Ingress"] + (["Egress"] if "egress" in made["spec"] else []))
    if causes:
        raise resource.invalid(made["metadata"].get("name", ""), causes)
    return made


def _metadata(resource: Resource, made: Object) -> Causes:
    meta = made["metadata"]
    causes: Causes = []
    name = meta.get("name") or f"{meta.get('generateName', '')}x"
    pattern, longest = (LABEL, 63) if resource.plural in DNS_LABEL_NAMES else (SUBDOMAIN, 253)
    if resource.group == "rbac.authorization.k8s.io":
        pattern = re.compile(r"[^/%]+")  # path segment names
    if not pattern.fullmatch(name) or len(name) > longest:
        causes.append(("metadata.name", f'Invalid value: "{name}": a lowercase RFC 1123 name must consist of ...'))
    for key, value in (meta.get("labels") or {}).items():
        prefix, _, last = key.rpartition("/")
        if not _LABEL_NAME.fullmatch(last) or (prefix and not SUBDOMAIN.fullmatch(prefix)):
            causes.append(("metadata.labels", f'Invalid value: "{key}": name part must consist of ...'))
        if not _LABEL_VALUE.fullmatch(value):
            causes.append(("metadata.labels", f'Invalid value: "{value}": a valid label must be ...'))
    for key, value in (meta.get("annotations") or {}).items():
        if not isinstance(value, str) or not _LABEL_NAME.fullmatch(key.rpartition("/")[2]):
            causes.append(("metadata.annotations", f'Invalid value: "{key}"'))
    if sum(len(key) + len(value) for key, value in (meta.get("annotations") or {}).items()) > 256 * 1024:
        causes.append(("metadata.annotations", "Too long: may not be more than 262144 bytes"))
    for owner in meta.get("ownerReferences") or []:
        if not all(owner.get(part) for part in ("apiVersion", "kind", "name", "uid")):
            causes.append(
                ("metadata.ownerReferences", "Invalid value: apiVersion, kind, name and uid must not be empty")
            )
    return causes


def _default_job(made: Object) -> None:
    spec, meta = made["spec"], made["metadata"]
    spec.setdefault("parallelism", 1)
    if spec.get("completionMode") != "Indexed":
        spec.setdefault("completions", 1)
    retries = 2**31 - 1 if "backoffLimitPerIndex" in spec else 6
    for name, value in {"completionMode": "NonIndexed", "backoffLimit": retries, "suspend": False}.items():
        spec.setdefault(name, value)
    spec.setdefault("podReplacementPolicy", "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed")
    _default_pod(spec["template"]["spec"])
    if "uid" in meta:  # a selector is made for the object, once it has an identity
        labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
        for prefix in ("", "batch.kubernetes.io/"):
            labels[f"{prefix}controller-uid"], labels[f"{prefix}job-name"] = meta["uid"], meta["name"]
        spec.setdefault("selector", {"matchLabels": {"batch.kubernetes.io/controller-uid": meta["uid"]}})


def _job(made: Object) -> Causes:
    spec, name = made["spec"], made["metadata"].get("name", "")
    causes = _pod(spec["template"]["spec"], "spec.template.spec")
    if spec["template"]["spec"]["restartPolicy"] not in {"Never", "OnFailure"}:
        causes.append(("spec.template.spec.restartPolicy", 'Required value: valid values: "OnFailure", "Never"'))
    for part in ("parallelism", "completions", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        if spec.get(part) is not None and spec[part] < 0:
            causes.append((f"spec.{part}", f"Invalid value: {spec[part]}: must be greater than or equal to 0"))
    if spec["completionMode"] == "Indexed":
        if spec.get("completions") is None:
            causes.append(("spec.completions", "Required value: when completion mode is Indexed"))
        elif not LABEL.fullmatch(f"{name}-{max(0, spec['completions'] - 1)}"):
            causes.append(
                ("metadata.name", f'Invalid value: "{name}": will not able to create pod with invalid DNS label')
            )
    if "maxFailedIndexes" in spec and "backoffLimitPerIndex" not in spec:
        causes.append(("spec.backoffLimitPerIndex", "Required value: when maxFailedIndexes is specified"))
    return causes + (_failure_policy(spec) if "podFailurePolicy" in spec else [])


def _failure_policy(spec: Object) -> Causes:
    causes: Causes = []
    policy = spec["podFailurePolicy"]
    if spec["template"]["spec"]["restartPolicy"] != "Never":
        causes.append(("spec.template.spec.restartPolicy", 'Invalid value: only "Never" with a podFailurePolicy'))
    if spec["podReplacementPolicy"] != "Failed":
        causes.append(("spec.podReplacementPolicy", 'Unsupported value: only "Failed" with a podFailurePolicy'))
    for index, rule in enumerate(policy.get("rules", [])):
        where = f"spec.podFailurePolicy.rules[{index}]"
        if bool(rule.get("onExitCodes")) == bool(rule.get("onPodConditions")):
            causes.append((where, "Invalid value: specifying one of OnExitCodes and OnPodConditions is required"))
        if rule["action"] not in {"FailJob", "Ignore", "Count", "FailIndex"}:
            causes.append((f"{where}.action", f"Unsupported value: {rule['action']}"))
        for each in rule.get("onPodConditions") or []:
            if "status" not in each:
                causes.append((f"{where}.onPodConditions", "Required value: status"))  # no default before 1.37
        codes = rule.get("onExitCodes") or {}
        if codes and (codes["operator"] not in {"In", "NotIn"} or sorted(set(codes["values"])) != codes["values"]):
            causes.append((f"{where}.onExitCodes", "Invalid value: must be ordered and without duplicates"))
        if codes and codes["operator"] == "In" and 0 in codes["values"]:
            causes.append((f"{where}.onExitCodes.values", "Invalid value: 0: must not be 0 for the In operator"))
    return causes


def _job_update(made: Object, old: Object) -> Causes:
    causes: Causes = []
    new, was = made["spec"], old["spec"]
    for part in ("selector", "completionMode", "podFailurePolicy", "completions", "podReplacementPolicy"):
        elastic = part == "completions" and new.get("completions") == new.get("parallelism")
        if new.get(part) != was.get(part) and not (elastic and was["completionMode"] == "Indexed"):
            causes.append((f"spec.{part}", "Invalid value: field is immutable"))
    if was["suspend"] and not old.get("status", {}).get("startTime"):
        # A queue may say where the pods of a job go that has not begun.
        loose = ("nodeSelector", "tolerations", "affinity", "schedulingGates")
        new, was = copy.deepcopy(new), copy.deepcopy(was)
        for template in (new["template"], was["template"]):
            template.pop("metadata", None)
            for part in loose:
                template["spec"].pop(part, None)
    if new["template"] != was["template"]:
        causes.append(("spec.template", "Invalid value: field is immutable"))
    return causes


def _default_pod(spec: Object) -> None:
    defaults = {
        "restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler",
        "terminationGracePeriodSeconds": 30, "securityContext": {}, "enableServiceLinks": True,
    }  # fmt: skip
    for name, value in defaults.items():
        spec.setdefault(name, value)
    for container in [*spec.get("containers", []), *spec.get("initContainers", [])]:
        tag = container.get("image", "").rpartition("/")[2].partition(":")[2]
        latest = "@" not in container.get("image", "") and tag in {"", "latest"}
        container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
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
    containers = spec.get("containers") or []
    if not containers:
        causes.append((f"{where}.containers", "Required value"))
    volumes = {volume["name"]: volume for volume in spec.get("volumes") or []}
    for index, container in enumerate([*(spec.get("initContainers") or []), *containers]):
        causes += _container(container, f"{where}.containers[{index}]", volumes)
    for name in ("hostname", "subdomain"):
        if spec.get(name) and not LABEL.fullmatch(spec[name]):
            causes.append((f"{where}.{name}", f'Invalid value: "{spec[name]}"'))
    for volume in volumes.values():
        if not LABEL.fullmatch(volume["name"]):
            causes.append((f"{where}.volumes.name", f'Invalid value: "{volume["name"]}"'))
        if len(set(volume) - {"name"}) != 1:
            causes.append((f"{where}.volumes[{volume['name']}]", "Forbidden: may not specify more than 1 volume type"))
        if ".." in volume.get("hostPath", {}).get("path", "").split("/"):
            causes.append((f"{where}.volumes.hostPath.path", "Invalid value: must not contain '..'"))
        if "sizeLimit" in volume.get("emptyDir", {}):
            causes += _quantities({"sizeLimit": volume["emptyDir"]["sizeLimit"]}, f"{where}.volumes.emptyDir")
    if spec.get("terminationGracePeriodSeconds", 0) < 0:
        causes.append((f"{where}.terminationGracePeriodSeconds", "Invalid value: must be non-negative"))
    return causes


def _container(container: Object, where: str, volumes: dict[str, Any]) -> Causes:
    causes: Causes = []
    if not LABEL.fullmatch(container["name"]):
        causes.append((f"{where}.name", f'Invalid value: "{container["name"]}"'))
    if not container.get("image") or container["image"] != container["image"].strip():
        causes.append((f"{where}.image", "Required value"))
    resources = container.get("resources") or {}
    for part in ("limits", "requests"):
        causes += _quantities(resources.get(part) or {}, f"{where}.resources.{part}")
    if not causes:
        for name, value in (resources.get("requests") or {}).items():
            limit = (resources.get("limits") or {}).get(name)
            if limit is not None and quantity(value) > quantity(limit):
                causes.append((f"{where}.resources.requests", f"Invalid value: {value}: must be at most {name} limit"))
            if "/" in name and (limit is None or quantity(limit) != quantity(value)):
                causes.append((f"{where}.resources.requests", f"must be equal to {name} limit"))
    return causes + _environment(container, where) + _mounts(container, where, volumes)


def _environment(container: Object, where: str) -> Causes:
    causes: Causes = []
    for variable in container.get("env") or []:
        if not _ENV_NAME.fullmatch(variable["name"]):
            causes.append((f"{where}.env", f'Invalid value: "{variable["name"]}"'))
        if variable.get("value") and variable.get("valueFrom"):
            causes.append((f"{where}.env.valueFrom", "Invalid value: may not be specified when `value` is not empty"))
    return causes


def _mounts(container: Object, where: str, volumes: dict[str, Any]) -> Causes:
    causes: Causes = []
    targets = set()
    for mount in container.get("volumeMounts") or []:
        path = mount["mountPath"]
        if mount["name"] not in volumes:
            causes.append((f"{where}.volumeMounts.name", f'Not found: "{mount["name"]}"'))
        if path in targets:
            causes.append((f"{where}.volumeMounts.mountPath", f'Invalid value: "{path}": must be unique'))
        targets.add(path)
        below = mount.get("subPath", "")
        if below.startswith("/") or ".." in below.split("/"):
            causes.append((f"{where}.volumeMounts.subPath", f'Invalid value: "{below}": must be a relative path'))
    return causes


def _quantities(values: Object, where: str) -> Causes:
    causes = []
    for name, value in values.items():
        try:
            if quantity(value) < 0:
                causes.append((f"{where}.{name}", f'Invalid value: "{value}": must be greater than or equal to 0'))
        except ValueError as error:
            causes.append((f"{where}.{name}", str(error)))
    return causes


def _pod_update(made: Object, old: Object) -> Causes:
    loose = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds", "schedulingGates", "nodeName")
    new, was = copy.deepcopy(made["spec"]), copy.deepcopy(old["spec"])
    for spec in (new, was):
        for part in loose:
            spec.pop(part, None)
        for container in spec["containers"]:
            container.pop("image", None)
    if new != was:
        return [("spec", "Forbidden: pod updates may not change fields other than `spec.containers[*].image`, ...")]
    return []


def _data(resource: Resource, made: Object, old: Object | None) -> Causes:
    causes: Causes = []
    parts = ("data", "binaryData")
    if resource.plural == "secrets":
        made.setdefault("type", "Opaque")
        if old and old["type"] != made["type"]:
            causes.append(("type", "Invalid value: field is immutable"))
        if made["type"] == "kubernetes.io/dockerconfigjson" and ".dockerconfigjson" not in made.get("data", {}):
            causes.append(("data[.dockerconfigjson]", "Required value"))
    for part in parts:
        for name in made.get(part) or {}:
            if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", name):
                causes.append((part, f'Invalid value: "{name}": a valid config key must consist of ...'))
    size = sum(len(value) for part in parts for value in (made.get(part) or {}).values())
    if size > _LONGEST_OBJECT:
        causes.append(("data", "Too long: may not be more than 1048576 bytes"))
    changed = old is not None and any(made.get(part) != old.get(part) for part in parts)
    if old and old.get("immutable") and (changed or not made.get("immutable")):
        causes.append(("data", "Forbidden: field is immutable when `immutable` is set"))
    return causes
