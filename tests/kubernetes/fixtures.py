"""Fixtures for tests on a cluster: the fake one, or the one that KUBECONFIG names.

Tests of one process share the cluster and leave it empty. A test that breaks it uses a fake of its own.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.harness import KubernetesHarness, describe
from tests.kubernetes.real_cluster import RealSite
from tests.kubernetes.sites import FakeSite, Site

_REAL: list[RealSite] = []
"""The real cluster while it is used. It is kept here because all tests of a process share one namespace there."""


def real_kubeconfig() -> Path | None:
    """Return the absolute path in KUBECONFIG, or None for the fake cluster."""
    if not (name := os.environ.get("KUBECONFIG", "")):
        return None
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        advice = "Name one file: kubectl config view --flatten > one.yaml"
        pytest.exit(f"KUBECONFIG is '{name}', and that is no file. {advice}", returncode=1)
    return path


def open_site(folder: Path) -> Iterator[Site]:
    """Yield the cluster, and remove afterwards what tests have left."""
    kubeconfig = real_kubeconfig()
    if kubeconfig is None:
        fake = FakeSite(folder)
        yield fake
        fake.close()
    elif _REAL:
        yield _REAL[0]
    else:
        _REAL.append(RealSite(kubeconfig))
        try:
            yield _REAL[0]
        finally:
            _REAL.pop().close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the state of the cluster to the report of a failed test."""
    report = yield
    given = getattr(item, "funcargs", {}).values()
    sites: set[Any] = {one if isinstance(one, Site) else getattr(one, "site", None) for one in given}
    if report.failed and call.when != "teardown":
        report.sections += [("The cluster", describe(one)) for one in sites if isinstance(one, Site)]
    return report


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The cluster that tests share."""
    yield from open_site(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def cluster_harness(site: Site) -> Iterator[KubernetesHarness]:
    """Runs on the shared cluster, which leave nothing behind."""
    new = KubernetesHarness(site)
    yield new
    new.close()


@pytest.fixture
def shared_fake(site: Site) -> FakeCluster:
    """The fake cluster that tests share, for a test that looks into it and leaves it as it was."""
    if not isinstance(site, FakeSite):
        pytest.skip("Only a fake cluster can be looked into.")
    return site.fake


@pytest.fixture
def fake_site(tmp_path: Path) -> Iterator[FakeSite]:
    """A fake cluster of this test's own."""
    if real_kubeconfig():
        pytest.skip("Only a fake cluster may be broken.")
    new = FakeSite(tmp_path)
    yield new
    new.close()


@pytest.fixture
def fake(fake_site: FakeSite) -> FakeCluster:
    """The test's own fake cluster itself."""
    return fake_site.fake


@pytest.fixture
def own_harness(fake_site: FakeSite) -> Iterator[KubernetesHarness]:
    """Runs on the test's own fake cluster."""
    new = KubernetesHarness(fake_site)
    yield new
    fake_site.fake.faults.disarm()
    new.close()
