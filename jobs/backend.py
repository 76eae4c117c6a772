"""The one cluster this installation runs on, made from settings once per process."""

from __future__ import annotations

from functools import cache

from django.conf import settings

from billing.models import NodeSpec
from runtime import specs
from runtime.backends.base import Backend, create
from runtime.specs import Resources
from storage.models import Image


@cache
def cluster() -> Backend:
    """The backend that settings name."""
    return create(
        settings.RUNTIME_BACKEND,
        root=settings.TRAINYARD_RUNS_ROOT,
        images_root=settings.TRAINYARD_IMAGES_ROOT,
        cpus=settings.LOCAL_CPUS,
        memory_mib=settings.LOCAL_MEMORY_MIB,
        disk_mib=settings.LOCAL_DISK_MIB,
        warm_seconds=settings.LOCAL_WARM_SECONDS,
        network=settings.TRAINYARD_RUN_NETWORK,
    )


def resources_of(spec: NodeSpec) -> Resources:
    """What one node of a spec asks of the cluster."""
    return Resources(
        cpus=float(spec.cpus), memory_mib=spec.memory_mib, gpus=spec.gpus, gpu_type=spec.gpu_type if spec.gpus else ""
    )


def image_of(image: Image) -> specs.Image:
    """An image of the catalogue as the cluster knows it."""
    return specs.Image(builtin=image.name) if image.is_builtin else specs.Image(reference=image.reference)
