"""The fake cluster, for tests of the Kubernetes backend: see `tests.kubernetes.fixtures`."""

from tests.kubernetes.fixtures import fake, fake_site, own_yard

__all__ = ["fake", "fake_site", "own_yard"]
