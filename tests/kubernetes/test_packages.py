"""Packages of a requirements file on a cluster: installed there once, and mounted into runs."""

import pytest

from runtime.backends import smoke_run
from runtime.packages import cluster_builder
from runtime.packages.builder import InstallRequest
from runtime.packages.layers import Layer
from runtime.specs import Image
from tests.kubernetes.harness import KubernetesHarness
from tests.runtime.packages.index import Index, check_alpha

pytestmark = pytest.mark.slow

ADDRESS = ("127.99.0.1", 8080)
"""Where Pods reach the index. The setting `package_index` must allow this network."""


@pytest.fixture
def index(tmp_path, short_folders, fake):
    """An empty package index, which Pods reach at ADDRESS."""
    created = Index(tmp_path / "index")
    path = short_folders() / "index"
    fake.networks.services[ADDRESS] = path
    with created.served(path):
        yield created


@pytest.fixture
def harness(fake_site):
    index = {"url": "http://{}:{}/simple".format(*ADDRESS), "networks": ["127.99.0.0/24"]}
    created = KubernetesHarness(fake_site, package_index=index)
    yield created
    created.close()


def install(harness, letter, *requirements):
    """Install a layer of organization 7 on the image `bare`; return it, the result and the log.

    The layer's key is 64 times the letter. One process starts the installation, and another one collects its result.
    """
    layer = Layer(cluster_builder.layers_root(harness.site.root / "runs"), "7", letter * 64)
    request = InstallRequest("bare", "", requirements, memory_mib=512, disk_mib=200, seconds=90)
    for _twice in range(2):  # the second time, it is under way
        cluster_builder.start(
            layer,
            request,
            backend=harness.backend,
            config=harness.config(),
            image=Image(builtin="bare"),
            pull_secret=None,
            organization_slug="acme",
        )
    assert cluster_builder.has_run(layer, harness.backend)
    another = harness.new_backend()
    smoke_run.await_end(another, f"packages-7-{letter * 12}", harness.patience)
    collected = cluster_builder.collect_result(layer, another)
    assert collected is not None
    assert not cluster_builder.has_run(layer, another)
    return layer, *collected


def test_packages_are_installed_in_the_cluster_and_imported_by_runs(harness, index):
    index.add_alpha()
    layer, result, log = install(harness, "a", "alpha")
    assert (result.reason, result.is_fault) == ("", False), log
    assert result.size_bytes > 0
    assert "+ alpha==1.0" in log
    check_alpha(harness, layer.packages)

    # If the process that collected the result died before it stored it, the next one collects it again.
    assert cluster_builder.collect_result(layer, harness.backend)[0] == result

    failed, result, log = install(harness, "b", "alpah")  # misspelt
    assert "alpah was not found" in result.reason, log
    assert not result.is_fault
    assert not failed.is_complete
