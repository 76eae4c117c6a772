"""What things of a run are called on a cluster: labels, annotations, namespaces, hosts. PURE.

The one rule: a name that is written by one module and read by another stands here.
"""

from __future__ import annotations

import hashlib
import re

from runtime.backends.kubernetes_config import ClusterConfig
from runtime.specs import RunSpec

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "trainyard"
RUN_LABEL = "trainyard.dev/run"
ORGANIZATION_LABEL = "trainyard.dev/organization"
JOB_LABEL = "trainyard.dev/job"
COMPONENT_LABEL = "app.kubernetes.io/component"
LAUNCHER = "launcher"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
ENDED_LABEL = "trainyard.dev/ended"
"""On a Job whose end is written down: sweeps leave it out."""
SPEC = "trainyard.dev/spec"
"""Annotation of a Job, JSON: what is asked of a run later (`remembered`)."""
USED = "trainyard.dev/used-at"
"""On a launcher's ConfigMap: when a console last said that it starts runs with it."""
SUBMITTED = "trainyard.dev/submitted-at"
"""Annotation of a Job, Unix seconds: without it the submission is half made, and there is no such run yet."""
STARTED = "trainyard.dev/started-at"
"""Annotation of a Job, Unix seconds: when all its pods ran."""
TAKEN_DOWN = "trainyard.dev/taken-down"
"""Annotation of a Job, JSON: why and when it was taken down; the first reason counts."""
HURRIED = "trainyard.dev/hurried-until"
"""Annotation of a Job, Unix seconds: by when its pods are to have ended, since somebody had less patience later on."""
POD = "trainyard.dev/pod-"
"""Annotation of a Job for a completion index, JSON: the last that was seen of a pod which is gone."""
FINAL = "trainyard.dev/final"
"""Annotation of a Job, JSON: how it ended, for good."""
INDEX = "batch.kubernetes.io/job-completion-index"

CONTAINER = "node"
RUN_ROOT_TARGET = "/trainyard/run-root"
ORDER_TARGET = "/trainyard/order"
LAUNCHER_TARGET = "/trainyard/launcher"
LAUNCHER_FILE = "launcher.pyz"
MARGIN_SECONDS = 15
"""What a pod is given over its run's own grace and limits, so that it, and not the kubelet, ends the run."""
CONTROL_PORT = 29400
_LABEL_VALUE = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")
_SLUG = re.compile(r"[^a-z0-9-]+")
_LONGEST_LABEL = 63


def namespace_of(config: ClusterConfig, organization: str) -> str:
    """Where runs of an organization (its slug) lie."""
    if not config.namespace_per_organization or not organization:
        return config.namespace
    slug = _SLUG.sub("-", organization.lower()).strip("-")
    whole = f"{config.namespace}-{slug}"
    if slug == organization and len(whole) <= _LONGEST_LABEL:
        return whole
    # What had to be changed or cut must not meet another's.
    digest = hashlib.sha256(organization.encode()).hexdigest()[:10]
    return f"{whole[: _LONGEST_LABEL - 11].rstrip('-')}-{digest}"


def labels(spec: RunSpec) -> dict[str, str]:
    """What everything of a run carries."""
    told = {MANAGED_BY: MANAGER, RUN_LABEL: spec.name}
    for key, label in (("organization", ORGANIZATION_LABEL), ("job", JOB_LABEL)):
        if _LABEL_VALUE.match(spec.labels.get(key, "")):
            told[label] = spec.labels[key]
    return told


def namespace_of_run(spec: RunSpec, config: ClusterConfig) -> str:
    """Where this run lies."""
    return namespace_of(config, spec.labels.get("organization", ""))


def host(name: str, node: int) -> str:
    """The host name of a node's pod, as the others of its run resolve it."""
    return f"{name}-{node}.{name}"


def gpu_label_value(gpu_type: str) -> str:
    """A type of GPU as nodes' labels have it, where no blanks may be."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", gpu_type).strip("-._")[:_LONGEST_LABEL]
