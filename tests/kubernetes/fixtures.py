"""Fixtures of tests on a cluster; imported by the conftest here and by the backends' contract suite.

The one rule: the cluster is shared by a process's tests, and each test leaves it empty; who breaks it has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.sites import FakeSite, Site, open_site, real_kubeconfig
from tests.kubernetes.yard import ClusterYard


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The cluster: the fake, or the one of KUBECONFIG."""
    yield from open_site(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def cluster_yard(site: Site) -> Iterator[ClusterYard]:
    """A yard on it, that leaves nothing behind."""
    made = ClusterYard(site)
    yield made
    made.close()


@pytest.fixture
def fake_site(tmp_path: Path) -> Iterator[FakeSite]:
    """A fake cluster of this test's own, to be broken."""
    made = FakeSite(tmp_path)
    yield made
    made.close()


@pytest.fixture
def fake(fake_site: FakeSite) -> FakeCluster:
    """The fake cluster itself."""
    return fake_site.fake


@pytest.fixture
def own_yard(fake_site: FakeSite) -> Iterator[ClusterYard]:
    """A yard on the test's own fake cluster."""
    made = ClusterYard(fake_site)
    yield made
    fake_site.fake.faults.disarm()
    made.close()


@pytest.fixture
def only_fake() -> None:
    """For a test that a real cluster has no way to do."""
    if real_kubeconfig():
        pytest.skip("A real cluster cannot be made to do this.")
