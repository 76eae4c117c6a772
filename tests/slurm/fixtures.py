"""Fixtures of a real Slurm. Tests that use them are skipped where it is not installed."""

import pytest

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
    """A harness on it whose runs are deleted after the test, and must leave nothing behind."""
    harness = SlurmHarness(slurm_cluster, tmp_path, bare_images)
    yield harness
    harness.close()
