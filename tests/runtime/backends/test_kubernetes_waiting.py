"""Why a run waits, from what Kubernetes 1.31 to 1.37 says in these words."""

from typing import Any

import pytest

from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_waiting import explain, image_trouble
from runtime.specs import Capacity, NodeCapacity, Resources, Waiting, WaitingCode

CONFIG = ClusterConfig.from_data("east", {"volume": {"claim": "c", "root": "/srv"}, "queue": "training"})
CAPACITY = Capacity(
    (
        NodeCapacity("a", Resources(8, 65536, 8, "A100"), Resources(2, 1024, 1, "A100")),
        NodeCapacity("b", Resources(8, 65536, 8, "H100"), Resources(3, 2048, 4, "H100")),
    )
)
REQUESTS = {"cpu": "4", "memory": "4Gi", "nvidia.com/gpu": "2"}
TEMPLATE = {
    "spec": {
        "containers": [{"resources": {"requests": REQUESTS}}],
        "nodeSelector": {"nvidia.com/gpu.product": "A100"},
    }
}
JOB = {"metadata": {"uid": "j"}, "spec": {"completions": 2, "suspend": False, "template": TEMPLATE}}


def pod(**parts: Any) -> dict[str, Any]:
    container = {"name": "node", "image": "registry.example.com/x:1", "resources": {"requests": dict(REQUESTS)}}
    spec = {
        "containers": [container],
        "nodeSelector": {"nvidia.com/gpu.product": "A100"},
        "volumes": [{"name": "storage", "persistentVolumeClaim": {"claimName": "c"}}],
    }
    return {"metadata": {"uid": "p", "name": "p"}, "spec": {**spec, **parts.pop("spec", {})}, "status": parts}


def unplaced(message: str) -> dict[str, Any]:
    return pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}])


def pulling(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(
        spec={"nodeName": "a"},
        containerStatuses=[{"name": "node", "image": "registry.example.com/x:1", "state": state}],
    )


def event(reason: str, message: str, uid: str = "p", at: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    return {"involvedObject": {"uid": uid}, "reason": reason, "message": message, "lastTimestamp": at}


def why(*pods: dict[str, Any], events: Any = (), job: Any = None, **more: Any) -> Waiting:
    told = {"config": CONFIG, "capacity": CAPACITY, **more}
    return explain(job or JOB, pods, events, **told)


TWO = (
    "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match Pod's node affinity/selector. "
    "preemption: 0/2 nodes are available: 1 No preemption victims found for incoming pod, "
    "1 Preemption is not helpful for scheduling."
)


def test_gpus_are_told_with_their_type_and_how_many_are_free() -> None:
    found = why(unplaced(TWO), unplaced(TWO))
    assert found.code is WaitingCode.GPUS
    assert found.data == {"wanted": 2, "gpu_type": "A100", "nodes": 2, "free": 1}


def test_a_type_of_gpu_that_no_machine_has_is_a_lack_of_gpus() -> None:
    found = why(
        unplaced("0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."), capacity=None
    )
    assert (found.code, found.data["free"]) == (WaitingCode.GPUS, None)


def test_cpus_and_memory_are_told_with_the_most_that_is_free() -> None:
    found = why(unplaced("0/2 nodes are available: 2 Insufficient cpu."))
    assert (found.code, found.data) == (WaitingCode.CPUS, {"wanted": 4.0, "nodes": 1, "free": 3})
    found = why(unplaced("0/2 nodes are available: 2 Insufficient memory. preemption: not helpful."))
    assert (found.code, found.data) == (WaitingCode.MEMORY, {"wanted": 4096, "nodes": 1, "free": 2048})


def test_what_fits_no_machine_however_empty_is_not_waited_for_as_if_it_did() -> None:
    small = Capacity((NodeCapacity("a", Resources(8, 65536, 1, "A100"), Resources(8, 65536, 1, "A100")),))
    found = why(unplaced(TWO), capacity=small)
    assert (found.code, found.data) == (WaitingCode.TOO_LARGE, {})
    assert "that large" in found.sentence
    for known in (None, CAPACITY, Capacity((), elastic=True)):
        assert why(unplaced(TWO), capacity=known).code is WaitingCode.GPUS


@pytest.mark.parametrize(
    "message",
    [
        "0/1 nodes are available: 1 node(s) had untolerated taint {pool: gpu}. preemption: 0/1 nodes are available.",
        "0/1 nodes are available: 1 node(s) had untolerated taint(s). preemption: 0/1 nodes are available.",
    ],
)
def test_machines_that_are_kept_for_others(message: str) -> None:
    plain = unplaced(message)
    plain["spec"]["nodeSelector"] = {}
    del plain["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"]
    assert why(plain).code is WaitingCode.TAINT


def test_what_nobody_knows_better_is_told_in_the_schedulers_words() -> None:
    plain = unplaced("0/2 nodes are available: 2 node(s) were unschedulable.")
    plain["spec"]["nodeSelector"] = {}
    found = why(plain)
    assert found.code is WaitingCode.UNSCHEDULABLE
    assert "were unschedulable" in found.data["detail"]


# As containerd, CRI-O and registries say it.
PULLS = [
    ('failed to resolve reference "r.example.com/x:1": r.example.com/x:1: not found', WaitingCode.IMAGE_NAME),
    ("manifest for r.example.com/x:9 not found: manifest unknown: manifest unknown", WaitingCode.IMAGE_NAME),
    (
        "pull access denied, repository does not exist or may require authorization: insufficient_scope: authorization",
        WaitingCode.IMAGE_NAME,
    ),
    (
        "pull access denied, repository does not exist or may require authorization: authorization failed: 401",
        WaitingCode.IMAGE_CREDENTIALS,
    ),
    ('couldn\'t parse image name "X": invalid reference format', WaitingCode.IMAGE_NAME),
    ("no match for platform in manifest: not found", WaitingCode.IMAGE_NAME),
    (
        "failed to authorize: failed to fetch oauth token: unexpected status: 401 Unauthorized",
        WaitingCode.IMAGE_CREDENTIALS,
    ),
    ("unexpected status from HEAD request to https://r/v2/x/manifests/1: 403 Forbidden", WaitingCode.IMAGE_CREDENTIALS),
    ("Head https://r/v2/: no basic auth credentials", WaitingCode.IMAGE_CREDENTIALS),
    (
        'failed to do request: Head "https://r/v2/x": dial tcp: lookup r on 10.0.0.10:53: no such host',
        WaitingCode.IMAGE_NETWORK,
    ),
    ("dial tcp 10.1.2.3:443: connect: connection refused", WaitingCode.IMAGE_NETWORK),
    ("net/http: TLS handshake timeout", WaitingCode.IMAGE_NETWORK),
    ("x509: certificate signed by unknown authority", WaitingCode.IMAGE_NETWORK),
    (
        "unexpected status: 429 Too Many Requests - toomanyrequests: You have reached your pull rate limit",
        WaitingCode.IMAGE_NETWORK,
    ),
    ("unexpected status from GET request: 503 Service Unavailable", WaitingCode.IMAGE_NETWORK),
]


@pytest.mark.parametrize(("message", "code"), PULLS)
def test_why_an_image_cannot_be_pulled(message: str, code: WaitingCode) -> None:
    assert image_trouble(message) is code
    told = why(pulling("ErrImagePull", f'failed to pull and unpack image "r.example.com/x:1": {message}'))
    assert told.code is code
    assert told.data["image"] == "registry.example.com/x:1"


def test_the_cause_of_a_pull_that_is_backed_off_from_is_in_an_event() -> None:
    events = [
        event("Failed", 'Failed to pull image "x": unexpected status: 401 Unauthorized'),
        event("Failed", "Error: ErrImagePull", at="2026-01-01T00:00:01Z"),
        event("Failed", 'Failed to pull image "x": not found', uid="another"),
    ]
    found = why(pulling("ImagePullBackOff", 'Back-off pulling image "x"'), events=events)
    assert found.code is WaitingCode.IMAGE_CREDENTIALS


def test_a_name_that_is_none() -> None:
    assert why(pulling("InvalidImageName", "Failed to apply default image tag")).code is WaitingCode.IMAGE_NAME


def test_a_claim_that_is_not_bound() -> None:
    found = why(
        unplaced("0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: none.")
    )
    assert (found.code, found.data["claim"]) == (WaitingCode.VOLUME, "c")
    found = why(unplaced('0/2 nodes are available: persistentvolumeclaim "other" not found.'))
    assert (found.code, found.data["claim"]) == (WaitingCode.VOLUME, "other")


def test_a_volume_that_cannot_be_mounted() -> None:
    waiting = pulling("ContainerCreating")
    events = [
        event(
            "FailedMount",
            'MountVolume.SetUp failed for volume "storage": hostPath type check failed: /data is not a directory',
        )
    ]
    assert why(waiting, events=events).code is WaitingCode.VOLUME


def test_what_the_run_itself_makes_a_moment_later_is_no_trouble() -> None:
    events = [event("FailedMount", 'MountVolume.SetUp failed for volume "order": configmap "job-1-1" not found')]
    assert why(pulling("ContainerCreating"), pulling("ContainerCreating"), events=events).code is WaitingCode.STARTING


def test_a_quota_that_is_used_up() -> None:
    message = 'Error creating: pods "x" is forbidden: exceeded quota: trainyard, used: pods=6, limited: pods=6'
    found = why(events=[event("FailedCreate", message, uid="j")])
    assert found.code is WaitingCode.QUOTA
    assert "used: pods=6" in found.data["detail"]


def test_a_policy_that_refuses_the_pods() -> None:
    message = 'Error creating: pods "x" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes'
    assert why(events=[event("FailedCreate", message, uid="j")]).code is WaitingCode.ADMISSION


def test_a_quota_that_was_in_the_way_once_is_not_told_again() -> None:
    message = 'pods "x" is forbidden: exceeded quota: trainyard'
    assert why(unplaced(TWO), unplaced(TWO), events=[event("FailedCreate", message, uid="j")]).code is WaitingCode.GPUS


def test_a_queue_that_has_not_admitted_the_run() -> None:
    message = "couldn't assign flavors to pod set main: insufficient quota for nvidia.com/gpu"
    workload = {"status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": message}]}}
    suspended = {"metadata": {"uid": "j"}, "spec": {"completions": 2, "suspend": True}}
    found = why(job=suspended, workload=workload)
    assert (found.code, found.data) == (WaitingCode.ADMISSION, {"queue": "training", "detail": message})
    assert why(job=suspended).data["detail"] == ""


def test_a_run_that_is_under_way_says_for_how_many_nodes_it_waits() -> None:
    running = pod(
        spec={"nodeName": "a"},
        containerStatuses=[{"name": "node", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}],
    )
    assert why(running).data == {"nodes": 1, "step": "place"}
    assert why(running, pulling("ContainerCreating")).data == {"nodes": 1, "step": "container"}
    assert why().data == {"nodes": 2, "step": "place"}


def test_the_trouble_that_a_person_can_mend_comes_first() -> None:
    found = why(unplaced(TWO), pulling("ErrImagePull", "x: not found"))
    assert found.code is WaitingCode.IMAGE_NAME
