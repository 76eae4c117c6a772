"""The clusters this installation runs on, each made from settings once per process.

A cluster is known by its name in TRAINYARD_CLUSTERS; no name is the first of them. The one rule: whoever asks a cluster
is ready for BackendUnavailable, which one that settings no longer name raises too.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from django.conf import settings

from billing.models import NodeSpec
from jobs.circuit import guarded
from runtime import specs
from runtime.backends.base import Backend, create
from runtime.errors import BackendUnavailable
from runtime.specs import Resources
from storage.models import Image

LEGACY = "local"
"""What attempts of before clusters had names were run by: the first cluster."""


@cache
def cluster(name: str = "") -> Backend:
    """The cluster of this name. Raises BackendUnavailable for one that settings don't name."""
    chosen = cluster_named(name)
    if chosen != name:
        return cluster(chosen)
    if name not in settings.TRAINYARD_CLUSTERS:
        raise BackendUnavailable(f"TRAINYARD_CLUSTERS names no cluster '{name}'.")
    return _create(name)


def cluster_names() -> list[str]:
    """Every cluster of the settings, the first first."""
    return list(settings.TRAINYARD_CLUSTERS)


def cluster_named(name: str) -> str:
    """The cluster that a node spec's or an attempt's column means."""
    if name and (name != LEGACY or name in settings.TRAINYARD_CLUSTERS):
        return name
    return cluster_names()[0]


def columns_of(name: str) -> set[str]:
    """What the columns of node specs and attempts may say that means this cluster."""
    return {each for each in (name, "", LEGACY) if cluster_named(each) == name}


def runs_root(name: str) -> Path:
    """Where the runs of a cluster lie, as the console sees it."""
    root: Path = settings.TRAINYARD_RUNS_ROOT
    return root if settings.TRAINYARD_CLUSTERS[name] is None else root / ".clusters" / name


def resources_of(spec: NodeSpec) -> Resources:
    """What one node of a spec asks of its cluster."""
    return Resources(
        cpus=float(spec.cpus), memory_mib=spec.memory_mib, gpus=spec.gpus, gpu_type=spec.gpu_type if spec.gpus else ""
    )


def image_of(image: Image) -> specs.Image:
    """An image of the catalogue as a cluster knows it."""
    return specs.Image(builtin=image.name) if image.is_builtin else specs.Image(reference=image.reference)


def _create(name: str) -> Backend:
    config = settings.TRAINYARD_CLUSTERS[name]
    if config is not None:
        return guarded(name, create("kubernetes", config=config, root=runs_root(name)))
    return create(
        "local",
        root=runs_root(name),
        images_root=settings.TRAINYARD_IMAGES_ROOT,
        cpus=settings.LOCAL_CPUS,
        memory_mib=settings.LOCAL_MEMORY_MIB,
        disk_mib=settings.LOCAL_DISK_MIB,
        warm_seconds=settings.LOCAL_WARM_SECONDS,
        network=settings.TRAINYARD_RUN_NETWORK,
    )
