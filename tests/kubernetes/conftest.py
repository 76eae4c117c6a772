"""A Kubernetes cluster for tests: see `sites`."""

from tests.kubernetes.fixtures import cluster_yard, fake, fake_site, own_yard, pytest_runtest_makereport, site

__all__ = ["cluster_yard", "fake", "fake_site", "own_yard", "pytest_runtest_makereport", "site"]
