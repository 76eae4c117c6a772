"""Runs on a cluster in trouble, and what only a cluster has: images, names, machines, roles. Plain Python is enough.

What a real cluster can be made to do without access to its machines is asked of that, too.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
import yaml
from kubernetes.client import ApiException

from runtime.backends.base import Check
from runtime.backends.kubernetes import check
from runtime.backends.kubernetes_access import rbac
from runtime.specs import FailureCode, Image, Outcome, PullSecret, Resources, RunPhase, WaitingCode
from tests.kubernetes import crash
from tests.kubernetes.choice import real_kubeconfig
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.images import TORCH, built_image, empty_image, python_image
from tests.kubernetes.sites import FakeSite, Site, built_torch
from tests.kubernetes.staged import StagedSite
from tests.kubernetes.yard import ClusterYard

WAIT = """
    import signal
    print("ready", flush=True)
    while True:
        signal.pause()
"""
ALL_REDUCE = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", init_method="env://")
    given = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(given)
    print("sum", given.item(), flush=True)
    dist.destroy_process_group()
"""


def ready(yard: ClusterYard, **changes: Any) -> None:
    """A run of two nodes that waits, and both do."""
    yard.backend.submit(yard.spec(WAIT, nodes=2, **changes))
    for rank in range(2):
        yard.wait_for_text("ready", rank=rank)
    yard.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)


# On any cluster


def test_an_image_that_is_not_there_is_told(cluster_yard: ClusterYard) -> None:
    image = Image(reference="registry.invalid/nobody/nothing:1")
    cluster_yard.backend.submit(cluster_yard.spec(image=image))
    codes = {WaitingCode.IMAGE_NETWORK, WaitingCode.IMAGE_NAME, WaitingCode.IMAGE_CREDENTIALS}
    status = cluster_yard.wait("job-1-1", lambda status: status.waiting_code in codes)
    assert status.waiting_data["image"] == image.reference
    assert status.started_at is None
    cluster_yard.backend.stop("job-1-1", 0)
    ended = cluster_yard.wait_for_end()
    assert (ended.outcome, ended.started_at, ended.spans) == (Outcome.STOPPED, None, ())


def test_a_pod_that_is_removed_by_force_is_a_lost_node(cluster_yard: ClusterYard) -> None:
    ready(cluster_yard)
    pod = cluster_yard.site.pods("job-1-1")[1]
    cluster_yard.site.core.delete_namespaced_pod(pod.metadata.name, cluster_yard.site.namespace, grace_period_seconds=0)
    ended = cluster_yard.wait_for_end()
    assert ended.outcome is Outcome.NODE_LOST, cluster_yard.all_logs("job-1-1")
    assert ended.failure is not None
    assert ended.failure.node == 1
    assert ended.finished_at is not None


def test_a_job_that_vanished_is_known_to_nobody(cluster_yard: ClusterYard) -> None:
    ready(cluster_yard)
    cluster_yard.site.batch.delete_namespaced_job(
        "job-1-1", cluster_yard.site.namespace, propagation_policy="Background"
    )
    give_up_at = time.monotonic() + 60
    while "job-1-1" in cluster_yard.backend.names():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    assert cluster_yard.left_behind() in ([], ["folder job-1-1"])
    cluster_yard.backend.delete("job-1-1")


def test_a_console_that_was_started_anew_goes_on_with_the_run(cluster_yard: ClusterYard) -> None:
    ready(cluster_yard)
    before = cluster_yard.backend.describe("job-1-1")
    cluster_yard.backend = cluster_yard.another()
    assert cluster_yard.backend.describe("job-1-1").started_at == before.started_at
    assert cluster_yard.log() == "ready\n"
    cluster_yard.backend.stop("job-1-1", 5)
    assert cluster_yard.wait_for_end().outcome is Outcome.STOPPED


def test_the_printed_roles_are_enough(site: Site, request: pytest.FixtureRequest) -> None:
    """Nothing but what `manage.py kubernetes_rbac` prints is needed from purchase to deletion."""
    config = site.config()
    name = f"trainyard-{site.namespace}"
    objects = yaml.safe_load_all(
        yaml.safe_dump_all(rbac(config, service_account=name, service_account_namespace=site.namespace))
    )
    site.core.create_namespaced_service_account(site.namespace, {"metadata": {"name": name}})
    for made in objects:
        _create(site, made, request)
    told = site.core.create_namespaced_service_account_token(
        name, site.namespace, {"metadata": {"name": name}, "spec": {"audiences": []}}
    )
    path = site.kubeconfig_of(told.status.token, site.root.parent / f"{name}.kubeconfig")
    request.addfinalizer(path.unlink)
    # A role counts a moment after it was made.
    give_up_at = time.monotonic() + 30
    while lacks := [line for line in check(site.config(kubeconfig=str(path)), site.root, smoke=False) if _lacks(line)]:
        assert time.monotonic() < give_up_at, lacks
        time.sleep(0.1)
    yard = ClusterYard(site, kubeconfig=str(path))
    ready(yard)
    assert yard.backend.capacity().machines
    yard.backend.stop("job-1-1", 5)
    assert yard.wait_for_end().outcome is Outcome.STOPPED
    yard.close()


def _lacks(line: Check) -> bool:
    return line.name.startswith("may ") and line.detail != "yes"


def _create(site: Site, made: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """Make a role or binding; one of the whole cluster goes again at the end."""
    api, kind, name = site.rbac, made["kind"], made["metadata"]["name"]
    if kind == "Namespace":
        return
    if kind.startswith("Cluster"):
        # Tests on one cluster must not meet, so it is named for our namespace.
        create, delete = {
            "ClusterRole": (api.create_cluster_role, api.delete_cluster_role),
            "ClusterRoleBinding": (api.create_cluster_role_binding, api.delete_cluster_role_binding),
        }[kind]
        own = f"{name}-{site.namespace}"
        made = {**made, "metadata": {**made["metadata"], "name": own}}
        if kind == "ClusterRoleBinding":
            made["roleRef"] = {**made["roleRef"], "name": f"{made['roleRef']['name']}-{site.namespace}"}
        create(made)
        request.addfinalizer(lambda: delete(own))
        return
    create_in = {"Role": api.create_namespaced_role, "RoleBinding": api.create_namespaced_role_binding}
    if kind in create_in:
        create_in[kind](made["metadata"]["namespace"], made)


@pytest.mark.torch
def test_torch_reduces_over_all_pods(site: Site) -> None:
    if site.real and not os.environ.get("TRAINYARD_TEST_TORCH_IMAGE"):
        pytest.skip("Name an image with torch in TRAINYARD_TEST_TORCH_IMAGE.")
    image = os.environ.get("TRAINYARD_TEST_TORCH_IMAGE", TORCH)
    if isinstance(site, FakeSite):
        folder = built_torch()
        if folder is None:
            pytest.fail("There is no image 'pytorch': run 'python manage.py build_image pytorch' first.")
        site.fake.registry.images[image] = built_image(folder)
    yard = ClusterYard(site, images={"bare": image})
    try:
        ended = yard.run(ALL_REDUCE, nodes=2, workers_per_node=2, resources=Resources(cpus=0.5, memory_mib=2048))
        assert ended.outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
        assert [yard.log(rank) for rank in range(4)] == ["sum 10.0\n"] * 4
    finally:
        yard.close()


def test_a_machine_that_falls_silent_is_a_lost_node(site: Site) -> None:
    """On a real cluster, where that is allowed; the fake's machines crash below."""
    if not isinstance(site, StagedSite):
        pytest.skip("The fake's machines crash in a test of their own.")
    crash.may_crash()
    yard = ClusterYard(site)
    ready(yard)
    pod = site.pods("job-1-1")[1]
    try:
        crash.silence(site, pod)
        ended = yard.wait_for_end()
        assert ended.outcome is Outcome.NODE_LOST, yard.all_logs("job-1-1")
        assert ended.failure is not None
    finally:
        crash.await_ready(site, pod.spec.node_name)
    yard.close()


def test_what_silences_a_machine_lets_it_go_on() -> None:
    """The script, on a process of ours that has the name."""
    name = f"kubelet-{os.getpid() % 10000}"
    waits = f"import ctypes, time; ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0); print(flush=True)\n"
    waits += "while True: time.sleep(0.01)"
    victim = subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE)
    assert victim.stdout is not None
    victim.stdout.readline()
    silencer = subprocess.Popen(
        [sys.executable, "-c", crash.SCRIPT, name, "no-such-pod", "600"], stdout=subprocess.PIPE, text=True
    )
    assert silencer.stdout is not None
    try:
        assert silencer.stdout.readline() == "silent\n"
        assert psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED
        silencer.terminate()
        assert silencer.wait(10) == 0
        assert psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED
    finally:
        for process in (silencer, victim):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


# On the fake alone: machines, registries, quotas, taints that no test may touch elsewhere


@pytest.fixture(autouse=True)
def _fakes_are_not_for_a_real_cluster(request: pytest.FixtureRequest) -> None:
    if real_kubeconfig() and {"own_yard", "fake_site"} & set(request.fixturenames):
        pytest.skip("The machines and registries of a real cluster are not ours to break.")


def test_a_machine_that_crashes_is_a_lost_node(own_yard: ClusterYard, fake: FakeCluster) -> None:
    ready(own_yard)
    pod = own_yard.site.pods("job-1-1")[1]
    crashed = time.time()
    fake.nodes[pod.spec.node_name].crash()
    ended = own_yard.wait_for_end()
    assert ended.outcome is Outcome.NODE_LOST, own_yard.all_logs("job-1-1")
    assert ended.failure is not None
    assert ended.failure.node == 1
    assert ended.finished_at is not None
    assert ended.finished_at >= int(crashed)
    own_yard.backend.delete("job-1-1")
    fake.nodes[pod.spec.node_name].start()


def test_a_registry_that_wants_a_password_is_told_apart(own_yard: ClusterYard, fake: FakeCluster) -> None:
    fake.registry.passwords["registry.example.com"] = "secret"
    fake.registry.images["registry.example.com/x:1"] = python_image()
    image = Image(reference="registry.example.com/x:1")
    spec = own_yard.spec("print('pulled')", image=image)
    own_yard.backend.submit(spec)
    status = own_yard.wait("job-1-1", lambda status: status.waiting_code == WaitingCode.IMAGE_CREDENTIALS)
    assert status.waiting_data["image"] == image.reference
    own_yard.backend.delete("job-1-1")
    own_yard.left_behind()
    pull = PullSecret("registry.example.com", "me", "secret")
    own_yard.backend.submit(dataclasses.replace(spec, name="job-1-2", pull_secret=pull))
    assert own_yard.wait_for_end("job-1-2").outcome is Outcome.COMPLETED
    assert own_yard.log(name="job-1-2") == "pulled\n"


def test_an_image_without_python_is_the_customers_fault(own_yard: ClusterYard, fake: FakeCluster) -> None:
    fake.registry.images["registry.example.com/empty:1"] = empty_image()
    ended = own_yard.run("", image=Image(reference="registry.example.com/empty:1"))
    assert ended.outcome is Outcome.CODE_FAILED, own_yard.all_logs("job-1-1")
    assert ended.failure is not None
    assert ended.failure.code is FailureCode.IMAGE_UNUSABLE
    assert ended.started_at is None


def test_a_machine_that_is_short_of_something_evicts(own_yard: ClusterYard, fake: FakeCluster) -> None:
    ready(own_yard)
    pod = next(
        one for one in fake.pods() if one["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == "1"
    )
    fake.evict(pod)
    ended = own_yard.wait_for_end()
    assert ended.outcome is Outcome.NODE_LOST, own_yard.all_logs("job-1-1")
    assert ended.failure is not None
    assert ended.failure.code is FailureCode.EVICTED


def test_taints_and_quotas_are_told(own_yard: ClusterYard, fake: FakeCluster) -> None:
    for node in fake.nodes:
        taint = [{"key": "team", "value": "a", "effect": "NoSchedule"}]
        fake.edit_node(node, lambda found, taint=taint: found["spec"].update(taints=taint))  # type: ignore[misc]
    own_yard.backend.submit(own_yard.spec())
    status = own_yard.wait("job-1-1", lambda status: status.waiting_code == WaitingCode.TAINT)
    assert "team" in str(status.waiting_data)
    own_yard.backend.delete("job-1-1")
    fake.make("resourcequotas", own_yard.site.namespace, "q", spec={"hard": {"pods": "0"}})
    own_yard.backend.submit(own_yard.spec(name="job-2-1"))
    own_yard.wait("job-2-1", lambda status: status.waiting_code == WaitingCode.QUOTA)


def test_a_run_that_is_placed_in_part_is_taken_down_whole(own_yard: ClusterYard, fake: FakeCluster) -> None:
    fake.edit_node("node-b", lambda found: found["spec"].update(unschedulable=True))
    yard = ClusterYard(own_yard.site, gang_seconds=2)
    yard.backend.submit(yard.spec(WAIT, nodes=2, resources=Resources(cpus=5, memory_mib=256)))
    ended = yard.wait_for_end()
    assert ended.outcome is Outcome.NO_CAPACITY
    assert (ended.started_at, ended.spans) == (None, ())
    yard.close()


def test_names_that_resolve_late_are_waited_for(own_yard: ClusterYard, fake: FakeCluster) -> None:
    fake.names_seconds = 3.0
    ready(own_yard)


def test_staged_files_reach_the_machines_and_are_removed(fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to a real cluster, gone on the fake: files by pods, output by the API."""
    monkeypatch.setenv("TRAINYARD_TEST_HOST_PATH", str(fake_site.folder))
    site = StagedSite(fake_site.kubeconfig)
    try:
        yard = ClusterYard(site)
        ended = yard.run("open('made', 'w').write('x')\nprint('wrote')")
        assert ended.outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
        assert yard.log() == "wrote\n"
        yard.close()
    finally:
        site.close()
    assert not (fake_site.folder / site.namespace).exists()
    with pytest.raises(ApiException):
        fake_site.core.read_namespace(site.namespace)
