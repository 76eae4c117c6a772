"""The starter catalogue, by `manage.py seed_catalogue`."""

import io
from decimal import Decimal

import pytest
from django.core.management import call_command
from django.db import transaction

from billing.models import NodeSpec, PriceBook
from billing.selectors import offered_specs
from jobs.catalogue import seed
from jobs.models import Product
from runtime.specs import Capacity, NodeCapacity, Resources
from storage.models import Image

pytestmark = pytest.mark.django_db


@pytest.mark.usefixtures("backend")  # the command asks the cluster for its GPUs
def test_it_fills_an_empty_catalogue_once():
    output = io.StringIO()
    for _ in range(2):
        call_command("seed_catalogue", stdout=output)
    assert output.getvalue().splitlines() == ["Created the starter catalogue.", "The catalogue is not empty."]
    assert Product.objects.count() == 2
    assert set(Image.objects.values_list("name", flat=True)) >= {"pytorch", "tensorflow", "horovod"}
    assert PriceBook.objects.get().published_at
    offered = offered_specs("USD")
    assert [row.spec.name for row in offered] == ["nano", "small", "medium"]
    assert all(row.hourly_minor for row in offered)
    assert offered[0].spec.cpus * 4 <= 2, "four of the smallest fit two cores"


def test_a_cluster_with_gpus_sells_them_if_it_responds(backend, monkeypatch):
    backend.available = False
    with transaction.atomic():
        assert seed() is True
        assert not NodeSpec.objects.filter(gpus__gt=0).exists()
        transaction.set_rollback(True)  # so that the next call finds an empty catalogue again
    gpus = Resources(32, 65536, 4, "H200")
    monkeypatch.setattr(backend, "capacity", lambda: Capacity((NodeCapacity("gpu-1", gpus, gpus),)))
    seed()
    spec = NodeSpec.objects.get(name="gpu")  # a quarter of the machine, which has four GPUs
    assert (spec.gpus, spec.gpu_type, spec.cpus, spec.memory_mib) == (1, "H200", Decimal(8), 16384)
    assert spec.prices.count() == 3, "per hour, per hour on many nodes, and per epoch"
