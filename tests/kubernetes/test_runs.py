"""Runs on a cluster with failures, and what only a cluster has: images, DNS names, nodes, roles.

The tests that need no access to nodes also run on a real cluster. An image with plain Python is enough.
"""

import copy
import re

import pytest
from kubernetes.client import ApiException

from runtime.backends.kubernetes import outcome
from runtime.backends.kubernetes.backend import check
from runtime.backends.kubernetes.rbac import rbac
from runtime.images import venvs
from runtime.specs import Image, Outcome, Resources, RunPhase, WaitingCode
from tests.console.processes import wait_for
from tests.kubernetes.harness import KubernetesHarness
from tests.kubernetes.images import FAKE_TORCH_IMAGE, python_image
from tests.kubernetes.real_cluster import RealSite
from tests.kubernetes.sites import REAL_TORCH_IMAGE, FakeSite
from tests.runtime.backends.contract import STUBBORN, WAIT
from tests.runtime.images_of_ours import IMAGES

pytestmark = pytest.mark.slow

ALL_REDUCE = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", init_method="env://")
    given = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(given)
    print("sum", given.item(), flush=True)
    dist.destroy_process_group()
"""


def start_on_two_nodes(harness, **changes):
    """Start a run of two nodes that only waits; return when it runs on both."""
    harness.start(WAIT, nodes=2, **changes)
    harness.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)


# On any cluster


def test_a_missing_image_is_reported(cluster_harness):
    image = Image(reference="registry.invalid/nobody/nothing:1")
    cluster_harness.submit(image=image)
    # Registries and container runtimes report it in different ways.
    codes = {WaitingCode.IMAGE_NETWORK, WaitingCode.IMAGE_NAME, WaitingCode.IMAGE_CREDENTIALS}
    status = cluster_harness.wait("job-1-1", lambda status: status.waiting_code in codes)
    assert status.waiting_data["image"] == image.reference
    assert status.started_at is None
    cluster_harness.backend.stop("job-1-1", 0)
    ended = cluster_harness.wait_for_end()
    assert (ended.outcome, ended.started_at, ended.spans) == (Outcome.STOPPED, None, ())


def test_the_printed_roles_suffice(site, request):
    """Nothing but what `manage.py kubernetes_rbac` prints is needed from purchase to deletion."""
    config = site.config()
    name = f"trainyard-{site.namespace}"
    site.core.create_namespaced_service_account(site.namespace, {"metadata": {"name": name}})
    for manifest in rbac(config, service_account=name, service_account_namespace=site.namespace):
        _create(site, manifest, request)
    issued = site.core.create_namespaced_service_account_token(
        name, site.namespace, {"metadata": {"name": name}, "spec": {"audiences": []}}
    )
    path = site.kubeconfig_of(issued.status.token, site.root.parent / f"{name}.kubeconfig")
    request.addfinalizer(path.unlink)
    # A new role takes effect only after a moment.
    wait_for(lambda: not any(map(_lacks, check(site.config(kubeconfig=str(path)), site.root, smoke=False))))
    harness = KubernetesHarness(site, kubeconfig=str(path))
    start_on_two_nodes(harness)
    assert harness.backend.capacity().machines
    harness.backend.stop("job-1-1", 5)
    harness.wait_for_outcome(Outcome.STOPPED)
    harness.close()


def _lacks(line):
    """Whether a result of `check` reports a missing permission."""
    return line.name.startswith("may ") and line.detail != "yes"


def _create(site, manifest, request):
    """Create a role or binding. A cluster-wide one is named for our namespace, and deleted after the test."""
    if manifest["kind"] in {"Namespace", "ServiceAccount"}:
        return  # they exist already
    resource = re.sub(r"(?<!^)(?=[A-Z])", "_", manifest["kind"]).lower()
    if not manifest["kind"].startswith("Cluster"):
        getattr(site.rbac, f"create_namespaced_{resource}")(manifest["metadata"]["namespace"], manifest)
        return
    manifest = copy.deepcopy(manifest)
    for named in (manifest["metadata"], manifest.get("roleRef", {"name": ""})):
        named["name"] += f"-{site.namespace}"
    getattr(site.rbac, f"create_{resource}")(manifest)
    request.addfinalizer(lambda: getattr(site.rbac, f"delete_{resource}")(manifest["metadata"]["name"]))


@pytest.mark.cores(2)
@pytest.mark.torch
def test_torch_reduces_over_all_pods(site):
    if site.real and not REAL_TORCH_IMAGE:
        pytest.skip("Name an image with torch in TRAINYARD_TEST_TORCH_IMAGE.")
    image = REAL_TORCH_IMAGE or FAKE_TORCH_IMAGE
    if isinstance(site, FakeSite):
        assert venvs.is_ready(IMAGES, "pytorch"), "Run 'python manage.py build_image pytorch' first."
        site.fake.registry.images[image] = python_image(IMAGES / "pytorch")
    harness = KubernetesHarness(site, images={KubernetesHarness.image: image})  # the image of the harness's runs
    try:
        harness.complete(ALL_REDUCE, nodes=2, resources=Resources(cpus=0.5, memory_mib=2048))
        assert [harness.log(rank) for rank in range(2)] == ["sum 3.0\n"] * 2
    finally:
        harness.close()


# On a fake cluster only: nodes, registries, quotas and taints that no test may change elsewhere


@pytest.mark.parametrize("shared", [True, False])
def test_a_finished_run_completes_though_its_kubelet_was_killed(own_harness, fake, fake_site, *, shared):
    """Both ranks ended with 0 and their records say so. A retry would repeat a run that has succeeded."""
    own_harness.backend = own_harness.new_backend(volume={**fake_site.volume(), "shared": shared})
    finish = fake_site.root / "workspace" / "finish"
    source = "import os, time\nprint('ready', flush=True)\nwhile not os.path.exists('finish'): time.sleep(0.05)"
    own_harness.start(source, nodes=2)
    own_harness.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)
    # Without shared storage, only node 1's kubelet is killed: node 0's must deliver node 0's record, which covers both
    # nodes.
    names = {pod.spec.node_name for pod in own_harness.site.pods("job-1-1")[0 if shared else 1 :]}
    containers = fake.containers()
    for name in names:
        fake.nodes[name].kill()
    finish.touch()
    assert all(container.ended.wait(60) for container in containers)
    ended = own_harness.wait_for_outcome(Outcome.COMPLETED)
    assert ended.finished_at is not None
    # The run is billed until its code ended, not until the kubelet's silence is noticed.
    assert ended.finished_at <= max(container.finished_at for container in containers) + 1
    for name in names:
        fake.nodes[name].revive()
    assert own_harness.new_backend().describe("job-1-1").outcome is Outcome.COMPLETED


def test_a_pod_that_keeps_its_first_grace_period_was_stopped(own_harness, fake_site, monkeypatch):
    """The second stop does not shorten the pod's six seconds.

    Although that is longer than the time-out for a lost node, the outcome is STOPPED, not NODE_LOST.
    """
    monkeypatch.setattr(outcome, "_KUBELET_REPORT_SECONDS", 0.5)
    own_harness.backend = own_harness.new_backend(volume={**fake_site.volume(), "shared": False})
    own_harness.start(STUBBORN, grace_seconds=6, deadline_seconds=3600)
    own_harness.backend.stop("job-1-1", 6)
    own_harness.wait("job-1-1", lambda status: status.phase is RunPhase.STOPPING)
    own_harness.backend.stop("job-1-1", 0)
    own_harness.wait_for_outcome(Outcome.STOPPED)


def test_a_reused_run_name_finds_its_own_pods(own_harness, fake):
    """DNS returns the addresses of the earlier run for longer than the other steps of a start take."""
    start_on_two_nodes(own_harness)
    own_harness.backend.delete("job-1-1")
    assert own_harness.left_behind() == []
    fake.dns_cache_seconds = 5.0
    start_on_two_nodes(own_harness)


def test_a_real_cluster_is_used_through_pods_and_the_api_and_left_clean(fake_site, monkeypatch):
    """`RealSite`, tested on the fake cluster: Pods write the files of tests, and the API returns output."""
    monkeypatch.setenv("TRAINYARD_TEST_HOST_PATH", str(fake_site.folder))
    site = RealSite(fake_site.kubeconfig)
    try:
        harness = KubernetesHarness(site)
        harness.complete("open('made', 'w').write('x')\nprint('wrote')")
        assert harness.log() == "wrote\n"
        harness.close()
    finally:
        site.close()
    assert not (fake_site.folder / site.namespace).exists()
    with pytest.raises(ApiException):
        fake_site.core.read_namespace(site.namespace)
