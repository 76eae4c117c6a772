"""A Kubernetes cluster for tests: see `sites`."""

from tests.kubernetes.fixtures import cluster_yard, fake, fake_site, only_fake, own_yard, site

__all__ = ["cluster_yard", "fake", "fake_site", "only_fake", "own_yard", "site"]
