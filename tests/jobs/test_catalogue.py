from decimal import Decimal

import pytest

from billing.models import NodeSpec, Price, PriceBook
from billing.selectors import offered_specs
from jobs.catalogue import seed
from jobs.models import Product
from runtime.specs import Capacity, NodeCapacity, Resources
from storage.models import Image

pytestmark = pytest.mark.django_db


def test_it_fills_an_empty_catalogue_once(backend):
    assert seed() is True
    before = [model.objects.count() for model in (NodeSpec, PriceBook, Price, Product, Image)]
    assert seed() is False
    assert [model.objects.count() for model in (NodeSpec, PriceBook, Price, Product, Image)] == before
    assert set(Image.objects.values_list("name", flat=True)) >= {"pytorch", "tensorflow", "horovod"}
    assert PriceBook.objects.get().published_at


def test_the_smallest_node_comes_first_and_four_of_it_fit_two_cores(backend):
    seed()
    offered = offered_specs("USD")
    assert [row.spec.name for row in offered] == ["nano", "small", "medium"]
    assert all(row.hourly_minor for row in offered)
    assert offered[0].spec.cpus * 4 <= 2


def test_what_an_administrator_made_is_left_alone(backend):
    Product.objects.create(name="ours", title="Ours")
    assert seed() is False
    assert not NodeSpec.objects.exists()
    assert Product.objects.get().name == "ours"


def test_a_cluster_with_gpus_sells_them_and_one_that_is_away_none(backend, monkeypatch):
    gpus = Resources(32, 65536, 4, "H200")
    monkeypatch.setattr(backend, "capacity", lambda: Capacity((NodeCapacity("gpu-1", gpus, gpus),)))
    seed()
    spec = NodeSpec.objects.get(name="gpu")
    assert (spec.gpus, spec.gpu_type, spec.cpus, spec.memory_mib) == (1, "H200", Decimal(8), 16384)
    assert spec.prices.count() == 3


def test_a_cluster_that_is_away_sells_no_gpus(backend):
    backend.available = False
    assert seed() is True
    assert not NodeSpec.objects.filter(gpus__gt=0).exists()
