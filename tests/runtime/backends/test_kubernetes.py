"""Behaviour of Kubernetes only, on the fake cluster. The contract of all backends is in `test_backend_contract.py`."""

import time
from types import SimpleNamespace

import pytest

from runtime.backends.kubernetes.backend import KubernetesBackend, check
from runtime.backends.kubernetes.check import NEWEST_MINOR
from runtime.backends.kubernetes.check import check as run_checks
from runtime.backends.kubernetes.client import ApiError
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RunNotFound
from runtime.specs import FailureCode, Image, Outcome, Resources, RunPhase
from tests.console.processes import wait_for
from tests.runtime.backends.cluster_runs import NAME, create_limited_backend, forbid, job_of, limit_config, start
from tests.runtime.backends.contract import STUBBORN, WAIT

pytestmark = [pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds"), pytest.mark.slow]

# Without a cluster


def config_of(tmp_path, **settings):
    """Return the settings of a cluster that does not exist."""
    return ClusterConfig.from_data("east", {"volume": {"claim": "c", "root": str(tmp_path)}, **settings})


def test_an_image_that_cannot_use_gpus_is_refused_on_gpu_nodes(tmp_path):
    images = {name: f"r.example.com/{name}:1" for name in ("pytorch", "tensorflow")}
    # An image of unknown flavour has its recipe's own requirements: for CUDA in pytorch, for CPUs in tensorflow.
    for flavours, refused in (({}, "tensorflow"), ({"pytorch": "cpu", "tensorflow": "cuda"}, "pytorch")):
        backend = KubernetesBackend(config=config_of(tmp_path, images=images, flavours=flavours), root=tmp_path)
        for name in images:
            backend.check_image(Image(builtin=name))
            if name != refused:
                backend.check_image(Image(builtin=name), gpus=1)
        with pytest.raises(InvalidSpec) as caught:
            backend.check_image(Image(builtin=refused), gpus=1)
        assert caught.value.field == "gpus"
    backend.check_image(Image(reference="r.example.com/own:1"), gpus=1)


@pytest.mark.parametrize("content", [None, b"", b"clusters: [", b"- a", b"text", b"\xff"])
def test_missing_and_damaged_credentials_name_the_setting(tmp_path, content):
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_bytes(content)
    config = config_of(tmp_path, kubeconfig=str(path))
    with pytest.raises(BackendUnavailable, match="The cluster 'east' cannot be reached"):
        KubernetesBackend(config=config, root=tmp_path).names()
    (line,) = check(config, tmp_path)
    assert not line.ok
    assert "kubeconfig" in line.remedy


def test_a_check_whose_answer_has_an_unexpected_form_fails_and_does_not_raise(tmp_path):
    config = config_of(tmp_path, queue="runs")
    api = SimpleNamespace(
        get=lambda _path: {"major": "1", "minor": str(NEWEST_MINOR)},
        find=lambda _path: "no object",
        list=lambda _path, **_query: {"items": ["no object"]},
        is_allowed=lambda _attributes: True,
    )
    lines = run_checks(api, config, tmp_path, backend=None)  # `check` would create a client by itself
    failed = {line.name for line in lines if line.detail.startswith("The check failed: ")}
    assert failed == {"namespace", "storage", "storage classes", "machines", "GPUs", "DNS"}
    (line,) = run_checks(SimpleNamespace(get=lambda _path: "no object"), config, tmp_path, backend=None)
    assert (line.name, line.ok) == ("API server", False)


UNAUTHORIZED, FORBIDDEN = ApiError(401, "Unauthorized", ""), ApiError(403, "Forbidden", "")


@pytest.mark.parametrize(
    ("name", "fault", "cause", "remedy"),
    [
        ("API server", UNAUTHORIZED, None, "Renew the credentials"),
        ("API server", FORBIDDEN, None, "system:public-info-viewer"),
        ("API server", ApiError(404, "Not Found", ""), None, "the network"),
        ("namespace", UNAUTHORIZED, None, "Renew the credentials"),
        ("namespace", FORBIDDEN, None, "kubernetes_rbac"),
        ("namespace", BackendUnavailable("The cluster did not answer."), None, "the network"),
        ("namespace", BackendUnavailable("The cluster refuses the run."), FORBIDDEN, "kubernetes_rbac"),
        ("namespace", NoCapacity("The namespace's quota is used up."), FORBIDDEN, None),
    ],
)
def test_the_remedy_of_a_failed_check_depends_on_the_error(tmp_path, name, fault, cause, remedy):
    def fail(*_args, **_query):
        raise fault from cause

    def get_version(_path):
        return {"major": "1", "minor": str(NEWEST_MINOR)}

    api = SimpleNamespace(get=fail if name == "API server" else get_version, list=fail)
    line = next(line for line in run_checks(api, config_of(tmp_path), tmp_path, backend=None) if line.name == name)
    assert (remedy in line.remedy) if remedy else (not line.remedy)


@pytest.mark.parametrize("smoke", [False, True])
def test_the_check_does_not_create_the_mount_point_of_a_volume(tmp_path, smoke):
    mount_point = tmp_path / "volume"
    volume = {"host_path": "/data", "root": str(mount_point)}
    config = config_of(tmp_path, volume=volume, images={"pytorch": "r.example.com/pytorch:1"})
    api = SimpleNamespace(
        get=lambda _path: {"major": "1", "minor": str(NEWEST_MINOR)},
        find=lambda _path: None,
        list=lambda _path, **_query: {"items": []},
        is_allowed=lambda _attributes: True,
    )
    backend = KubernetesBackend(config=config, root=mount_point / "runs") if smoke else None
    lines = {line.name: line for line in run_checks(api, config, mount_point / "runs", backend)}
    assert not lines["storage"].ok
    assert f"Mount the cluster's volume at {mount_point}" in lines["storage"].remedy
    assert not mount_point.exists()


# Submitting


def test_what_an_earlier_job_left_is_ignored_or_replaced(own_harness, fake):
    """It left a Secret with another token, and then a Pod that the garbage collector has not deleted yet."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": NAME, "uid": "somebody-else"}
    namespace = own_harness.site.namespace
    fake.make("secrets", namespace, NAME, data={"token": "b2xk"})  # "old", as base64
    fake.store.edit("secrets", namespace, NAME, lambda secret: secret["metadata"].update(ownerReferences=[owner]))
    own_harness.complete("print('first')")
    fake.controllers.pace.collect_seconds = 60  # Pods of a deleted Job remain for this time
    own_harness.backend.delete(NAME)
    fake.controllers.paused.set()  # nobody creates or deletes Pods for now
    own_harness.submit("print('second')")
    assert [pod.status.phase for pod in own_harness.site.pods(NAME)] == ["Succeeded"], "the first Pod still exists"
    assert own_harness.backend.describe(NAME).phase is RunPhase.STARTING
    fake.controllers.pace.collect_seconds = 0
    fake.controllers.paused.clear()
    own_harness.wait_for_outcome(Outcome.COMPLETED)
    assert own_harness.log() == "second\n"


def test_a_first_stop_with_a_short_grace_period_deletes_pods_before_the_job_does(own_harness, fake, fake_site):
    """If only the Job were deleted, its Pods would have the 600 s of their spec.

    Without shared storage nothing can tell them a shorter time, so the backend deletes the Pods itself.
    """
    own_harness.backend = own_harness.new_backend(volume={**fake_site.volume(), "shared": False})
    own_harness.start(STUBBORN, grace_seconds=600, deadline_seconds=3600)
    (container,) = fake.containers()
    own_harness.backend.stop(NAME, 1)
    own_harness.wait_for_outcome(Outcome.STOPPED)
    assert wait_for(container.ended.is_set)


# Ends that the cluster decides


def test_a_dead_machine_ends_the_run_as_node_lost(own_harness, fake):
    start(own_harness, nodes=2)
    # By node: a Pod of node 1 is named job-1-1-1-x7k2p.
    machines = {pod.metadata.name.split("-")[3]: pod.spec.node_name for pod in own_harness.site.pods(NAME)}
    fake.nodes[machines["1"]].crash()
    failure = own_harness.wait_for_failure(Outcome.NODE_LOST)
    assert (failure.code, failure.node) == (FailureCode.NODE_LOST, 1)
    assert own_harness.backend.names(live=True) == []
    # A Job waits for the dead machine's kubelet. Deleting the Job deletes its pod all the same.
    own_harness.backend.delete(NAME)
    assert own_harness.left_behind() == []


def test_a_run_evicted_for_its_own_limit_is_billed_and_known_until_its_job_is_deleted(own_harness, fake):
    start(own_harness)
    fake.evict(fake.pods(own_harness.site.namespace)[0], 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". ')
    ended = own_harness.wait_for_outcome(Outcome.DISK_FULL)
    for pod in own_harness.site.pods(NAME):
        fake.store.delete("pods", own_harness.site.namespace, pod.metadata.name, {"gracePeriodSeconds": 0})
    assert own_harness.new_backend().describe(NAME) == ended
    own_harness.site.batch.delete_namespaced_job(NAME, own_harness.site.namespace, propagation_policy="Background")
    with pytest.raises(RunNotFound):
        own_harness.backend.describe(NAME)
    own_harness.backend.delete(NAME)  # removes the folder, which the deletion of the Job has left


# Namespaces, storage, capacity


def test_each_organization_has_its_own_namespace(own_harness, fake):
    backend = own_harness.new_backend(namespace_per_organization=True)
    spec = own_harness.spec("print('done')", labels={"organization": "acme"}, organization_nodes=3)
    backend.submit(spec)
    assert wait_for(lambda: backend.describe(NAME).phase is RunPhase.ENDED)
    where = job_of(fake)["metadata"]["namespace"]
    assert where == f"{own_harness.site.namespace}-acme"
    assert fake.store.get("resourcequotas", where, "trainyard")["spec"]["hard"] == {"pods": "3"}
    assert backend.names() == [NAME]
    assert backend.logs(NAME, 0).text == "done\n"
    backend.delete(NAME)
    assert wait_for(lambda: not fake.store.find("pods", where) and not fake.store.find("secrets", where))


def test_logs_come_from_the_api_server_if_storage_is_not_shared(own_harness, fake_site):
    volume = {**fake_site.volume(), "shared": False}
    own_harness.backend = own_harness.new_backend(volume=volume)
    script = """
    import os, sys
    print("é" * 3)
    print(os.listdir(os.environ["CHECKPOINT_DIR"]))
    sys.stdout.write("no end")
    """
    own_harness.complete(script)
    assert own_harness.log().startswith("ééé\n[]\nno end")
    chunk = own_harness.backend.logs(NAME, 0, offset=2, limit=3)
    assert (chunk.text, chunk.next_offset, chunk.eof) == ("é", 4, False)
    (line_of_chunk, seconds), *_later = own_harness.backend.logs(NAME, 0, offset=2, limit=3, with_times=True).times
    assert (line_of_chunk, seconds) == (0, pytest.approx(time.time(), abs=60))
    assert own_harness.backend.samples(NAME, 0).eof
    assert own_harness.backend.stacks(NAME) == {}
    assert not (fake_site.root / "runs" / NAME).exists()


@pytest.mark.parametrize(
    ("mode", "ok", "detail"),
    [
        ("ReadWriteOnce", True, "share one machine"),
        ("ReadOnlyMany", False, "cannot write"),
    ],
)
def test_the_check_of_a_fresh_installation_depends_on_the_access_mode(own_harness, fake, mode, ok, detail):
    """There was no run yet. A ReadWriteOnce volume is on one machine, where both nodes of the smoke run meet."""
    root = own_harness.site.root
    affinity = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-b"]}
    local = {"required": {"nodeSelectorTerms": [{"matchExpressions": [affinity]}]}}
    where = {"nodeAffinity": local} if mode == "ReadWriteOnce" else {}
    resources = {"requests": {"storage": "1Gi"}}
    volume = {"accessModes": [mode], "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(root)}, **where}
    fake.make("persistentvolumes", "", "local", spec=volume)
    claim = {"accessModes": [mode], "resources": resources, "volumeName": "local"}
    fake.make("persistentvolumeclaims", own_harness.site.namespace, "data", spec=claim, status={"phase": "Bound"})
    config = own_harness.config(volume={"claim": "data", "root": str(root)})
    missing_folder = root / "runs" / ".clusters" / "test"
    lines = {line.name: line for line in check(config, missing_folder, smoke=ok)}
    assert (lines["storage"].ok, detail in lines["storage"].detail) == (ok, True), lines["storage"]
    assert [line for line in lines.values() if not line.ok and line.name != "storage"] == []
    assert not ok or "Two nodes met" in lines["smoke run"].detail


def test_check_names_missing_permissions_and_node_kinds_without_machines(own_harness, fake):
    config = own_harness.config()
    limited = limit_config(own_harness, fake, config)
    forbid(fake, config, "jobs")
    lines = check(limited, own_harness.site.root / "runs", smoke=False)
    missing = {line.name: line.remedy for line in lines if line.name.startswith("may ") and not line.ok}
    assert any(name.startswith("may create, delete, get, list, patch, watch jobs") for name in missing)
    assert not any("pods/portforward" in name for name in missing)  # another rule of the Role allows it
    assert all(missing.values())

    def machines(**settings):
        lines = check(own_harness.config(**settings), own_harness.site.root / "runs", smoke=False)
        return next(line for line in lines if line.name == "machines")

    assert (machines().ok, machines().detail) == (True, "2 nodes, 2 for runs, 2 of them ready.")
    kinds = {"large": {"pool": "large"}, "any": {}}
    line = machines(node_selectors=kinds)
    assert (line.ok, line.detail) == (False, "2 nodes, 2 for runs, 2 of them ready. None accepts nodes of type large.")
    assert "node_selectors" in line.remedy
    fake.edit_node("node-a", lambda node: node["metadata"]["labels"].update(pool="large"))
    assert machines(node_selectors=kinds).ok
    closed = {"": {"pool": "none"}}  # "": nodes of runs that name no type
    assert not machines(node_selectors=closed).ok
    assert machines(node_selectors=closed, elastic=True).ok  # such machines may still be added


def test_capacity_comes_from_settings_if_nodes_may_not_be_listed(own_harness, fake):
    config = own_harness.config(capacity=[{"cpus": 4, "memory_mib": 4096}])
    without_nodes = create_limited_backend(own_harness, fake, config)  # it lacks the ClusterRole, which lists nodes
    own_harness.submit(WAIT, resources=Resources(1, 1024))
    assert [machine.free for machine in without_nodes.capacity().machines] == [Resources(3.0, 3072)]
    # A backend that may list nodes counts the two of the cluster.
    assert len(own_harness.new_backend(capacity=[{"cpus": 4, "memory_mib": 4096}]).capacity().machines) == 2


# An unavailable cluster


def test_an_unreachable_cluster_fails_at_once_the_second_time(own_harness, fake):
    fake.faults.down = True
    backend = own_harness.new_backend()
    with pytest.raises(BackendUnavailable, match="did not answer"):
        backend.describe(NAME)
    calls = len(fake.faults.calls)
    with pytest.raises(BackendUnavailable, match="did not answer a moment ago"):
        backend.describe(NAME)
    assert len(fake.faults.calls) == calls
    assert not backend.is_reachable()
    fake.faults.down = False
    assert backend.is_reachable()
    assert backend.names() == []  # at once, without a pause
