"""The clusters and harnesses of the backends' tests: see `tests.kubernetes.fixtures` and `contract`."""

from tests.kubernetes.fixtures import cluster_harness, fake, fake_site, own_harness, pytest_runtest_makereport, site
from tests.registry import registry
from tests.runtime.backends.contract import any_harness
from tests.slurm.fixtures import (
    accounting_cluster,
    accounting_harness,
    container_harness,
    python_layer,
    slurm_cluster,
    slurm_harness,
)

__all__ = [
    "accounting_cluster",
    "accounting_harness",
    "any_harness",
    "cluster_harness",
    "container_harness",
    "fake",
    "fake_site",
    "own_harness",
    "pytest_runtest_makereport",
    "python_layer",
    "registry",
    "site",
    "slurm_cluster",
    "slurm_harness",
]
