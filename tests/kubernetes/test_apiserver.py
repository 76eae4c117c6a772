"""The fake API server behaves as a real one where runs depend on it, and our client accepts every kubeconfig."""

import base64
import json
import sys

import pytest
from kubernetes import client, config
from kubernetes.client import ApiException

from runtime.backends.kubernetes.client import ApiClient, ApiError, resource_path
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.errors import BackendUnavailable
from tests.kubernetes.apiserver import ApiServer, write_kubeconfig

NAMESPACE = "runs"
SECRETS = resource_path("v1", "secrets", NAMESPACE)


@pytest.fixture(scope="module")
def secure_server():
    """A server with TLS and no objects, for tests of how clients log in."""
    created = ApiServer(secure=True)
    yield created
    created.close()


@pytest.fixture
def server():
    created = ApiServer(bookmark_seconds=0.2)  # so that a watch of one second gets several bookmarks
    created.api.create(created.api.resource("", "v1", "namespaces"), "", {"metadata": {"name": NAMESPACE}})
    yield created
    created.close()


def connect(kubeconfig):
    volume = {"host_path": "/data", "root": "/data"}
    return ApiClient(ClusterConfig.from_data("test", {"kubeconfig": str(kubeconfig), "volume": volume}))


@pytest.fixture
def api(server, tmp_path):
    """Our client."""
    return connect(server.kubeconfig(tmp_path / "kubeconfig"))


@pytest.fixture
def batch(server, tmp_path):
    """The official client."""
    path = server.kubeconfig(tmp_path / "official")
    return client.BatchV1Api(config.new_client_from_config(str(path)))


def job(path="", value=None):
    """Return a valid Job, except that the value at `path`, keys and indexes separated by dots, is `value`."""
    container = {"name": "node", "image": "python:3.11", "resources": {"limits": {"cpu": "1", "memory": "64Mi"}}}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    created = {
        "metadata": {"name": "job-1-1", "labels": {"run": "job-1-1"}},
        "spec": {
            "suspend": True,
            "completionMode": "Indexed",
            "completions": 2,
            "parallelism": 2,
            "template": template,
        },
    }
    parent = created
    *parts, last = path.split(".")
    for part in parts:
        parent = parent[int(part)] if part.isdigit() else parent[part]
    parent.update({last: value} if last else {})
    return created


def secret(name, **labels):
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}


CONTAINER = "spec.template.spec.containers.0"


@pytest.mark.parametrize(
    ("path", "value", "status", "message"),
    [
        ("metadata.name", "x" * 63, 422, "invalid DNS label"),  # with a Pod's index it is too long
        ("metadata.labels", {"run": "not a label"}, 422, "valid label"),
        (f"{CONTAINER}.resources.limits.cpu", "two", 422, "quantities"),
        (f"{CONTAINER}.resources.requests", {"cpu": "2"}, 422, "cpu limit"),  # the limit is 1
        (f"{CONTAINER}.volumeMounts", [{"name": "x", "mountPath": "/x"}], 422, "Not found"),  # the Pod has no volume x
        (f"{CONTAINER}.imagee", "x", 400, "strict decoding"),  # no such field
        ("spec.completions", "two", 400, "strict decoding"),
    ],
)
def test_invalid_objects_are_refused(batch, path, value, status, message):
    with pytest.raises(ApiException, match=message) as caught:
        batch.create_namespaced_job(NAMESPACE, job(path, value))
    assert caught.value.status == status
    assert batch.list_namespaced_job(NAMESPACE).items == []


def test_a_job_keeps_its_number_of_pods(batch):
    batch.create_namespaced_job(NAMESPACE, job())
    with pytest.raises(ApiException, match="immutable"):
        batch.patch_namespaced_job("job-1-1", NAMESPACE, {"spec": {"completions": 3}})


def test_an_outdated_version_or_uid_conflicts(api):
    first = api.create(secret("a"))
    assert first is not None
    assert api.create(secret("a")) is None, "it exists already"
    api.patch(f"{SECRETS}/a", {"metadata": {"annotations": {"a": "1"}}})
    for stale in ({"resourceVersion": first["metadata"]["resourceVersion"]}, {"uid": "another"}):
        with pytest.raises(ApiError) as caught:
            api.patch(f"{SECRETS}/a", {"metadata": {**stale, "annotations": {"a": "2"}}})
        assert caught.value.status == 409
    api.delete(f"{SECRETS}/a", uid="another")  # our client ignores the conflict, and deletes nothing
    assert api.get(f"{SECRETS}/a")["metadata"]["annotations"] == {"a": "1"}


def test_pages_of_a_list_show_one_snapshot(api, server):
    for number in range(5):
        api.create(secret(f"s{number}"))
    first = api.get(SECRETS, limit="2")
    api.delete(f"{SECRETS}/s3")
    more = api.get(SECRETS, limit="2", **{"continue": first["metadata"]["continue"]})
    assert [item["metadata"]["name"] for item in (*first["items"], *more["items"])] == ["s0", "s1", "s2", "s3"]
    server.store.compact()  # drops the history, from which the snapshot is made
    with pytest.raises(ApiError) as caught:
        api.get(SECRETS, limit="2", **{"continue": more["metadata"]["continue"]})
    assert caught.value.status == 410


def test_a_watch_reports_objects_that_enter_and_leave_its_selector(api, server):
    version = api.list(SECRETS)["metadata"]["resourceVersion"]
    api.create(secret("a"))
    for labels in ({"run": "1"}, {"other": "1"}, {"run": None}):
        api.patch(f"{SECRETS}/a", {"metadata": {"labels": labels}})

    def types(**query):
        """Return the types of the events that a watch of one second gets."""
        return [event["type"] for event in api.watch(SECRETS, version, 1, **query)]

    assert types(labelSelector="run")[:3] == ["ADDED", "MODIFIED", "DELETED"]
    without_selector = types()
    assert without_selector[:4] == ["ADDED", "MODIFIED", "MODIFIED", "MODIFIED"]
    assert set(without_selector[4:]) == {"BOOKMARK"}


@pytest.mark.parametrize("form", ["client certificate", "files", "token file", "exec", "no verification"])
def test_each_form_of_kubeconfig_is_accepted(form, secure_server, tmp_path):
    certificates, token = secure_server.certificates, secure_server.access.admin_token
    cluster = {"server": secure_server.url, "certificate-authority-data": certificates.authority}
    user = dict(certificates.admin)
    match form:  # "client certificate" is what these two have already
        case "files":  # relative to the kubeconfig, as minikube writes them
            for name, data in {"ca.crt": certificates.authority, **user}.items():
                (tmp_path / name).write_bytes(base64.b64decode(data))
            cluster = {"server": secure_server.url, "certificate-authority": "ca.crt"}
            user = {name.removesuffix("-data"): name for name in user}
        case "token file":
            (tmp_path / "token").write_text(token)
            user = {"tokenFile": str(tmp_path / "token")}
        case "exec":
            api_version = "client.authentication.k8s.io/v1"
            credential = {"apiVersion": api_version, "kind": "ExecCredential", "status": {"token": token}}
            (tmp_path / "login").write_text(f"#!{sys.executable}\nprint({json.dumps(credential)!r})\n")
            (tmp_path / "login").chmod(0o755)
            command = str(tmp_path / "login")
            user = {"exec": {"apiVersion": api_version, "interactiveMode": "Never", "command": command}}
        case "no verification":
            cluster = {"server": secure_server.url, "insecure-skip-tls-verify": True}
    path = write_kubeconfig(tmp_path / "kubeconfig", cluster, user)
    assert connect(path).list(resource_path("v1", "namespaces"))["items"] == []


def test_a_server_certificate_of_another_authority_is_refused(secure_server, tmp_path):
    # Without an authority in the kubeconfig, those of this machine count.
    path = write_kubeconfig(tmp_path / "kubeconfig", {"server": secure_server.url}, {"token": "x"})
    with pytest.raises(BackendUnavailable, match="certificate"):
        connect(path).get("/version")
