"""Parse the setting TRAINYARD_CLUSTERS, a JSON object, into the settings of each cluster by its name.

An invalid value stops the process at start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from django.core.exceptions import ImproperlyConfigured

from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.slurm.config import SlurmConfig

LOCAL = "local"
KUBERNETES = "kubernetes"
SLURM = "slurm"
"""The values of a cluster's `backend`."""
DEFAULT = "default"
"""The name of the only cluster if the setting is empty."""
MAX_NAME_LENGTH = 32
"""The length of the database columns that hold a cluster's name."""
EXAMPLE = '{"default": {"backend": "local"}}'
"""A valid value, which error messages quote."""

Config = ClusterConfig | SlurmConfig | None
"""The settings of one cluster; None: the cluster is this machine, whose settings are LOCAL_CPUS and so on."""


def parse(text: str, *, backend: str = LOCAL) -> Mapping[str, Config]:
    """Return the clusters in the order of `text`, the value of TRAINYARD_CLUSTERS. Raises ImproperlyConfigured.

    If `text` is empty, there is one cluster, `default`, which is this machine. `backend` is the value of the older
    setting RUNTIME_BACKEND, which must be `local` in this case.
    """
    if not text.strip():
        if backend != LOCAL:
            raise ImproperlyConfigured(
                f"RUNTIME_BACKEND is '{backend}', but without TRAINYARD_CLUSTERS it can only be '{LOCAL}'. Set "
                f"TRAINYARD_CLUSTERS, for example to {EXAMPLE}."
            )
        return {DEFAULT: None}
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ImproperlyConfigured(
            f"TRAINYARD_CLUSTERS is not valid JSON: {error}. A valid value is {EXAMPLE}."
        ) from None
    if not isinstance(data, dict) or not data:
        raise ImproperlyConfigured(f"TRAINYARD_CLUSTERS must be a JSON object that names a cluster, such as {EXAMPLE}.")
    clusters = {name: _parse_cluster(name, value) for name, value in data.items()}
    if list(clusters.values()).count(None) > 1:
        raise ImproperlyConfigured("TRAINYARD_CLUSTERS: only one cluster can be local, since it is this machine.")
    return clusters


def _parse_cluster(name: str, value: object) -> Config:
    """Return the settings of the cluster `name`; `value` is its part of the JSON. Raises ImproperlyConfigured."""
    if len(name) > MAX_NAME_LENGTH:
        raise ImproperlyConfigured(f"TRAINYARD_CLUSTERS: '{name}' is longer than {MAX_NAME_LENGTH} characters.")
    # Before there were Slurm clusters, a cluster that was not local needed no `backend`.
    backend = value.get("backend", KUBERNETES) if isinstance(value, Mapping) else KUBERNETES
    if backend == LOCAL and isinstance(value, Mapping):  # only a mapping can be LOCAL here; the test is for mypy
        if unknown := sorted(set(value) - {"backend"}):
            raise ImproperlyConfigured(
                f"TRAINYARD_CLUSTERS: the local cluster '{name}' has the unknown key '{unknown[0]}'. Set its resources "
                "with LOCAL_CPUS, LOCAL_MEMORY_MIB and the other LOCAL_* settings."
            )
        return None
    # A tuple, because `backend` may be a list, for which a set raises TypeError.
    if backend not in (KUBERNETES, SLURM):
        raise ImproperlyConfigured(
            f"TRAINYARD_CLUSTERS: the cluster '{name}' has the unknown backend '{backend}'. Choose kubernetes, local "
            "or slurm."
        )
    try:
        # `from_data` checks that the value is an object.
        if backend == SLURM:
            return SlurmConfig.from_data(name, value)  # type: ignore[arg-type]
        return ClusterConfig.from_data(name, value)  # type: ignore[arg-type]
    except ValueError as error:
        raise ImproperlyConfigured(f"TRAINYARD_CLUSTERS: {error}") from None
