"""What only Kubernetes does, on the fake cluster: what every backend keeps is in `test_contract_backends`."""

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.client import ApiException

from runtime.backends import kubernetes_access, kubernetes_guard, kubernetes_launchers, manifests
from runtime.backends.base import Check
from runtime.backends.kubernetes import KubernetesBackend, check
from runtime.backends.kubernetes_api import Api, Refused, path_of
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_names import USED
from runtime.backends.kubernetes_order import order
from runtime.errors import BackendUnavailable, InvalidSpec, RunNotFound
from runtime.specs import (
    ANY_NUMBER,
    FailureCode,
    Image,
    Outcome,
    PullSecret,
    Resources,
    RunPhase,
    RunStatus,
    WaitingCode,
)
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.faults import Fault
from tests.kubernetes.sites import FakeSite
from tests.kubernetes.yard import ClusterYard

SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(300)"
NAME = "job-1-1"


def until(found: Callable[[], Any], seconds: float = 60) -> Any:
    give_up_at = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    return result


def going(yard: ClusterYard, **changes: Any) -> RunStatus:
    yard.backend.submit(yard.spec(SLEEP, grace_seconds=1, **changes))
    return yard.wait_for_text("up")


def job_of(cluster: FakeCluster, name: str = NAME) -> dict[str, Any]:
    return next(job for job in cluster.store.find("jobs") if job["metadata"]["name"] == name)


def waits_for(yard: ClusterYard, code: WaitingCode) -> RunStatus:
    return yard.wait(NAME, lambda status: status.waiting_code == code)


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


# The launcher


class Later:
    """The clock of whoever collects launchers, so many days on."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, days: float) -> None:
        self._days = days

    def time(self) -> float:
        return time.time() + self._days * 86400


def launchers(fake: FakeCluster) -> set[str]:
    names = {one["metadata"]["name"] for one in fake.store.find("configmaps")}
    return {name for name in names if name.startswith("trainyard-launcher-")}


def old_launcher(fake: FakeCluster, yard: ClusterYard, content: bytes, **annotations: str) -> str:
    """The ConfigMap of another version of the console. Gives its name."""
    manifest = manifests.launcher(yard.site.namespace, content)
    manifest["metadata"]["annotations"] = annotations
    name = str(manifest["metadata"]["name"])
    fake.make("configmaps", yard.site.namespace, name, **manifest)
    return name


def test_launchers_that_nobody_uses_any_more_are_removed(
    own_yard: ClusterYard, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = own_yard.site.namespace
    unused = old_launcher(fake, own_yard, b"unused")
    beside = old_launcher(fake, own_yard, b"beside", **{USED: repr(Later(2).time() - 7200)})
    strange = old_launcher(fake, own_yard, b"strange", **{USED: "yesterday"})
    mounted = old_launcher(fake, own_yard, b"mounted")
    spec = own_yard.spec(name="job-2-1")
    job = manifests.job(spec, own_yard.config(), order(spec, own_yard.config(), own_yard.site.root / "runs"), mounted)
    fake.make("jobs", namespace, "job-2-1", **job)
    monkeypatch.setattr(kubernetes_launchers, "time", Later(2))
    own_yard.backend.names()
    assert launchers(fake) == {unused, beside, strange, mounted}, "we have not run here: an upgrade may be going on"
    own_yard.run("print('done')")
    (ours,) = launchers(fake) - {unused, beside, strange, mounted}
    fake.store.edit("configmaps", namespace, ours, lambda one: one["metadata"]["annotations"].clear())
    monkeypatch.setattr(kubernetes_launchers, "time", Later(0.9))
    own_yard.backend.names()
    assert unused in launchers(fake), "nor is it over so soon"
    monkeypatch.setattr(kubernetes_launchers, "time", Later(2))
    own_yard.backend.names(live=True)
    assert unused in launchers(fake), "the frequent sweep looks at runs alone"
    own_yard.backend.names()
    assert launchers(fake) == {ours, beside, strange, mounted}
    own_yard.backend.delete("job-2-1")
    own_yard.backend.names()
    assert launchers(fake) == {ours, beside, strange}


def test_a_console_says_that_it_uses_its_launcher_and_makes_it_again_if_need_be(
    own_yard: ClusterYard, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_yard.run("print('done')")
    (ours,) = launchers(fake)
    fake.store.delete("configmaps", own_yard.site.namespace, ours, {})
    monkeypatch.setattr(kubernetes_launchers, "SAY_AGAIN_SECONDS", -1.0)
    assert own_yard.run("print('done')", name="job-2-1").outcome is Outcome.COMPLETED
    told = fake.store.get("configmaps", own_yard.site.namespace, ours)["metadata"]["annotations"]
    assert abs(time.time() - float(told[USED])) < 60


def test_a_launcher_that_somebody_says_to_use_meanwhile_is_not_deleted(
    own_yard: ClusterYard, fake: FakeCluster
) -> None:
    name = old_launcher(fake, own_yard, b"other")
    api, address = Api(own_yard.config()), path_of("v1", "configmaps", own_yard.site.namespace, name)
    seen = api.get(address)["metadata"]["resourceVersion"]
    api.patch(address, {"metadata": {"annotations": {USED: "1"}}})
    api.delete(address, version=seen)
    assert launchers(fake) == {name}
    api.delete(address, version=api.get(address)["metadata"]["resourceVersion"])
    assert launchers(fake) == set()


def test_roles_of_before_do_not_keep_runs_from_being_listed(
    own_yard: ClusterYard, fake: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    own_yard.run("print('done')")
    rules = kubernetes_access.rbac(own_yard.config())[1]["rules"]
    without = [rule for rule in rules if rule["resources"] != ["configmaps"]]
    assert limited(own_yard, fake, own_yard.config(), without).names() == [NAME]
    assert "stay in the cluster" in caplog.text


# Waiting, and not for ever


def test_a_run_that_is_placed_in_part_is_taken_down_whole(own_yard: ClusterYard) -> None:
    own_yard.backend = own_yard.another(gang_seconds=2)
    own_yard.backend.submit(own_yard.spec(SLEEP, nodes=3, resources=Resources(5, 256)))
    status = waits_for(own_yard, WaitingCode.CPUS)
    assert status.waiting_data == {"wanted": 5.0, "nodes": 1, "free": 3.0}
    ended = own_yard.wait_for_end()
    assert ended.failure is not None
    assert (ended.outcome, ended.started_at, ended.spans) == (Outcome.NO_CAPACITY, None, ())
    assert ended.failure.data["placed"] == 2
    time.sleep(1.1)  # what was counted is a second old at most
    assert [machine.free.cpus for machine in own_yard.backend.capacity().machines] == [8.0, 8.0]


def test_gpus_that_are_not_free_are_counted(own_yard: ClusterYard, fake: FakeCluster) -> None:
    offers = {"cpu": "8", "memory": "16Gi", "nvidia.com/gpu": "4"}
    fake.add_node("gpu-a", offers, **{"nvidia.com/gpu.product": "A100"})
    own_yard.backend.submit(own_yard.spec(SLEEP, nodes=2, resources=Resources(1, 256, gpus=3, gpu_type="A100")))
    status = waits_for(own_yard, WaitingCode.GPUS)
    assert status.waiting_data == {"wanted": 3, "gpu_type": "A100", "nodes": 1, "free": 1}


def test_a_run_that_no_machine_can_hold_says_so_and_starts_once_one_can(
    own_yard: ClusterYard, fake: FakeCluster
) -> None:
    large = Resources(12, 256)
    assert own_yard.backend.capacity().nodes_ever(large) == 0
    own_yard.backend.submit(own_yard.spec(SLEEP, resources=large))
    assert "that large" in waits_for(own_yard, WaitingCode.TOO_LARGE).waiting_for
    fake.add_node("large", {"cpu": "16", "memory": "16Gi"})
    own_yard.wait_for_text("up")
    time.sleep(1.1)  # what was counted is a second old at most
    assert own_yard.backend.capacity().nodes_ever(large) == 1


def test_a_node_kind_that_no_machine_is_for_has_no_room(own_yard: ClusterYard, fake: FakeCluster) -> None:
    own = own_yard.another(node_selectors={"large": {"pool": "large"}}).capacity()
    assert [own.nodes_ever(Resources(1, 256), kind) for kind in ("large", "small")] == [0, 16]
    fake.add_node("large", {"cpu": "16", "memory": "16Gi"}, pool="large")
    own = own_yard.another(node_selectors={"large": {"pool": "large"}}).capacity()
    assert own.nodes_ever(Resources(1, 256), "large") == 16


def test_an_elastic_cluster_takes_what_its_machines_of_now_could_not(own_yard: ClusterYard, fake: FakeCluster) -> None:
    large = Resources(12, 256)
    assert own_yard.another(elastic=True).capacity().nodes_now(large) == ANY_NUMBER
    # Where the most that there can be is known, that counts.
    pool = own_yard.another(elastic=True, capacity=[{"cpus": 12, "memory_mib": 4096, "count": 2}])
    assert pool.capacity().nodes_ever(large) == 2
    own_yard.backend = pool
    pool.submit(own_yard.spec(SLEEP, resources=large))
    assert waits_for(own_yard, WaitingCode.CPUS).waiting_data["wanted"] == 12.0
    assert pool.capacity().nodes_now(large) == 1
    fake.add_node("large", {"cpu": "16", "memory": "16Gi"})
    own_yard.wait_for_text("up")


@pytest.mark.parametrize(
    ("reference", "code", "outcome"),
    [
        ("registry.acme.example/none:1", WaitingCode.IMAGE_NAME, Outcome.CODE_FAILED),
        ("private.acme.example/vision:1", WaitingCode.IMAGE_CREDENTIALS, Outcome.CODE_FAILED),
        ("away.acme.example/vision:1", WaitingCode.IMAGE_NETWORK, Outcome.PLATFORM_ERROR),
    ],
)
def test_an_image_that_cannot_be_pulled_says_why_and_is_given_up_free(  # noqa: PLR0917 - fixtures and a table
    own_yard: ClusterYard,
    fake: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    reference: str,
    code: WaitingCode,
    outcome: Outcome,
) -> None:
    fake.registry.passwords["private.acme.example"] = "right"
    fake.registry.dead.add("away.acme.example")
    monkeypatch.setattr(kubernetes_guard, "HOPELESS_SECONDS", 2.0)
    own_yard.backend = own_yard.another(start_seconds=2)
    secret = PullSecret("private.acme.example", "acme", "wrong")
    own_yard.backend.submit(own_yard.spec(SLEEP, image=Image(reference=reference), pull_secret=secret))
    assert waits_for(own_yard, code).waiting_data["image"] == reference
    ended = own_yard.wait_for_end()
    assert ended.failure is not None
    assert (ended.outcome, ended.failure.code, ended.started_at) == (outcome, code.value, None)


def test_a_private_image_is_pulled_with_its_registrys_credentials(own_yard: ClusterYard, fake: FakeCluster) -> None:
    reference = "private.acme.example/vision:1"
    fake.registry.passwords["private.acme.example"] = "right"
    fake.registry.images[reference] = next(iter(fake.registry.images.values()))
    secret = PullSecret("private.acme.example", "acme", "right")
    assert own_yard.run("print(1)", image=Image(reference=reference), pull_secret=secret).outcome is Outcome.COMPLETED


def test_a_namespace_whose_quota_is_used_up(own_yard: ClusterYard, fake: FakeCluster) -> None:
    fake.make("resourcequotas", own_yard.site.namespace, "few", spec={"hard": {"pods": "1"}})
    own_yard.backend.submit(own_yard.spec(SLEEP, nodes=2))
    assert "exceeded quota" in waits_for(own_yard, WaitingCode.QUOTA).waiting_data["detail"]


# Kueue


def test_a_queue_lets_runs_begin_and_taking_them_back_ends_them_free(own_yard: ClusterYard, fake: FakeCluster) -> None:
    own_yard.backend = own_yard.another(queue="training")
    own_yard.backend.submit(own_yard.spec(SLEEP))
    assert waits_for(own_yard, WaitingCode.ADMISSION).waiting_data["queue"] == "training"
    assert job_of(fake)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    fake.store.edit("jobs", own_yard.site.namespace, NAME, lambda job: job["spec"].update(suspend=False))
    own_yard.wait_for_text("up")
    own_yard.wait(NAME, lambda status: status.started_at is not None)
    fake.store.edit("jobs", own_yard.site.namespace, NAME, lambda job: job["spec"].update(suspend=True))
    ended = own_yard.wait_for_end()
    assert ended.failure is not None
    assert (ended.outcome, ended.failure.code) == (Outcome.NODE_LOST, FailureCode.PREEMPTED)


def test_a_run_that_waits_for_its_queue_is_stopped_at_once(own_yard: ClusterYard, fake: FakeCluster) -> None:
    own_yard.backend = own_yard.another(queue="training")
    own_yard.backend.submit(own_yard.spec(SLEEP))
    own_yard.backend.stop(NAME, 10)
    status = own_yard.backend.describe(NAME)
    assert (status.phase, status.outcome, status.started_at) == (RunPhase.ENDED, Outcome.STOPPED, None)
    assert own_yard.backend.names(live=True) == []
    # Were it let begin now, it would have nothing to run.
    assert job_of(fake)["spec"]["parallelism"] == 0


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


def limited(
    yard: ClusterYard, fake: FakeCluster, config: ClusterConfig, rules: list[dict[str, Any]]
) -> KubernetesBackend:
    """A backend that may do what these rules say, in the namespace of runs."""
    fake.make("roles", config.namespace, "r", rules=rules)
    fake.make("serviceaccounts", config.namespace, "a")
    subject = {"kind": "ServiceAccount", "name": "a", "namespace": config.namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"}
    fake.make("rolebindings", config.namespace, "b", roleRef=reference, subjects=[subject])
    token = fake.server.access.token_for(config.namespace, "a")
    path = yard.site.root.parent / "limited"
    fake.server.kubeconfig(path, token)
    return KubernetesBackend(config=dataclasses.replace(config, kubeconfig=str(path)), root=yard.site.root / "runs")


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
