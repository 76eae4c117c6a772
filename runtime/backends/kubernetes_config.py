"""What settings say of one Kubernetes cluster. PURE: a JSON object in, frozen data out.

The one rule: what is wrong with a setting is said when it is read, in one sentence that names it; whoever holds a
ClusterConfig need not look again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from runtime.specs import Capacity, NodeCapacity, Resources

_LABEL = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
_SUBDOMAIN = re.compile(r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")
_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$")
_QUALIFIED = re.compile(r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")
_EFFECTS = frozenset({"", "NoSchedule", "PreferNoSchedule", "NoExecute"})
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Volume:
    """Where the cluster's pods find the folders of mounts and runs.

    `root` is the folder that the console sees, and `claim` a ReadWriteMany PersistentVolumeClaim (in every namespace of
    runs), or `host_path` a folder of each machine, that holds the same. `shared` False (a `host_path` alone): the
    console sees nothing of what pods write; then logs come from the API, and checkpoints end with their pod.
    """

    root: str
    claim: str = ""
    host_path: str = ""
    shared: bool = True


@dataclass(frozen=True)
class Toleration:
    """A taint that pods of a node kind are let past."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


@dataclass(frozen=True)
class ClusterConfig:
    """One cluster. Where neither `context`, `kubeconfig` nor `in_cluster` is given, the usual kubeconfig counts.

    Mappings by node kind use the names of node specs; `""` stands for all that are not named.
    """

    name: str
    volume: Volume
    namespace: str = "trainyard-runs"
    context: str = ""
    kubeconfig: str = ""
    in_cluster: bool = False
    images: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Built-in image to registry reference."""
    pythons: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Built-in image or reference to the path of its interpreter; else `python3` by the image's PATH."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets of the namespace that every run may pull with, besides its own."""
    queue: str = ""
    """Kueue's LocalQueue: runs wait there, and are admitted whole."""
    priority_class: str = ""
    node_selectors: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: _NOTHING)
    tolerations: Mapping[str, tuple[Toleration, ...]] = field(default_factory=lambda: _NOTHING)
    spread: str = "pack"
    """`pack`: a run's pods close together, by `topology_key`; `spread`: on different ones."""
    topology_key: str = "kubernetes.io/hostname"
    namespace_per_organization: bool = False
    gang_seconds: int = 300
    """A run of which some but not all pods have a machine this long after its start is taken down whole."""
    start_seconds: int = 600
    """How long, once they have one, all pods may take to run (images are pulled); then the run ends, free."""
    uid: int = 10001
    gpu_resource: str = "nvidia.com/gpu"
    gpu_label: str = "nvidia.com/gpu.product"
    """The nodes' label that names their GPUs' type."""
    disk_mib: int = 51200
    """What a run whose spec does not say may write."""
    request_seconds: float = 10.0
    capacity: Capacity | None = None
    """What the cluster has, where its nodes may not be listed; the most it can grow to, where it is elastic."""
    elastic: bool = False
    """Machines come when pods wait for them: what the cluster has now says nothing about what fits."""

    @property
    def gang_guard(self) -> bool:
        """Whether runs that are placed in part are ours to take down; Kueue admits all or nothing."""
        return not self.queue

    @classmethod
    def from_data(cls, name: str, data: Mapping[str, Any]) -> ClusterConfig:
        """Read one value of the setting TRAINYARD_CLUSTERS. Raises ValueError with a sentence for whoever set it."""
        reader = _Reader(name, data)
        known = {"backend", "volume", "capacity", *cls.__dataclass_fields__} - {"name"}
        reader.refuse_unknown(known)
        if sum([bool(data.get("in_cluster")), bool(data.get("kubeconfig") or data.get("context"))]) > 1:
            raise reader.wrong("in_cluster", "excludes kubeconfig and context: choose one way to the cluster")
        return cls(
            name=name,
            volume=_volume(reader),
            namespace=reader.matching("namespace", "trainyard-runs", _LABEL, "a namespace's name"),
            context=reader.text("context"),
            kubeconfig=reader.text("kubeconfig"),
            in_cluster=reader.flag("in_cluster"),
            images=reader.texts("images"),
            pythons=reader.texts("pythons"),
            image_pull_secrets=_names(reader, "image_pull_secrets"),
            queue=reader.matching("queue", "", _SUBDOMAIN, "a LocalQueue's name"),
            priority_class=reader.matching("priority_class", "", _SUBDOMAIN, "a PriorityClass's name"),
            node_selectors=_selectors(reader),
            tolerations=_tolerations(reader),
            spread=reader.choice("spread", "pack", ("pack", "spread")),
            topology_key=reader.matching("topology_key", "kubernetes.io/hostname", _QUALIFIED, "a label's name"),
            namespace_per_organization=reader.flag("namespace_per_organization"),
            gang_seconds=reader.number("gang_seconds", 900 if reader.flag("elastic") else 300, least=1),
            start_seconds=reader.number("start_seconds", 600, least=1),
            uid=reader.number("uid", 10001, least=1),
            gpu_resource=reader.matching("gpu_resource", "nvidia.com/gpu", _QUALIFIED, "a resource's name"),
            gpu_label=reader.matching("gpu_label", "nvidia.com/gpu.product", _QUALIFIED, "a label's name"),
            disk_mib=reader.number("disk_mib", 51200, least=1),
            request_seconds=float(reader.number("request_seconds", 10, least=1)),
            capacity=_capacity(reader),
            elastic=reader.flag("elastic"),
        )


class _Reader:
    """The values of one cluster's object, checked for their types."""

    def __init__(self, name: str, data: object) -> None:
        self._name = name
        if not _LABEL.match(name):
            raise ValueError(f"'{name}' cannot name a cluster: use lower-case letters, digits and dashes.")
        if not isinstance(data, Mapping):
            raise ValueError(f"The cluster '{name}' must be a JSON object.")  # noqa: TRY004 - one error for all that is set
        self.data: Mapping[str, Any] = data

    def wrong(self, field_name: str, why: str) -> ValueError:
        return ValueError(f"The cluster '{self._name}': '{field_name}' {why}.")

    def refuse_unknown(self, known: set[str]) -> None:
        for field_name in self.data:
            if field_name not in known:
                raise self.wrong(field_name, f"is not known; there are {', '.join(sorted(known))}")
        if self.data.get("backend", "kubernetes") != "kubernetes":
            raise self.wrong("backend", "must be kubernetes here")

    def text(self, field_name: str, default: str = "") -> str:
        value = self.data.get(field_name, default)
        if not isinstance(value, str):
            raise self.wrong(field_name, "must be a string")
        return value

    def matching(self, field_name: str, default: str, pattern: re.Pattern[str], what: str) -> str:
        value = self.text(field_name, default)
        if value and not pattern.match(value):
            raise self.wrong(field_name, f"is '{value}', and that is not {what}")
        return value or default

    def choice(self, field_name: str, default: str, choices: tuple[str, ...]) -> str:
        value = self.text(field_name, default)
        if value not in choices:
            raise self.wrong(field_name, f"must be one of {', '.join(choices)}")
        return value

    def flag(self, field_name: str, *, default: bool = False) -> bool:
        value = self.data.get(field_name, default)
        if not isinstance(value, bool):
            raise self.wrong(field_name, "must be true or false")
        return value

    def number(self, field_name: str, default: int, *, least: int) -> int:
        value = self.data.get(field_name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(field_name, f"must be a whole number of at least {least}")
        return value

    def mapping(self, field_name: str) -> Mapping[str, Any]:
        value = self.data.get(field_name, {})
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self.wrong(field_name, "must be a JSON object")
        return value

    def texts(self, field_name: str) -> Mapping[str, str]:
        return self._texts(field_name, self.mapping(field_name))

    def _texts(self, field_name: str, value: Mapping[str, Any]) -> Mapping[str, str]:
        if not all(isinstance(text, str) and text for text in value.values()):
            raise self.wrong(field_name, "must map names to strings that are not empty")
        return MappingProxyType(dict(value))


def _volume(reader: _Reader) -> Volume:
    if not reader.mapping("volume"):
        raise reader.wrong("volume", 'must say where runs lie: {"claim": NAME, "root": PATH} or {"host_path", "root"}')
    inner = _Reader(reader._name, reader.mapping("volume"))  # noqa: SLF001 - the same cluster's
    inner_known = {"claim", "host_path", "root", "shared"}
    for field_name in inner.data:
        if field_name not in inner_known:
            raise reader.wrong("volume", f"has no '{field_name}'; there are {', '.join(sorted(inner_known))}")
    volume = Volume(
        root=inner.text("root"),
        claim=inner.matching("claim", "", _SUBDOMAIN, "a PersistentVolumeClaim's name"),
        host_path=inner.text("host_path"),
        shared=inner.flag("shared", default=True),
    )
    if bool(volume.claim) == bool(volume.host_path):
        raise reader.wrong("volume", "needs either a claim or a host_path")
    if volume.claim and not volume.shared:
        raise reader.wrong("volume", "is a claim, and the console must see a claim: mount it at its root")
    for what, path in (("root", volume.root), ("host_path", volume.host_path)):
        if (path or what == "root") and not _is_folder(path):
            raise reader.wrong("volume", f"needs an absolute path as its {what}, without '..'")
    return volume


def _is_folder(path: str) -> bool:
    return path.startswith("/") and bool(path.strip("/")) and ".." not in path.split("/") and ":" not in path


def _names(reader: _Reader, field_name: str) -> tuple[str, ...]:
    value = reader.data.get(field_name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) and _SUBDOMAIN.match(one) for one in value):
        raise reader.wrong(field_name, "must be a list of names")
    return tuple(value)


def _selectors(reader: _Reader) -> Mapping[str, Mapping[str, str]]:
    found: dict[str, Mapping[str, str]] = {}
    for kind, labels in reader.mapping("node_selectors").items():
        good = isinstance(labels, Mapping) and all(
            isinstance(value, str) and _QUALIFIED.match(str(key)) and _LABEL_VALUE.match(value)
            for key, value in labels.items()
        )
        if not good:
            raise reader.wrong("node_selectors", f"must map labels to values for '{kind}'")
        found[kind] = MappingProxyType(dict(labels))
    return MappingProxyType(found)


def _tolerations(reader: _Reader) -> Mapping[str, tuple[Toleration, ...]]:
    return MappingProxyType(
        {
            kind: tuple(_toleration(reader, kind, one) for one in (listed if isinstance(listed, list) else [listed]))
            for kind, listed in reader.mapping("tolerations").items()
        }
    )


def _toleration(reader: _Reader, kind: str, data: object) -> Toleration:
    if not isinstance(data, Mapping) or set(data) - set(Toleration.__dataclass_fields__):
        raise reader.wrong("tolerations", f"must be a list of objects with key, operator, value, effect for '{kind}'")
    told = Toleration(**data)
    if not all(isinstance(value, str) for value in data.values()) or told.effect not in _EFFECTS:
        raise reader.wrong("tolerations", f"has an effect for '{kind}' that Kubernetes does not know")
    if told.operator not in {"Equal", "Exists"} or (told.operator == "Exists" and told.value):
        raise reader.wrong("tolerations", f"must use the operator Equal, or Exists without a value, for '{kind}'")
    if not told.key and told.operator != "Exists":
        raise reader.wrong("tolerations", f"needs a key for '{kind}'")
    return told


def _capacity(reader: _Reader) -> Capacity | None:
    listed = reader.data.get("capacity")
    if listed is None:
        return None
    machines = []
    try:
        for one in listed:
            total = Resources(
                cpus=float(one["cpus"]),
                memory_mib=int(one["memory_mib"]),
                gpus=int(one.get("gpus", 0)),
                gpu_type=str(one.get("gpu_type", "")),
            )
            machines += [
                NodeCapacity(f"{one.get('name', 'node')}-{number}", total, total)
                for number in range(int(one.get("count", 1)))
            ]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise reader.wrong(
            "capacity", "must be a list of objects with cpus and memory_mib, and perhaps gpus, gpu_type, name, count"
        ) from error
    return Capacity(tuple(machines))
