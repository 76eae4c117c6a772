"""What only Kubernetes does, on the fake cluster: what every backend keeps is in `test_contract_backends`."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
from kubernetes.client import ApiException

from runtime.backends import kubernetes_access
from runtime.backends.base import Check
from runtime.backends.kubernetes import KubernetesBackend, check
from runtime.backends.kubernetes_api import Api, Refused, path_of
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.errors import BackendUnavailable, InvalidSpec, RunNotFound
from runtime.specs import (
    FailureCode,
    Image,
    Outcome,
    Resources,
    RunPhase,
)
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.faults import Fault
from tests.kubernetes.sites import FakeSite
from tests.kubernetes.yard import ClusterYard
from tests.runtime.backends.contract import STUBBORN
from tests.runtime.backends.going import NAME, SLEEP, going, job_of, limited, until

# Submitting


def test_a_submission_that_broke_off_at_any_step_is_no_run_and_is_gone_on_with(
    own_yard: ClusterYard, fake: FakeCluster
) -> None:
    spec = own_yard.spec("print('done')")
    broken = 0
    while True:
        # Every call from this one on fails, as if the console had died here.
        fake.faults.arm(broken, Fault.INTERNAL, version=0, times=100)
        try:
            own_yard.another().submit(spec)
            break
        except BackendUnavailable:
            broken += 1
        finally:
            fake.faults.disarm()
        with pytest.raises(RunNotFound):
            own_yard.backend.describe(NAME)
    assert broken >= 7  # a look, the Job, four objects, the last word
    own_yard.another().submit(spec)
    assert own_yard.wait_for_end().outcome is Outcome.COMPLETED
    assert len(own_yard.site.pods(NAME)) == 1


def test_keys_that_an_older_job_of_the_name_left_are_replaced(own_yard: ClusterYard, fake: FakeCluster) -> None:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": NAME, "uid": "somebody-else"}
    namespace = own_yard.site.namespace
    fake.make("secrets", namespace, NAME, data={"token": "b2xk"})
    fake.store.edit("secrets", namespace, NAME, lambda found: found["metadata"].update(ownerReferences=[owner]))
    assert own_yard.run("print('done')").outcome is Outcome.COMPLETED


def test_pods_of_an_older_job_of_the_name_are_not_counted(own_yard: ClusterYard, fake: FakeCluster) -> None:
    own_yard.run("print('first')")
    fake.controllers.pace.collect_seconds = 60
    own_yard.backend.delete(NAME)
    fake.controllers.paused.set()
    own_yard.backend.submit(own_yard.spec("print('second')"))
    assert [pod.status.phase for pod in own_yard.site.pods(NAME)] == ["Succeeded"], "the first one's is still there"
    assert own_yard.backend.describe(NAME).phase is RunPhase.STARTING
    fake.controllers.pace.collect_seconds = 0
    fake.controllers.paused.clear()
    assert own_yard.wait_for_end().outcome is Outcome.COMPLETED
    assert own_yard.log() == "second\n"


def test_pods_are_told_of_their_short_grace_before_anybody_tells_them_of_a_longer_one(
    own_yard: ClusterYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    going(own_yard)
    deleted: list[str] = []
    delete = Api.delete

    def record(self: Api, path: str, **options: Any) -> None:
        deleted.append(path.rpartition("/")[0].rpartition("/")[2])
        delete(self, path, **options)

    monkeypatch.setattr(Api, "delete", record)
    own_yard.backend.delete(NAME)
    assert deleted[:2] == ["pods", "jobs"]


def test_a_sooner_end_ends_what_its_kubelet_still_waits_for(own_yard: ClusterYard, fake: FakeCluster) -> None:
    """No kubelet cuts short a wait that has begun: the pod has to be told by another way."""
    own_yard.backend.submit(own_yard.spec(STUBBORN, nodes=2, grace_seconds=600, deadline_seconds=3600))
    for rank in range(2):
        own_yard.wait_for_text("ready", rank=rank)
    containers = [pod.container for node in fake.nodes.values() for pod in node.pods.values() if pod.container]
    assert len(containers) == 2
    own_yard.backend.stop(NAME, 600)
    until(lambda: all(pod.metadata.deletion_timestamp for pod in own_yard.site.pods(NAME)))
    assert not any(made.ended.is_set() for made in containers)
    own_yard.backend.stop(NAME, 1)
    until(lambda: all(made.ended.is_set() for made in containers))
    assert own_yard.wait_for_end().outcome is Outcome.STOPPED


def test_who_has_little_patience_from_the_first_is_who_a_kubelet_hears_first(
    own_yard: ClusterYard, fake: FakeCluster, fake_site: FakeSite
) -> None:
    own_yard.backend = own_yard.another(volume={**fake_site.volume(), "shared": False})  # no word but the kubelet's
    own_yard.backend.submit(own_yard.spec(STUBBORN, grace_seconds=600, deadline_seconds=3600))
    own_yard.wait_for_text("ready")
    (made,) = [pod.container for node in fake.nodes.values() for pod in node.pods.values() if pod.container]
    own_yard.backend.stop(NAME, 1)
    assert own_yard.wait_for_end().outcome is Outcome.STOPPED
    until(made.ended.is_set)


def test_a_stop_that_broke_off_is_gone_on_with_by_whoever_looks_next(
    own_yard: ClusterYard, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    going(own_yard)
    with monkeypatch.context() as patched:
        patched.setattr(KubernetesBackend, "_hurry", unreachable)
        with pytest.raises(BackendUnavailable):
            own_yard.backend.stop(NAME, 0)
    assert own_yard.wait_for_end().outcome is Outcome.STOPPED


def unreachable(*_arguments: Any) -> None:
    raise BackendUnavailable("It did not answer.")


def test_another_job_of_the_name_is_not_written_to(own_yard: ClusterYard) -> None:
    going(own_yard)
    namespace = own_yard.site.namespace
    change = {"metadata": {"uid": "somebody-else", "labels": {"a": "b"}}}
    with pytest.raises(ApiException) as invalid:
        own_yard.site.batch.patch_namespaced_job(NAME, namespace, change)
    assert invalid.value.status == 422, "as a real server has it"
    with pytest.raises(Refused) as conflict:
        Api(own_yard.config()).patch(path_of("batch/v1", "jobs", namespace, NAME), change)
    assert conflict.value.status == 409


def test_a_refusal_leaves_nothing_and_names_the_field(own_yard: ClusterYard) -> None:
    with pytest.raises(InvalidSpec) as caught:
        own_yard.backend.submit(own_yard.spec(name="1job"))
    assert caught.value.field == "name"
    with pytest.raises(InvalidSpec) as caught:
        own_yard.backend.submit(own_yard.spec(image=Image(builtin="unheard-of")))
    assert caught.value.field == "image"
    assert own_yard.backend.names() == []
    assert not (own_yard.site.root / "runs" / NAME).exists()


def test_half_made_submissions_that_nobody_takes_up_are_cleared_away(
    own_yard: ClusterYard, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_yard.backend.submit(own_yard.spec(SLEEP))
    fake.store.edit(
        "jobs",
        own_yard.site.namespace,
        NAME,
        lambda job: job["metadata"]["annotations"].pop("trainyard.dev/submitted-at"),
    )
    assert own_yard.backend.names() == [NAME]
    monkeypatch.setattr("runtime.backends.kubernetes._HALF_MADE_SECONDS", -1.0)
    assert own_yard.backend.names() == []
    own_yard.site.wait_until_clean()
    own_yard.backend.delete(NAME)


# Ends that the cluster decides


def test_a_machine_that_dies_loses_the_run_and_holds_nothing_back(own_yard: ClusterYard, fake: FakeCluster) -> None:
    going(own_yard, nodes=2)
    machines = {pod.metadata.name.split("-")[3]: pod.spec.node_name for pod in own_yard.site.pods(NAME)}
    fake.nodes[machines["1"]].crash()
    ended = own_yard.wait_for_end()
    assert ended.failure is not None
    assert (ended.outcome, ended.failure.code, ended.failure.node) == (Outcome.NODE_LOST, FailureCode.NODE_LOST, 1)
    assert own_yard.backend.names(live=True) == []
    # A real Job waits for the dead machine's kubelet, as this one does: with the Job its pod goes all the same.
    own_yard.backend.delete(NAME)
    own_yard.site.wait_until_clean()


def test_a_drain_is_nobodys_fault_though_nobody_watched(own_yard: ClusterYard) -> None:
    going(own_yard, nodes=2)
    own_yard.lose_node(0)
    ended = until(lambda: (status := own_yard.backend.describe(NAME)).phase is RunPhase.ENDED and status)
    assert ended.failure is not None
    assert (ended.outcome, ended.failure.code) == (Outcome.NODE_LOST, FailureCode.EVICTED)


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        ("The node was low on resource: memory.", Outcome.NODE_LOST),
        ('Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". ', Outcome.DISK_FULL),
    ],
)
def test_an_eviction_is_whose_limit_it_was_about(
    own_yard: ClusterYard, fake: FakeCluster, message: str, outcome: Outcome
) -> None:
    going(own_yard)
    fake.evict(fake.pods(own_yard.site.namespace)[0], message)
    assert own_yard.wait_for_end().outcome is outcome


def test_a_forged_last_word_is_none(own_yard: ClusterYard) -> None:
    forge = """
    import json, os
    cause = {"kind": "node_lost", "code": "node_lost", "at": 1, "node": 0}
    text = json.dumps({"run": "job-1-1", "node": 0, "phase": "ended", "causes": [cause], "signature": "0" * 64})
    for path in ("/dev/termination-log", "/trainyard/run-root/nodes/0.json"):
        open(path, "w").write(text)
    os._exit(5)
    """
    ended = own_yard.run(forge)
    assert ended.failure is not None
    assert (ended.outcome, ended.failure.exit_code) == (Outcome.CODE_FAILED, 5)


def test_how_it_ended_stays_though_its_pods_go(own_yard: ClusterYard, fake: FakeCluster) -> None:
    ended = own_yard.run("raise SystemExit(3)")
    for pod in own_yard.site.pods(NAME):
        fake.store.delete("pods", own_yard.site.namespace, pod.metadata.name, {"gracePeriodSeconds": 0})
    assert own_yard.another().describe(NAME) == ended


def test_a_job_that_somebody_deleted_is_no_run_any_more(own_yard: ClusterYard) -> None:
    going(own_yard)
    own_yard.site.batch.delete_namespaced_job(NAME, own_yard.site.namespace, propagation_policy="Background")
    with pytest.raises(RunNotFound):
        own_yard.backend.describe(NAME)
    own_yard.backend.delete(NAME)  # its folder


# Namespaces, storage, capacity


def test_each_organization_has_a_namespace_of_its_own(own_yard: ClusterYard, fake: FakeCluster) -> None:
    backend = own_yard.another(namespace_per_organization=True)
    spec = own_yard.spec("print('done')", labels={"organization": "acme"}, organization_nodes=3)
    backend.submit(spec)
    assert until(lambda: backend.describe(NAME).phase is RunPhase.ENDED)
    where = job_of(fake)["metadata"]["namespace"]
    assert where == f"{own_yard.site.namespace}-acme"
    assert fake.store.get("resourcequotas", where, "trainyard")["spec"]["hard"] == {"pods": "3"}
    assert backend.names() == [NAME]
    assert backend.logs(NAME, 0).text == "done\n"
    backend.delete(NAME)
    until(lambda: not fake.store.find("pods", where) and not fake.store.find("secrets", where))


def test_storage_that_is_not_shared_is_read_by_the_api(own_yard: ClusterYard, fake_site: FakeSite) -> None:
    volume = {**fake_site.volume(), "shared": False}
    own_yard.backend = own_yard.another(volume=volume)
    script = """
    import os, sys
    print("é" * 3)
    print(os.listdir(os.environ["CHECKPOINT_DIR"]))
    sys.stdout.write("no end")
    """
    ended = own_yard.run(script)
    assert ended.outcome is Outcome.COMPLETED
    whole = own_yard.log()
    assert whole.startswith("ééé\n[]\nno end")
    chunk = own_yard.backend.logs(NAME, 0, offset=2, limit=3)
    assert (chunk.text, chunk.next_offset, chunk.eof) == ("é", 4, False)
    assert own_yard.backend.samples(NAME, 0).eof
    assert own_yard.backend.stacks(NAME) == {}
    assert not (fake_site.root / "runs" / NAME).exists()


def test_runs_lie_in_their_clusters_volume(own_yard: ClusterYard) -> None:
    with pytest.raises(ValueError, match="must lie in its volume"):
        KubernetesBackend(config=own_yard.config(), root=own_yard.site.root.parent / "elsewhere")


def test_the_roles_are_enough_and_what_is_missing_is_said(
    own_yard: ClusterYard, fake: FakeCluster, tmp_path: Any
) -> None:
    config = own_yard.config()
    fake.make("namespaces", "", "yard")
    made = kubernetes_access.rbac(config, service_account_namespace="yard")
    for one in made:
        plural = f"{one['kind'].lower()}s"
        parts = {key: one[key] for key in ("rules", "roleRef", "subjects") if key in one}
        fake.make(plural, one["metadata"].get("namespace", ""), one["metadata"]["name"], **parts)
    token = fake.server.access.token_for("yard", "trainyard")
    told = json.loads(json.dumps(own_yard.site.settings()))
    path = tmp_path / "least"
    fake.server.kubeconfig(path, token)
    least = ClusterConfig.from_data("test", {**told, "kubeconfig": str(path)})
    lines = list(check(least, own_yard.site.root / "runs"))
    assert [line for line in lines if not line.ok] == []
    assert lines[-1].name == "smoke run"
    own_yard.site.wait_until_clean()
    fake.store.delete("roles", config.namespace, "trainyard-runs", {})
    lines = list(check(least, own_yard.site.root / "runs", smoke=False))
    wrong = {line.name for line in lines if not line.ok}
    assert any(name.startswith("may create, delete, get, list, patch, watch jobs") for name in wrong)
    assert not any("nodes everywhere" in name for name in wrong)
    assert all(line.remedy for line in lines if not line.ok and line.name.startswith("may "))


def test_a_check_names_the_node_kinds_that_no_machine_is_for(own_yard: ClusterYard, fake: FakeCluster) -> None:
    def machines(**settings: Any) -> Check:
        lines = check(own_yard.config(**settings), own_yard.site.root / "runs", smoke=False)
        return next(line for line in lines if line.name == "machines")

    assert (machines().ok, machines().detail) == (True, "2 nodes, 2 for runs, 2 of them ready.")
    kinds = {"large": {"pool": "large"}, "any": {}}
    line = machines(node_selectors=kinds)
    assert (line.ok, line.detail) == (False, "2 nodes, 2 for runs, 2 of them ready. None is for large.")
    assert "node_selectors" in line.remedy
    fake.edit_node("node-a", lambda node: node["metadata"]["labels"].update(pool="large"))
    assert machines(node_selectors=kinds).ok
    none = {"": {"pool": "none"}}
    assert not machines(node_selectors=none).ok
    assert machines(node_selectors=none, elastic=True).ok


def test_capacity_is_what_settings_say_where_nodes_may_not_be_listed(own_yard: ClusterYard, fake: FakeCluster) -> None:
    config = own_yard.config(capacity=[{"cpus": 4, "memory_mib": 4096}])
    few = limited(own_yard, fake, config, kubernetes_access.rbac(config)[1]["rules"])
    going(own_yard, resources=Resources(1, 1024))
    assert [machine.free for machine in few.capacity().machines] == [Resources(3.0, 3072)]
    assert len(own_yard.another(capacity=[{"cpus": 4, "memory_mib": 4096}]).capacity().machines) == 2


# A cluster that is away


def test_a_cluster_that_is_away_is_said_to_be_and_is_not_waited_for_twice(
    own_yard: ClusterYard, fake: FakeCluster
) -> None:
    fake.faults.down = True
    backend = own_yard.another()
    with pytest.raises(BackendUnavailable, match="did not answer"):
        backend.describe(NAME)
    seen = len(fake.faults.calls)
    with pytest.raises(BackendUnavailable, match="did not answer just now"):
        backend.describe(NAME)
    assert len(fake.faults.calls) == seen
    fake.faults.down = False


def test_credentials_that_are_missing_are_said(own_yard: ClusterYard) -> None:
    config = dataclasses.replace(own_yard.config(), kubeconfig="/no/such/file")
    with pytest.raises(BackendUnavailable, match="no way to the cluster"):
        KubernetesBackend(config=config, root=own_yard.site.root / "runs").names()
    (line,) = check(config, own_yard.site.root / "runs")
    assert not line.ok
    assert "kubeconfig" in line.remedy


def test_the_backend_is_imported_only_where_it_is_asked_for() -> None:
    code = "import sys, runtime.backends.base; print('kubernetes' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "False"
