"""Settings of one Kubernetes cluster, parsed and validated. Pure: a JSON object in, a frozen ClusterConfig out.

`ClusterConfig.from_data` raises ValueError with a sentence that names the setting; a ClusterConfig is always valid.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from runtime.backends.settings_reader import DNS_LABEL, SettingsReader
from runtime.specs import Capacity, Flavour, NodeCapacity, Resources

# Names that the Kubernetes API accepts, with the API's limits of their lengths.
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\Z")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?\Z")
_QUALIFIED_NAME = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z")
_EFFECTS = frozenset({"", "NoSchedule", "PreferNoSchedule", "NoExecute"})
"""Effects of a taint that a toleration may name; "" tolerates all."""
# A read-only default for mappings, since the config is frozen.
_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Volume:
    """The storage that Pods mount: either a `claim` or a `host_path`."""

    root: str
    """The folder at which the console sees this storage."""
    claim: str = ""
    """A ReadWriteMany PersistentVolumeClaim of this name in every namespace of runs."""
    host_path: str = ""
    """A folder that exists on each machine."""
    shared: bool = True
    """Whether the console sees the files that Pods write. If not, `host_path` is a different folder on each machine,
    logs come from the API server, and checkpoints are in an emptyDir of their Pod, so they are lost with it."""


@dataclass(frozen=True)
class Toleration:
    """A toleration of the Pods of a node kind; fields as in the Kubernetes API."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


@dataclass(frozen=True)
class PackageIndex:
    """The package index from which Pods install customers' requirements."""

    url: str
    networks: tuple[str, ...]
    """CIDRs of the addresses that serve the index and its files."""
    certificate: str = ""
    """A file of trusted certificates, as the console sees it; empty: the public authorities."""

    @property
    def port(self) -> int:
        """The port of the index, and of its files."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)


@dataclass(frozen=True)
class ClusterConfig:
    """The settings of one cluster. Without `context`, `kubeconfig` and `in_cluster`, the default kubeconfig is used.

    The keys of `node_selectors` and `tolerations` are node kinds, the names of node specs. The key "" applies to all
    kinds without a key.
    """

    name: str
    volume: Volume
    namespace: str = "trainyard-runs"
    context: str = ""
    kubeconfig: str = ""
    in_cluster: bool = False
    images: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    """Registry reference of each built-in image."""
    flavours: Mapping[str, Flavour] = field(default_factory=lambda: _EMPTY)
    """For which hardware each built-in image in `images` was built: `cpu` or `cuda`."""
    pythons: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    """Path of the image's Python, by a built-in image's name or a reference; default: `python3` on the image's PATH."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets with which every Pod pulls its image, in addition to the run's own pull Secret."""
    queue: str = ""
    """Kueue LocalQueue that admits runs, all Pods at once; empty: no Kueue."""
    priority_class: str = ""
    """PriorityClass of the Pods; empty: the cluster's default."""
    node_selectors: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: _EMPTY)
    tolerations: Mapping[str, tuple[Toleration, ...]] = field(default_factory=lambda: _EMPTY)
    spread: str = "pack"
    """`pack`: prefer to place the Pods of a run in one topology domain; `spread`: prefer different domains."""
    topology_key: str = "kubernetes.io/hostname"
    """The label of Kubernetes Nodes whose equal values form a topology domain."""
    namespace_per_organization: bool = False
    """Whether each organization's runs have a namespace of their own (`names.organization_namespace`)."""
    gang_seconds: int = 300
    """How long scheduling all Pods may take, from the Job's start. Then a run with only some scheduled Pods ends."""
    start_seconds: int = 600
    """How long scheduled Pods may take to start, including image pulls. Then the run is ended, free of charge."""
    uid: int = 10001
    """User that Pods run as."""
    gpu_resource: str = "nvidia.com/gpu"
    """The extended resource by which Pods request GPUs."""
    gpu_label: str = "nvidia.com/gpu.product"
    """The label of Kubernetes Nodes whose value is their GPU type."""
    disk_mib: int = 50 * 1024
    """Disk limit of runs whose spec has none."""
    request_seconds: float = 10.0
    """Timeout of one API request."""
    capacity: Capacity | None = None
    """Capacity of a cluster whose Nodes the console has no permission to list; for an elastic one, its maximum."""
    elastic: bool = False
    """Whether an autoscaler adds machines for pending Pods. Then the present Nodes do not limit the size of runs."""
    package_index: PackageIndex | None = None
    """None if orders on this cluster cannot have a requirements file."""

    @property
    def ends_partial_placement(self) -> bool:
        """Whether the backend ends runs that are only partly scheduled; Kueue admits all Pods or none."""
        return not self.queue

    @classmethod
    def from_data(cls, name: str, data: Mapping[str, Any]) -> ClusterConfig:
        """Parse one cluster's value in the setting TRAINYARD_CLUSTERS. Raises ValueError, worded for administrators."""
        reader = SettingsReader(name, data)
        reader.refuse_unknown({"backend", *cls.__dataclass_fields__} - {"name"}, backend="kubernetes")
        if data.get("in_cluster") and (data.get("kubeconfig") or data.get("context")):
            raise reader.error("in_cluster", "excludes kubeconfig and context: set one of them")
        return cls(
            name=name,
            volume=_volume(reader),
            namespace=reader.matching("namespace", cls.namespace, DNS_LABEL, "a namespace's name"),
            context=reader.text("context"),
            kubeconfig=reader.text("kubeconfig"),
            in_cluster=reader.flag("in_cluster"),
            images=reader.string_mapping("images"),
            flavours=_flavours(reader),
            pythons=reader.string_mapping("pythons"),
            image_pull_secrets=_names(reader, "image_pull_secrets"),
            queue=reader.matching("queue", "", _DNS_SUBDOMAIN, "a LocalQueue's name"),
            priority_class=reader.matching("priority_class", "", _DNS_SUBDOMAIN, "a PriorityClass's name"),
            node_selectors=_selectors(reader),
            tolerations=_tolerations(reader),
            spread=reader.choice("spread", cls.spread, ("pack", "spread")),
            topology_key=reader.matching("topology_key", cls.topology_key, _QUALIFIED_NAME, "a label's name"),
            namespace_per_organization=reader.flag("namespace_per_organization"),
            # An autoscaler needs minutes to add machines.
            gang_seconds=reader.number("gang_seconds", 900 if reader.flag("elastic") else cls.gang_seconds, minimum=1),
            start_seconds=reader.number("start_seconds", cls.start_seconds, minimum=1),
            uid=reader.number("uid", cls.uid, minimum=1),
            gpu_resource=reader.matching("gpu_resource", cls.gpu_resource, _QUALIFIED_NAME, "a resource's name"),
            gpu_label=reader.matching("gpu_label", cls.gpu_label, _QUALIFIED_NAME, "a label's name"),
            disk_mib=reader.number("disk_mib", cls.disk_mib, minimum=1),
            request_seconds=float(reader.number("request_seconds", int(cls.request_seconds), minimum=1)),
            capacity=_capacity(reader),
            elastic=reader.flag("elastic"),
            package_index=_package_index(reader),
        )


def _volume(reader: SettingsReader) -> Volume:
    """Parse the setting `volume`."""
    if not reader.mapping("volume"):
        raise reader.error("volume", 'must be {"claim": NAME, "root": PATH} or {"host_path": PATH, "root": PATH}')
    volume_reader = SettingsReader(reader.cluster, reader.mapping("volume"))
    known_settings = {"claim", "host_path", "root", "shared"}
    for setting in volume_reader.data:
        if setting not in known_settings:
            raise reader.error("volume", f"has no '{setting}'; its settings are {', '.join(sorted(known_settings))}")
    volume = Volume(
        root=volume_reader.text("root"),
        claim=volume_reader.matching("claim", "", _DNS_SUBDOMAIN, "a PersistentVolumeClaim's name"),
        host_path=volume_reader.text("host_path"),
        shared=volume_reader.flag("shared", default=True),
    )
    if bool(volume.claim) == bool(volume.host_path):
        raise reader.error("volume", "needs either a claim or a host_path")
    if volume.claim and not volume.shared:
        raise reader.error("volume", "is a claim, so 'shared' must be true: mount the claim at its root")
    for setting, path in (("root", volume.root), ("host_path", volume.host_path)):
        if (path or setting == "root") and not _is_folder_path(path):
            raise reader.error("volume", f"needs an absolute path as its {setting}, without '..' or ':'")
    return volume


def _package_index(reader: SettingsReader) -> PackageIndex | None:
    """Parse the setting `package_index`; return None if it is not set."""
    data = reader.mapping("package_index")
    if not data:
        return None
    networks = data.get("networks", [])
    if set(data) - {"url", "networks", "certificate"} or not isinstance(networks, list) or not networks:
        raise reader.error(
            "package_index", 'must be {"url": URL, "networks": [CIDR, ...]}, optionally with certificate'
        )
    if not all(isinstance(text, str) for text in (data.get("url"), data.get("certificate", ""), *networks)):
        raise reader.error("package_index", "must have strings as its url, certificate and networks")
    index = PackageIndex(str(data["url"]), tuple(networks), str(data.get("certificate", "")))
    try:
        parts = urlsplit(index.url)
        # Reading the port raises ValueError if it is not a valid port number.
        is_valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and index.port > 0
        for network in networks:
            ipaddress.ip_network(network)
    except ValueError as error:
        raise reader.error("package_index", f"is not valid: {error}") from None
    if not is_valid or parts.username or parts.password:
        # Packages run their own code when they are built, and it could read a password.
        raise reader.error("package_index", "needs an http or https address as its url, without a password")
    return index


def _is_folder_path(path: str) -> bool:
    return path.startswith("/") and bool(path.strip("/")) and ".." not in path.split("/") and ":" not in path


def _flavours(reader: SettingsReader) -> Mapping[str, Flavour]:
    names = reader.string_mapping("flavours")
    if not set(names.values()) <= set(Flavour):
        raise reader.error("flavours", f"must map names of images to {' or '.join(Flavour)}")
    return MappingProxyType({name: Flavour(flavour) for name, flavour in names.items()})


def _names(reader: SettingsReader, setting: str) -> tuple[str, ...]:
    value = reader.data.get(setting, [])
    if not isinstance(value, list) or not all(isinstance(name, str) and _DNS_SUBDOMAIN.match(name) for name in value):
        raise reader.error(setting, "must be a list of names")
    return tuple(value)


def _selectors(reader: SettingsReader) -> Mapping[str, Mapping[str, str]]:
    """Parse the setting `node_selectors`: labels and their values, by node kind."""
    selectors: dict[str, Mapping[str, str]] = {}
    for kind, labels in reader.mapping("node_selectors").items():
        is_valid = isinstance(labels, Mapping) and all(
            isinstance(value, str) and _QUALIFIED_NAME.match(str(key)) and _LABEL_VALUE.match(value)
            for key, value in labels.items()
        )
        if not is_valid:
            raise reader.error("node_selectors", f"must map labels to values for '{kind}'")
        selectors[kind] = MappingProxyType(dict(labels))
    return MappingProxyType(selectors)


def _tolerations(reader: SettingsReader) -> Mapping[str, tuple[Toleration, ...]]:
    """Parse the setting `tolerations`: for each node kind, a list of objects, or one object."""
    tolerations: dict[str, tuple[Toleration, ...]] = {}
    for kind, value in reader.mapping("tolerations").items():
        entries = value if isinstance(value, list) else [value]
        tolerations[kind] = tuple(_toleration(reader, kind, entry) for entry in entries)
    return MappingProxyType(tolerations)


def _toleration(reader: SettingsReader, kind: str, data: object) -> Toleration:
    """Parse one toleration of a node kind."""
    if not isinstance(data, Mapping) or set(data) - set(Toleration.__dataclass_fields__):
        raise reader.error("tolerations", f"must be a list of objects with key, operator, value, effect for '{kind}'")
    if not all(isinstance(value, str) for value in data.values()):
        raise reader.error("tolerations", f"must have strings as its key, operator, value and effect for '{kind}'")
    toleration = Toleration(**data)
    if toleration.effect not in _EFFECTS:
        raise reader.error("tolerations", f"has an unknown effect for '{kind}'")
    if toleration.operator not in {"Equal", "Exists"} or (toleration.operator == "Exists" and toleration.value):
        raise reader.error("tolerations", f"must use the operator Equal, or Exists without a value, for '{kind}'")
    if not toleration.key and toleration.operator != "Exists":
        raise reader.error("tolerations", f"needs a key for '{kind}'")
    return toleration


def _capacity(reader: SettingsReader) -> Capacity | None:
    """Parse the setting `capacity`, a list of machines, each with the `count` of equal ones; None if it is not set."""
    entries = reader.data.get("capacity")
    if entries is None:
        return None
    machines = []
    try:
        for entry in entries:
            total = Resources(
                cpus=float(entry["cpus"]),
                memory_mib=int(entry["memory_mib"]),
                gpus=int(entry.get("gpus", 0)),
                gpu_type=str(entry.get("gpu_type", "")),
            )
            count = int(entry.get("count", 1))
            # A JSON file may have NaN and Infinity.
            if not 0 < total.cpus < math.inf or total.memory_mib <= 0 or total.gpus < 0 or count < 0:
                raise ValueError("A machine has more than 0 CPUs and more than 0 MiB of memory.")  # noqa: TRY301
            machines += [
                NodeCapacity(f"{entry.get('name', 'node')}-{index}", total, free=total) for index in range(count)
            ]
    except (TypeError, KeyError, ValueError, OverflowError, AttributeError) as error:
        raise reader.error(
            "capacity",
            "must be a list of objects with cpus and memory_mib, which are above 0, and optionally gpus, gpu_type, "
            "name, count",
        ) from error
    return Capacity(tuple(machines))
