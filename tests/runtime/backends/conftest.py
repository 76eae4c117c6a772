"""The clusters and yards of the backends' tests: see `tests.kubernetes.fixtures` and `contract`."""

from tests.kubernetes.fixtures import fake, fake_site, own_yard, pytest_runtest_makereport, site
from tests.runtime.backends.contract import any_yard
from tests.slurm.fixtures import slurm_cluster, slurm_yard

__all__ = [
    "any_yard",
    "fake",
    "fake_site",
    "own_yard",
    "pytest_runtest_makereport",
    "site",
    "slurm_cluster",
    "slurm_yard",
]
