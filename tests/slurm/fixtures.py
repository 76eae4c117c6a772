"""Fixtures of a real Slurm. Tests that use them are skipped where it is not installed."""

import shutil

import pytest

from runtime.backends.slurm.image_import import TOOLS
from tests.registry import layer, write_python
from tests.slurm.accounting import (
    ACCOUNT,
    ACCOUNTING_PROGRAMS,
    FOREIGN_ACCOUNT,
    ORGANIZATION_ACCOUNT,
    SlurmClusterWithAccounting,
)
from tests.slurm.cluster import SlurmCluster, missing_program
from tests.slurm.harness import SlurmHarness

NODES = 3


@pytest.fixture(scope="session")
def slurm_cluster(short_folders):
    """A Slurm of NODES nodes for the tests of this process."""
    if missing := missing_program():
        pytest.skip(f"There is no {missing}: apt-get install slurm-wlm munge.")
    cluster = SlurmCluster(short_folders(), NODES)
    yield cluster
    cluster.close()


@pytest.fixture
def slurm_harness(slurm_cluster, tmp_path, bare_images):
    """A harness on the cluster. After the test, it deletes its runs, which must leave nothing behind."""
    harness = SlurmHarness(slurm_cluster, tmp_path, bare_images)
    yield harness
    harness.close()


@pytest.fixture(scope="session")
def accounting_cluster(short_folders):
    """A Slurm of NODES nodes with slurmdbd, which enforces associations and soon forgets ended jobs."""
    if missing := missing_program(ACCOUNTING_PROGRAMS):
        pytest.skip(f"There is no {missing}: apt-get install slurm-wlm munge slurmdbd mariadb-server.")
    cluster = SlurmClusterWithAccounting(short_folders(), NODES)
    yield cluster
    cluster.close()


@pytest.fixture
def accounting_harness(accounting_cluster, tmp_path, bare_images):
    """Like `slurm_harness`, on the cluster with accounting. Jobs of the organization `newcomer` are refused there."""
    accounts = {"acme": ORGANIZATION_ACCOUNT, "newcomer": FOREIGN_ACCOUNT}
    harness = SlurmHarness(
        accounting_cluster, tmp_path, bare_images, accounting=True, account=ACCOUNT, accounts=accounts
    )
    yield harness
    harness.close()


@pytest.fixture(scope="session")
def python_layer(tmp_path_factory):
    """A layer with a Python, from which tests make images."""
    root = tmp_path_factory.mktemp("python") / "root"
    write_python(root)
    return layer([], root)


@pytest.fixture
def container_harness(slurm_cluster, registry, tmp_path, bare_images):
    """Like `slurm_harness`, but runs may use images from the registry."""
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        pytest.skip(f"There is no {missing[0]}: apt-get install skopeo umoci.")
    harness = SlurmHarness(
        slurm_cluster, tmp_path, bare_images, containers="oci", insecure_registries=[registry.host], image_mib=1024
    )
    yield harness
    harness.close()
