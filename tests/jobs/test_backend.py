from decimal import Decimal

import pytest

from jobs.backend import cluster, columns_of, resources_of
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.local import LocalBackend
from runtime.errors import BackendUnavailable
from runtime.specs import Resources
from tests.factories.billing import NodeSpecFactory
from tests.fakes import FakeBackend


def test_there_is_one_cluster_made_from_the_settings(settings, tmp_path):
    settings.LOCAL_CPUS, settings.LOCAL_MEMORY_MIB = 3.5, 1000
    settings.TRAINYARD_RUN_NETWORK = "host"
    cluster.cache_clear()
    made = cluster()
    assert isinstance(made, LocalBackend)
    assert cluster() is made
    total = made.capacity().machines[0].total
    assert (total.cpus, total.memory_mib) == (3.5, 1000)
    assert "The settings ask for that." in made.isolation_gaps()[0]
    assert made.run_folder("job-1-1") == tmp_path / "runs" / "job-1-1"


def test_no_name_and_the_old_name_mean_the_first_cluster(settings):
    settings.TRAINYARD_CLUSTERS = {"east": None, "west": None}
    cluster.cache_clear()
    assert cluster() is cluster("east") is cluster("local")
    assert cluster("west") is not cluster()
    assert columns_of("east") == {"east", "", "local"}
    assert columns_of("west") == {"west"}
    settings.TRAINYARD_CLUSTERS = {"east": None, "local": None}
    assert columns_of("local") == {"local"}


def test_a_cluster_that_settings_do_not_name_is_one_that_does_not_answer(settings):
    with pytest.raises(BackendUnavailable, match="no cluster 'south'"):
        cluster("south")


def test_a_cluster_of_kubernetes_is_made_from_its_config_behind_a_circuit(settings, tmp_path, monkeypatch):
    config = ClusterConfig.from_data("west", {"volume": {"claim": "runs", "root": str(tmp_path)}})
    settings.TRAINYARD_CLUSTERS = {"west": config}
    cluster.cache_clear()
    made = []
    monkeypatch.setattr(
        "jobs.backend.create", lambda kind, **options: made.append((kind, options)) or FakeBackend(root=tmp_path)
    )
    west = cluster("west")
    assert made == [("kubernetes", {"config": config, "root": tmp_path / "runs" / ".clusters" / "west"})]
    assert west.names() == []


def test_a_spec_without_gpus_asks_for_no_kind_of_them(db):
    plain = NodeSpecFactory(cpus=Decimal("0.5"), memory_mib=512, gpu_type="H200")
    assert resources_of(plain) == Resources(0.5, 512, 0, "")
    assert resources_of(NodeSpecFactory(gpus=2, gpu_type="H200")) == Resources(1.0, 1024, 2, "H200")
