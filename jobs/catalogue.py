"""The starter catalogue: images, node specs, prices and products that a new installation can sell at once.

It fills an empty catalogue only, so repeating it changes nothing that an administrator made.
"""

from __future__ import annotations

from decimal import Decimal
from typing import NamedTuple

from django.conf import settings
from django.db import transaction
from django.utils.translation import gettext_noop

from billing.models import NodeSpec, Price, PriceBook
from billing.pricebooks import publish
from billing.pricing import Mode, PriceKind
from jobs.clusters import cluster
from jobs.models import Product
from runtime.errors import RuntimeFault
from storage import images


class StarterSpec(NamedTuple):
    """A node spec of the catalogue with its prices in minor units: of an hour, and of an epoch at a fixed price."""

    name: str
    title: str
    description: str
    cpus: Decimal
    memory_mib: int
    hourly: Decimal
    fixed_epoch: Decimal


SPECS = (
    StarterSpec(
        "nano",
        "Nano",
        "Half a core: for trying out, and for many small nodes on one machine.",
        cpus=Decimal("0.5"),
        memory_mib=1024,
        hourly=Decimal(90),
        fixed_epoch=Decimal("0.8"),
    ),
    StarterSpec(
        "small",
        "Small",
        "One core.",
        cpus=Decimal(1),
        memory_mib=2048,
        hourly=Decimal(160),
        fixed_epoch=Decimal("1.2"),
    ),
    StarterSpec(
        "medium",
        "Medium",
        "Two cores.",
        cpus=Decimal(2),
        memory_mib=4096,
        hourly=Decimal(300),
        fixed_epoch=Decimal(2),
    ),
)
GPU_HOURLY = Decimal(400)
GPU_FIXED_EPOCH = Decimal(4)
"""Prices of one GPU node in minor units, per hour and per epoch. Like all prices here, they are examples to change."""
DISCOUNT_FROM_NODES = 4
DISCOUNT_FACTOR = Decimal("0.9")
"""Runs on at least DISCOUNT_FROM_NODES nodes pay DISCOUNT_FACTOR times the price per hour."""
REFERENCE_SECONDS_PER_EPOCH = Decimal(20)
"""Time of an epoch on one node until runs of the same code are measured. An example too, for a small training."""
MIN_CHARGE = 5
"""Minimum charge of a run in minor units, so that runs of a second are not free."""


@transaction.atomic
def seed() -> bool:
    """Fill an empty catalogue. Return whether it was empty."""
    images.ensure_builtin_images()
    if NodeSpec.objects.exists() or PriceBook.objects.exists() or Product.objects.exists():
        return False
    book = PriceBook.objects.create(name="Starter prices", currency=settings.CURRENCY)
    for number, starter in enumerate(SPECS, start=1):
        spec = NodeSpec.objects.create(
            name=starter.name,
            title=starter.title,
            description=starter.description,
            cpus=starter.cpus,
            memory_mib=starter.memory_mib,
            position=10 * number,
        )
        _create_prices(book, spec, starter.hourly, starter.fixed_epoch)
    _create_gpu_spec(book)
    Price.objects.create(book=book, kind=PriceKind.MINIMUM, amount=Decimal(MIN_CHARGE))
    publish(book=book)
    Product.objects.create(
        name="metered",
        title=gettext_noop("Metered training"),
        description=gettext_noop("You pay the node time you use, by the second, and never more than the ceiling."),
        mode=Mode.METERED,
        reference_seconds_per_epoch=REFERENCE_SECONDS_PER_EPOCH,
        position=10,
    )
    Product.objects.create(
        name="fixed",
        title=gettext_noop("Fixed price for each epoch"),
        description=gettext_noop(
            "A price for each epoch and node. It includes the running time in the quote; more is charged by the second."
        ),
        mode=Mode.FIXED,
        reference_seconds_per_epoch=REFERENCE_SECONDS_PER_EPOCH,
        headroom=Decimal(2),
        position=20,
    )
    return True


def _create_prices(book: PriceBook, spec: NodeSpec, hourly: Decimal, fixed_epoch: Decimal) -> None:
    """Create the prices of a node spec: per hour, per hour with the discount, and per epoch."""
    # Kind, product ("" for all products), minimum number of nodes, and amount.
    rows = [
        (PriceKind.NODE_HOUR, "", 1, hourly),
        (PriceKind.NODE_HOUR, "", DISCOUNT_FROM_NODES, hourly * DISCOUNT_FACTOR),
        (PriceKind.FIXED_EPOCH, "fixed", 1, fixed_epoch),
    ]
    for kind, product, nodes_from, amount in rows:
        Price.objects.create(
            book=book, kind=kind, product=product, node_spec=spec, nodes_from=nodes_from, amount=amount
        )


def _create_gpu_spec(book: PriceBook) -> None:
    """Create a node spec with one GPU and its prices, if the first cluster, which runs all starter specs, has GPUs."""
    try:
        machines = cluster().capacity().machines
    except RuntimeFault:
        return  # the cluster does not answer; an administrator can add the spec later
    gpu = next((machine.total for machine in machines if machine.total.gpus), None)
    if gpu is None:
        return
    spec = NodeSpec.objects.create(
        name="gpu",
        title=gpu.gpu_type or "GPU",
        description="One GPU with its share of the machine.",
        cpus=Decimal(max(1, int(gpu.cpus / gpu.gpus))),
        memory_mib=gpu.memory_mib // gpu.gpus,
        gpus=1,
        gpu_type=gpu.gpu_type,
        position=100,
    )
    _create_prices(book, spec, GPU_HOURLY, GPU_FIXED_EPOCH)
