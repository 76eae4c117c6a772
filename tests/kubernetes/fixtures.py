"""Fixtures of tests on a cluster, and what a failed one shows; imported by the conftests here and of the backends.

The one rule: the cluster is shared by a process's tests, and each test leaves it empty; who breaks it has its own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.kubernetes.choice import open_site
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.sites import FakeSite, Site
from tests.kubernetes.telling import tell
from tests.kubernetes.yard import ClusterYard


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what its cluster says, before anything of it is taken down."""
    report = yield
    given = getattr(item, "funcargs", {}).values()
    sites = {one if isinstance(one, Site) else getattr(one, "site", None) for one in given} - {None}
    if report.failed and call.when != "teardown":
        report.sections += [("The cluster", tell(one)) for one in sites if isinstance(one, Site)]
    return report


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
