"""Settings of one Slurm cluster, parsed and validated. Pure: a JSON object in, a frozen SlurmConfig out.

`SlurmConfig.from_data` raises ValueError with a sentence that names the setting; a SlurmConfig is always valid.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from runtime.backends.settings_reader import SettingsReader

# Patterns of the settings' valid values.
_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z")
_PARTITIONS = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.,-]{0,254}\Z")
_CONSTRAINT = re.compile(r"^[A-Za-z0-9_.&|()*!\[\],-]{1,255}\Z")
_GPU = re.compile(r"^[A-Za-z0-9_.-]{1,63}\Z")
_INTERFACE = re.compile(r"^[A-Za-z0-9_.:-]{1,15}\Z")  # Linux allows 15 characters
_PATH = re.compile(r"^/[^\0\n]*\Z")
_REGISTRY = re.compile(r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?\Z")
_EMPTY: Mapping[str, Any] = MappingProxyType({})
"""A read-only default for mappings, since the config is frozen."""


@dataclass(frozen=True)
class Placement:
    """Where the runs of a node type are placed; an empty value leaves the choice to Slurm."""

    partition: str = ""
    constraint: str = ""
    """Features that machines must have, as in `sbatch --constraint`."""
    qos: str = ""
    gpu: str = ""
    """The type of GPU in Slurm's Gres, such as `a100`; empty: any."""

    @property
    def features(self) -> frozenset[str]:
        """The features that every machine must have. Empty for a constraint with operators other than `&`.

        For such a constraint the computed capacity has too many machines, but Slurm places the nodes correctly.
        """
        parts = self.constraint.split("&")
        return frozenset(parts) if all(_NAME.match(part) for part in parts) else frozenset()


@dataclass(frozen=True)
class SlurmConfig:
    """The settings of one cluster.

    The keys of `node_types` are names of node types; the placement for "" applies to all other types.
    """

    name: str
    conf: str = ""
    """Slurm's configuration file; empty: the default of the command line tools."""
    bin: str = ""
    """The folder of the command line tools; empty: they are on the PATH."""
    node_types: Mapping[str, Placement] = field(default_factory=lambda: MappingProxyType({"": Placement()}))
    account: str = ""
    """Slurm account of the jobs; empty: the service user's default."""
    accounts: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    """Slurm account of each organization, by its slug; all other organizations use `account`."""
    accounting: bool = False
    """Whether slurmdbd answers `sacct`, which knows jobs that the controller has forgotten."""
    gpu_types: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    """The name of a GPU type in node specs, for each type in Slurm's Gres; other types keep Slurm's name."""
    interface: str = ""
    """Network interface of the compute nodes for collectives; empty: the interface by which they reach node 0."""
    bubblewrap: str = ""
    """Path of bwrap on the compute nodes; empty: it is on the PATH."""
    pending_seconds: int = 86400
    """How long a job may wait in Slurm's queue. Then the run ends with `no_capacity`, and the console retries it."""
    start_seconds: int = 300
    """How long the nodes may take to find each other after Slurm has started the first."""
    containers: str = ""
    """How the compute nodes run customers' own images: `oci` (skopeo pulls, umoci unpacks); empty: they run none."""
    containers_bin: str = ""
    """The folder of skopeo and umoci on the compute nodes; empty: they are on the PATH."""
    image_mib: int = 50 * 1024
    """Disk limit of one image during its import. The pulled layers and the unpacked files count together."""
    import_seconds: int = 900
    """How long the import of an image may take. The machines of the run are held meanwhile, free of charge."""
    insecure_registries: tuple[str, ...] = ()
    """Registries that may be reached over HTTP, or without a valid certificate, by their host and port."""
    disk_mib: int = 50 * 1024
    """Disk limit of runs whose spec has none."""
    poll_seconds: int = 5
    """Interval between two queries of Slurm's queue by one process of the console."""
    command_seconds: float = 20.0
    """Timeout of one command of Slurm. A busy controller may take several seconds to answer."""

    @classmethod
    def from_data(cls, name: str, data: Mapping[str, Any]) -> SlurmConfig:
        """Parse one cluster's value in the setting TRAINYARD_CLUSTERS. Raises ValueError, worded for administrators."""
        reader = SettingsReader(name, data)
        reader.refuse_unknown({"backend", *cls.__dataclass_fields__} - {"name"}, backend="slurm")
        return cls(
            name=name,
            conf=reader.matching("conf", "", _PATH, "an absolute path"),
            bin=reader.matching("bin", "", _PATH, "an absolute path"),
            node_types=_node_types(reader),
            account=reader.matching("account", "", _NAME, "an account's name"),
            accounts=_accounts(reader),
            accounting=reader.flag("accounting"),
            gpu_types=reader.string_mapping("gpu_types"),
            interface=reader.matching("interface", "", _INTERFACE, "a network interface's name"),
            bubblewrap=reader.matching("bubblewrap", "", _PATH, "an absolute path"),
            pending_seconds=reader.number("pending_seconds", cls.pending_seconds, minimum=1),
            start_seconds=reader.number("start_seconds", cls.start_seconds, minimum=10),
            containers=reader.choice("containers", "", ("", "oci")),
            containers_bin=reader.matching("containers_bin", "", _PATH, "an absolute path"),
            image_mib=reader.number("image_mib", cls.image_mib, minimum=1),
            import_seconds=reader.number("import_seconds", cls.import_seconds, minimum=1),
            insecure_registries=_registries(reader),
            disk_mib=reader.number("disk_mib", cls.disk_mib, minimum=1),
            poll_seconds=reader.number("poll_seconds", cls.poll_seconds, minimum=1),
            command_seconds=float(reader.number("command_seconds", int(cls.command_seconds), minimum=1)),
        )

    def placement(self, node_kind: str) -> Placement:
        """Return where the nodes of this kind are placed: as set for the kind, or else as set for ""."""
        return self.node_types.get(node_kind) or self.node_types.get("") or Placement()

    def organization_account(self, organization_slug: str) -> str:
        """Return the Slurm account that an organization's jobs use; empty: the service user's default."""
        return self.accounts.get(organization_slug, self.account)


def _node_types(reader: SettingsReader) -> Mapping[str, Placement]:
    """Parse the setting `node_types`: an object with the fields of a Placement for each node type."""
    patterns = {"partition": _PARTITIONS, "constraint": _CONSTRAINT, "qos": _NAME, "gpu": _GPU}
    placements: dict[str, Placement] = {}
    for kind, data in reader.mapping("node_types").items():
        is_valid = isinstance(data, Mapping) and all(
            setting in patterns and isinstance(value, str) and patterns[setting].match(value)
            for setting, value in data.items()
        )
        if not is_valid:
            raise reader.error(
                "node_types", f"must be an object with partition, constraint, qos or gpu (texts) for '{kind}'"
            )
        placements[kind] = Placement(**data)
    return MappingProxyType(placements or {"": Placement()})


def _accounts(reader: SettingsReader) -> Mapping[str, str]:
    accounts = reader.string_mapping("accounts")
    if not all(_NAME.match(account) for account in accounts.values()):
        raise reader.error("accounts", "must map organizations to names of accounts")
    return accounts


def _registries(reader: SettingsReader) -> tuple[str, ...]:
    registries = reader.data.get("insecure_registries", [])
    if not isinstance(registries, list) or not all(
        isinstance(registry, str) and _REGISTRY.match(registry) for registry in registries
    ):
        raise reader.error("insecure_registries", "must be a list of hosts, such as registry.example.com:5000")
    return tuple(registries)
