from decimal import Decimal

import pytest

from jobs.backend import cluster, resources_of
from runtime.backends.local import LocalBackend
from runtime.specs import Resources
from tests.factories.billing import NodeSpecFactory


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


def test_a_backend_that_there_is_not_is_said_at_once(settings):
    settings.RUNTIME_BACKEND = "abacus"
    cluster.cache_clear()
    with pytest.raises(ValueError, match="abacus"):
        cluster()


def test_a_spec_without_gpus_asks_for_no_kind_of_them(db):
    plain = NodeSpecFactory(cpus=Decimal("0.5"), memory_mib=512, gpu_type="H200")
    assert resources_of(plain) == Resources(0.5, 512, 0, "")
    assert resources_of(NodeSpecFactory(gpus=2, gpu_type="H200")) == Resources(1.0, 1024, 2, "H200")
