"""Names of a run's Kubernetes objects: labels, annotations, namespaces, host names, mount paths. Pure.

Several modules, and several versions of the console, read and write these names. Changing a value here breaks runs that
an older version started.
"""

from __future__ import annotations

import hashlib
import re

from runtime.backends.kubernetes.config import ClusterConfig
from runtime.specs import RunSpec

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGER = "trainyard"
"""Value of `MANAGED_BY_LABEL` on every object that the console creates."""
COMPONENT_LABEL = "app.kubernetes.io/component"
LAUNCHER_COMPONENT = "launcher"
"""Value of `COMPONENT_LABEL` on the ConfigMaps that hold a launcher."""
RUN_LABEL = "trainyard.dev/run"
"""The run's name, on every object of the run."""
# These two labels are for people only; see `labels_of`.
ORGANIZATION_LABEL = "trainyard.dev/organization"
JOB_LABEL = "trainyard.dev/job"

ENDED_LABEL = "trainyard.dev/ended"
"""Set on a Job together with `FINAL_STATUS_ANNOTATION`, so that listings of live runs can exclude it."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""On a run's Job: the Kueue LocalQueue that admits it."""

RUN_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGER},{RUN_LABEL}"
"""Label selector for the objects of all runs."""
LIVE_RUN_SELECTOR = f"{RUN_SELECTOR},!{ENDED_LABEL}"
"""Label selector for the Jobs of runs whose final status is not stored yet."""

# Annotations of a run's Job. Times are Unix seconds. Some values still have the words of earlier versions.
SPEC_ANNOTATION = "trainyard.dev/spec"
"""JSON: the parts of the RunSpec that are needed after submission (`state.SpecSummary`)."""
SUBMITTED_ANNOTATION = "trainyard.dev/submitted-at"
"""When the submission was complete. Without it the run does not exist yet."""
STARTED_ANNOTATION = "trainyard.dev/started-at"
"""When the last of the run's Pods started."""
TERMINATION_ANNOTATION = "trainyard.dev/taken-down"
"""JSON: why and when the backend ended the run, such as because it was stopped or waited too long. Written once. See
`state.Termination`."""
GRACE_END_ANNOTATION = "trainyard.dev/hurried-until"
"""When the Pods must have ended, if a `stop` asked for a shorter grace period than the RunSpec has."""
POD_ANNOTATION_PREFIX = "trainyard.dev/pod-"
"""Followed by a node's number. JSON: the last known state of a deleted Pod (`state.PodState`)."""
FINAL_STATUS_ANNOTATION = "trainyard.dev/final"
"""JSON: the run's final RunStatus. Written once."""

LAST_USED_ANNOTATION = "trainyard.dev/used-at"
"""On a launcher's ConfigMap: when a console last started a run with it. Unix seconds."""
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
"""On a Pod: its completion index, which is the node's number. Kubernetes sets it."""

CONTAINER_NAME = "node"
"""The only container of each Pod."""
# Mount paths in a Pod: the run's folder, the folder with the plan of the Pod's first process, and the folder with the
# launcher. `order` is the name that the plan had in earlier versions.
RUN_ROOT_PATH = "/trainyard/run-root"
TMP_PATH = "/tmp"  # noqa: S108 - a path in the Pod
POD_PLAN_PATH = "/trainyard/order"
LAUNCHER_PATH = "/trainyard/launcher"
LAUNCHER_FILE = "launcher.pyz"
CONTROL_PORT = 29400
"""Where node 0's launcher listens for the other launchers: the port that torchrun uses for its rendezvous."""
POD_MARGIN_SECONDS = 15
"""How much longer a Pod's grace period and deadline are than the run's own. The first process ends the run at the run's
limits; the margin leaves it time to write its record before the kubelet kills the Pod."""
_LABEL_VALUE = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z")
"""A label value that the API server accepts, and that is not empty."""
_NOT_IN_SLUG = re.compile(r"[^a-z0-9-]+")
"""Characters that a namespace's name cannot have. Dashes replace them."""
_MAX_LABEL_LENGTH = 63
"""The API's limit for label values and namespace names."""
_SLUG_DIGEST_LENGTH = 10
"""If a slug is changed for a namespace's name, the name ends with this many hex digits of the slug's hash. They keep
two organizations apart whose changed slugs are equal. A collision of 40 bits by chance is very unlikely. A customer
could search for one, and would then share the other organization's namespace and so its limit of pods. Nothing else is
shared: each run has its own NetworkPolicy and objects."""
_LIKE_A_DIGEST = re.compile(rf"-[0-9a-f]{{{_SLUG_DIGEST_LENGTH}}}\Z")
"""The end of a namespace's name that has such digits."""


def organization_namespace(config: ClusterConfig, organization_slug: str) -> str:
    """Return the namespace of an organization's runs. `organization_slug` is "" for runs of no organization."""
    if not config.namespace_per_organization or not organization_slug:
        return config.namespace
    slug = _NOT_IN_SLUG.sub("-", organization_slug.lower()).strip("-")
    name = f"{config.namespace}-{slug}"
    # A slug that ends like a digest gets a digest too: customers choose their slugs, and could choose the name that
    # another organization has because of its digest.
    if slug == organization_slug and len(name) <= _MAX_LABEL_LENGTH and not _LIKE_A_DIGEST.search(name):
        return name
    # Two slugs can become equal when they are changed or cut; the digest keeps their namespaces apart.
    digest = hashlib.sha256(organization_slug.encode()).hexdigest()[:_SLUG_DIGEST_LENGTH]
    return f"{name[: _MAX_LABEL_LENGTH - len(digest) - 1].rstrip('-')}-{digest}"


def namespace_of(spec: RunSpec, config: ClusterConfig) -> str:
    """Return the namespace of this run."""
    return organization_namespace(config, spec.labels.get("organization", ""))


def labels_of(spec: RunSpec) -> dict[str, str]:
    """Return the labels of every object that belongs to this run."""
    labels = {MANAGED_BY_LABEL: MANAGER, RUN_LABEL: spec.name}
    for key, label in (("organization", ORGANIZATION_LABEL), ("job", JOB_LABEL)):
        # These labels only inform people, since RUN_LABEL identifies the objects. So an invalid value is left out.
        if _LABEL_VALUE.match(spec.labels.get(key, "")):
            labels[label] = spec.labels[key]
    return labels


def secrets_name(spec: RunSpec) -> str:
    """Return the name of the Secret with the values that the customer chose for the run."""
    return f"{spec.name}-secrets"


def host_name(run_name: str, node: int) -> str:
    """Return the DNS name of a node's Pod, as the run's other Pods resolve it."""
    return f"{run_name}-{node}.{run_name}"


def gpu_label_value(gpu_type: str) -> str:
    """Convert a GPU type to a valid label value, as GPU feature discovery does: dashes in place of spaces."""
    # A label value begins and ends with a letter or digit, also where it was cut.
    return re.sub(r"[^A-Za-z0-9._-]+", "-", gpu_type).strip("-._")[:_MAX_LABEL_LENGTH].rstrip("-._")
