"""The fake API server against the official client: it refuses what a real one refuses, in the same way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config, watch
from kubernetes.client import ApiException

from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.faults import Fault

APPLY = "application/apply-patch+yaml"
NAMESPACE = "runs"


@pytest.fixture
def server() -> Iterator[ApiServer]:
    made = ApiServer(bookmark_seconds=0.2)
    yield made
    made.close()


class Client:
    def __init__(self, api: Any) -> None:
        self.core = client.CoreV1Api(api)
        self.batch = client.BatchV1Api(api)
        self.auth = client.AuthorizationV1Api(api)


@pytest.fixture
def kube(server: ApiServer, tmp_path: Path) -> Client:
    made = Client(config.new_client_from_config(str(server.kubeconfig(tmp_path / "kubeconfig"))))
    made.core.create_namespace({"metadata": {"name": NAMESPACE}})
    return made


def job(**changes: Any) -> dict[str, Any]:
    container = {"name": "node", "image": "python:3.11", "resources": {"limits": {"cpu": "1", "memory": "64Mi"}}}
    spec = {
        "suspend": True,
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
    }
    return {"metadata": {"name": "job-1-1", "labels": {"run": "job-1-1"}}, "spec": {**spec, **changes}}


def changed(path: str, value: Any) -> dict[str, Any]:
    made = job()
    parent: Any = made
    *parts, last = path.split(".")
    for part in parts:
        parent = parent[int(part)] if part.isdigit() else parent[part]
    parent[last] = value
    return made


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (changed("metadata.name", "Job_1"), 422, "RFC 1123"),
        (changed("metadata.name", "x" * 63), 422, "invalid DNS label"),
        (changed("metadata.labels", {"run": "not a label"}), 422, "valid label"),
        (changed("metadata.labels", {"run": 3}), 400, "strict decoding"),
        (changed("spec.template.spec.restartPolicy", "Always"), 422, "restartPolicy"),
        (changed("spec.template.spec.containers.0.resources.limits.cpu", "two"), 422, "quantities"),
        (changed("spec.template.spec.containers.0.resources.requests", {"cpu": "2"}), 422, "cpu limit"),
        (changed("spec.template.spec.containers.0.volumeMounts", [{"name": "x", "mountPath": "/x"}]), 422, "Not found"),
        (changed("spec.template.spec.containers.0.imagee", "x"), 400, "strict decoding"),
        (changed("spec.completions", None), 422, "completions"),
        (changed("spec.completions", "two"), 400, "strict decoding"),
        (changed("spec.podFailurePolicy", {"rules": [{"action": "FailJob"}]}), 422, "OnExitCodes"),
    ],
)
def test_what_a_server_refuses_is_refused(kube: Client, body: dict[str, Any], status: int, told: str) -> None:
    with pytest.raises(ApiException, match=told) as caught:
        kube.batch.create_namespaced_job(NAMESPACE, body)
    assert caught.value.status == status
    assert kube.batch.list_namespaced_job(NAMESPACE).items == []


def test_defaults_are_filled_in(kube: Client) -> None:
    made = kube.batch.create_namespaced_job(NAMESPACE, job())
    assert made.spec.backoff_limit == 6
    assert made.spec.pod_replacement_policy == "TerminatingOrFailed"
    assert made.spec.selector.match_labels == {"batch.kubernetes.io/controller-uid": made.metadata.uid}
    assert made.spec.template.metadata.labels["job-name"] == "job-1-1"
    pod = made.spec.template.spec
    assert pod.termination_grace_period_seconds == 30
    assert pod.containers[0].resources.requests == {"cpu": "1", "memory": "64Mi"}
    assert (made.metadata.generation, pod.containers[0].image_pull_policy) == (1, "IfNotPresent")


@pytest.mark.parametrize(
    "patch",
    [
        {"spec": {"completions": 3}},
        {"spec": {"completionMode": "NonIndexed"}},
        {"spec": {"template": {"spec": {"containers": [{"name": "node", "image": "other"}]}}}},
    ],
)
def test_what_is_immutable_stays(kube: Client, patch: dict[str, Any]) -> None:
    kube.batch.create_namespaced_job(NAMESPACE, job())
    with pytest.raises(ApiException, match="immutable") as caught:
        kube.batch.patch_namespaced_job("job-1-1", NAMESPACE, patch)
    assert caught.value.status == 422


def test_a_suspended_job_may_be_told_where_its_pods_go(kube: Client) -> None:
    kube.batch.create_namespaced_job(NAMESPACE, job())
    patch = {"spec": {"template": {"spec": {"nodeSelector": {"pool": "a"}}}, "suspend": False}}
    made = kube.batch.patch_namespaced_job("job-1-1", NAMESPACE, patch)
    assert made.spec.template.spec.node_selector == {"pool": "a"}
    assert made.metadata.generation == 2


def test_the_second_of_a_name_is_a_conflict_and_the_third_is_unknown(kube: Client) -> None:
    kube.batch.create_namespaced_job(NAMESPACE, job())
    with pytest.raises(ApiException, match="AlreadyExists") as caught:
        kube.batch.create_namespaced_job(NAMESPACE, job())
    assert caught.value.status == 409
    for name, find in (("job-2-1", kube.batch.read_namespaced_job), ("x", kube.core.read_namespaced_secret)):
        with pytest.raises(ApiException) as caught:
            find(name, NAMESPACE)
        assert caught.value.status == 404
    with pytest.raises(ApiException, match=r"namespaces .*none.* not found"):
        kube.batch.create_namespaced_job("none", job())


def test_an_old_version_does_not_overwrite_a_newer_one(kube: Client) -> None:
    first = kube.batch.create_namespaced_job(NAMESPACE, job())
    kube.batch.patch_namespaced_job("job-1-1", NAMESPACE, {"metadata": {"annotations": {"a": "1"}}})
    first.metadata.annotations = {"a": "2"}
    with pytest.raises(ApiException, match="modified") as caught:
        kube.batch.replace_namespaced_job("job-1-1", NAMESPACE, first)
    assert caught.value.status == 409
    stale = {"metadata": {"resourceVersion": first.metadata.resource_version, "annotations": {"a": "3"}}}
    with pytest.raises(ApiException) as caught:
        kube.batch.patch_namespaced_job("job-1-1", NAMESPACE, stale)
    assert caught.value.status == 409


def test_server_side_apply_makes_merges_takes_back_and_disputes(kube: Client) -> None:
    def apply(data: dict[str, str], manager: str, *, force: bool = False) -> Any:
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "order"}, "data": data}
        return kube.core.patch_namespaced_config_map(
            "order", NAMESPACE, body, field_manager=manager, force=force, _content_type=APPLY
        )

    assert apply({"a": "1", "b": "1"}, "ours").data == {"a": "1", "b": "1"}
    assert apply({"c": "1"}, "theirs").data == {"a": "1", "b": "1", "c": "1"}
    assert apply({"a": "1"}, "ours").data == {"a": "1", "c": "1"}, "what is said no more goes; what is another's stays"
    with pytest.raises(ApiException, match="conflict with") as caught:
        apply({"a": "1", "c": "2"}, "ours")
    assert caught.value.status == 409
    assert apply({"a": "1", "c": "2"}, "ours", force=True).data == {"a": "1", "c": "2"}


def test_an_immutable_config_map_stays_as_it_is(kube: Client) -> None:
    kube.core.create_namespaced_config_map(
        NAMESPACE, {"metadata": {"name": "x"}, "immutable": True, "data": {"a": "1"}}
    )
    with pytest.raises(ApiException, match="immutable"):
        kube.core.patch_namespaced_config_map("x", NAMESPACE, {"data": {"a": "2"}})
    kube.core.patch_namespaced_config_map("x", NAMESPACE, {"metadata": {"labels": {"a": "b"}}})


def test_selectors(kube: Client) -> None:
    for name, labels in (("a", {"run": "1", "kind": "x"}), ("b", {"run": "2"}), ("c", {})):
        kube.core.create_namespaced_secret(NAMESPACE, {"metadata": {"name": name, "labels": labels}})

    def named(**selector: str) -> list[str]:
        return [item.metadata.name for item in kube.core.list_namespaced_secret(NAMESPACE, **selector).items]

    assert named(label_selector="run") == ["a", "b"]
    assert named(label_selector="run,!kind") == ["b"]
    assert named(label_selector="run in (1,3)") == ["a"]
    assert named(label_selector="run!=1") == ["b", "c"]
    assert named(field_selector="metadata.name=c") == ["c"]
    with pytest.raises(ApiException, match="field label not supported"):
        named(field_selector="spec.color=red")


def test_long_lists_come_in_pages_of_one_moment(kube: Client, server: ApiServer) -> None:
    for number in range(5):
        kube.core.create_namespaced_secret(NAMESPACE, {"metadata": {"name": f"s{number}"}})
    first = kube.core.list_namespaced_secret(NAMESPACE, limit=2)
    kube.core.delete_namespaced_secret("s3", NAMESPACE)
    more = kube.core.list_namespaced_secret(NAMESPACE, limit=2, _continue=first.metadata._continue)
    assert [item.metadata.name for item in (*first.items, *more.items)] == ["s0", "s1", "s2", "s3"]
    server.store.compact()
    with pytest.raises(ApiException) as caught:
        kube.core.list_namespaced_secret(NAMESPACE, limit=2, _continue=more.metadata._continue)
    assert caught.value.status == 410


def seen(kube: Client, version: str, count: int, **options: Any) -> list[tuple[str, str]]:
    found = []
    for event in watch.Watch().stream(
        kube.core.list_namespaced_secret, NAMESPACE, resource_version=version, timeout_seconds=5, **options
    ):
        item = event["object"]
        found.append((event["type"], item["metadata"]["name"] if isinstance(item, dict) else item.metadata.name))
        if len(found) == count:
            break
    return found


def test_a_watch_tells_what_came_changed_left_and_came_into_the_selector(kube: Client) -> None:
    version = kube.core.list_namespaced_secret(NAMESPACE).metadata.resource_version
    kube.core.create_namespaced_secret(NAMESPACE, {"metadata": {"name": "a"}})
    kube.core.patch_namespaced_secret("a", NAMESPACE, {"metadata": {"labels": {"run": "1"}}})
    kube.core.patch_namespaced_secret("a", NAMESPACE, {"metadata": {"labels": {"other": "1"}}})
    kube.core.patch_namespaced_secret("a", NAMESPACE, {"metadata": {"labels": {"run": None}}})
    kube.core.delete_namespaced_secret("a", NAMESPACE)
    assert seen(kube, version, 5) == [("ADDED", "a"), *[("MODIFIED", "a")] * 3, ("DELETED", "a")]
    assert seen(kube, version, 3, label_selector="run") == [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]


def test_a_watch_from_a_forgotten_version_is_told_so(kube: Client, server: ApiServer) -> None:
    version = kube.core.list_namespaced_secret(NAMESPACE).metadata.resource_version
    kube.core.create_namespaced_secret(NAMESPACE, {"metadata": {"name": "a"}})
    server.store.compact()
    with pytest.raises(ApiException, match="too old resource version") as caught:
        seen(kube, version, 1)
    assert caught.value.status == 410


def test_bookmarks_tell_how_far_a_quiet_watch_has_come(kube: Client, server: ApiServer) -> None:
    version = int(kube.core.list_namespaced_secret(NAMESPACE).metadata.resource_version)
    kube.core.create_namespaced_config_map(NAMESPACE, {"metadata": {"name": "not-watched"}})
    stream = watch.Watch().stream(
        kube.core.list_namespaced_secret, NAMESPACE, resource_version=str(version), allow_watch_bookmarks=True
    )
    mark = next(iter(stream))
    assert mark["type"] == "BOOKMARK"
    assert int(mark["raw_object"]["metadata"]["resourceVersion"]) == server.store.version > version


def test_a_token_may_do_what_its_roles_say(kube: Client, server: ApiServer, tmp_path: Path) -> None:
    kube.core.create_namespaced_service_account(NAMESPACE, {"metadata": {"name": "console"}})
    request = {"metadata": {"name": "console"}, "spec": {"audiences": []}}
    token = kube.core.create_namespaced_service_account_token("console", NAMESPACE, request).status.token
    path = server.kubeconfig(tmp_path / "narrow", token)
    narrow = Client(config.new_client_from_config(str(path)))
    rbac = client.RbacAuthorizationV1Api(kube.core.api_client)
    rule = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["list"]}
    rbac.create_namespaced_role(NAMESPACE, {"metadata": {"name": "r"}, "rules": [rule]})
    with pytest.raises(ApiException, match="forbidden") as caught:
        narrow.core.list_namespaced_secret(NAMESPACE)
    assert caught.value.status == 403
    subject = {"kind": "ServiceAccount", "name": "console", "namespace": NAMESPACE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"}
    rbac.create_namespaced_role_binding(NAMESPACE, {"metadata": {"name": "r"}, "subjects": [subject], "roleRef": role})
    assert narrow.core.list_namespaced_secret(NAMESPACE).items == []
    with pytest.raises(ApiException):
        narrow.core.list_namespaced_pod(NAMESPACE)
    for verb, allowed in (("list", True), ("delete", False)):
        asked = {"spec": {"resourceAttributes": {"verb": verb, "resource": "secrets", "namespace": NAMESPACE}}}
        assert narrow.auth.create_self_subject_access_review({"metadata": {}, **asked}).status.allowed is allowed
    server.access.revoke(token)
    with pytest.raises(ApiException) as caught:
        narrow.core.list_namespaced_secret(NAMESPACE)
    assert caught.value.status == 401


@pytest.mark.parametrize("fault", [Fault.INTERNAL, Fault.BROKEN_AFTER, Fault.BROKEN_BEFORE, Fault.TIMEOUT_AFTER])
def test_a_fault_hurts_the_call_that_is_named(kube: Client, server: ApiServer, fault: Fault) -> None:
    server.faults.hold_seconds = 0.05
    kube.core.list_namespaced_secret(NAMESPACE)
    server.faults.arm(1, fault, version=server.store.version)
    kube.core.list_namespaced_secret(NAMESPACE)
    with pytest.raises(Exception, match=r"500|aborted|without response|Connection") as caught:
        kube.core.create_namespaced_secret(NAMESPACE, {"metadata": {"name": "a"}})
    assert caught.value is not None
    assert not server.faults.pending
    done = [item.metadata.name for item in kube.core.list_namespaced_secret(NAMESPACE).items]
    assert done == (["a"] if fault in {Fault.BROKEN_AFTER, Fault.TIMEOUT_AFTER} else [])


def test_a_stale_read_shows_the_past(kube: Client, server: ApiServer) -> None:
    before = server.store.version
    kube.core.create_namespaced_secret(NAMESPACE, {"metadata": {"name": "a"}})
    server.faults.arm(0, Fault.STALE, version=before, times=1)
    assert kube.core.list_namespaced_secret(NAMESPACE).items == []
    assert len(kube.core.list_namespaced_secret(NAMESPACE).items) == 1


def test_calls_of_many_clients_at_once_each_have_a_version(kube: Client, server: ApiServer) -> None:
    def make(number: int) -> None:
        kube.core.create_namespaced_secret(NAMESPACE, {"metadata": {"name": f"s{number}"}})

    threads = [threading.Thread(target=make, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    versions = [change.version for change in server.store.history]
    assert versions == sorted(set(versions))
    assert len(kube.core.list_namespaced_secret(NAMESPACE).items) == 20
