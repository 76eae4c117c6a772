"""A Kubernetes cluster for tests: see `sites`."""

from tests.kubernetes.fixtures import (
    cluster_harness,
    fake,
    fake_site,
    own_harness,
    pytest_runtest_makereport,
    shared_fake,
    site,
)

__all__ = ["cluster_harness", "fake", "fake_site", "own_harness", "pytest_runtest_makereport", "shared_fake", "site"]
