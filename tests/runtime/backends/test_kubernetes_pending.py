"""Why a run waits, from the messages of Kubernetes 1.31 to 1.37."""

from dataclasses import replace

import pytest

from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.pending import classify_pull_error, explain_waiting
from runtime.specs import Capacity, NodeCapacity, Resources, WaitingCode

CONFIG = ClusterConfig.from_data("east", {"volume": {"claim": "c", "root": "/srv"}, "queue": "training"})
CAPACITY = Capacity(
    (  # of each node, in total and free: CPUs, MiB of memory, GPUs and their type
        NodeCapacity("a", Resources(8, 65536, 8, "A100"), Resources(2, 1024, 1, "A100")),
        NodeCapacity("b", Resources(8, 65536, 8, "H100"), Resources(3, 2048, 4, "H100")),
    )
)
REQUESTS = {"cpu": "4", "memory": "4Gi", "nvidia.com/gpu": "2"}
TEMPLATE = {
    "spec": {"containers": [{"resources": {"requests": REQUESTS}}], "nodeSelector": {"nvidia.com/gpu.product": "A100"}}
}
JOB = {"metadata": {"uid": "j"}, "spec": {"completions": 2, "suspend": False, "template": TEMPLATE}}


def pod(**parts):
    container = {"name": "node", "image": "registry.example.com/x:1", "resources": {"requests": dict(REQUESTS)}}
    spec = {
        "containers": [container],
        "nodeSelector": {"nvidia.com/gpu.product": "A100"},
        "volumes": [{"name": "storage", "persistentVolumeClaim": {"claimName": "c"}}],
    }
    return {"metadata": {"uid": "p", "name": "p"}, "spec": {**spec, **parts.pop("spec", {})}, "status": parts}


def unplaced(message):
    return pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}])


def pulling(reason, message=""):
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(
        spec={"nodeName": "a"},
        containerStatuses=[{"name": "node", "image": "registry.example.com/x:1", "state": state}],
    )


def event(reason, message, uid="p", at="2026-01-01T00:00:00Z"):
    return {"involvedObject": {"uid": uid}, "reason": reason, "message": message, "lastTimestamp": at}


def without_gpus(one):
    """The pod without its request for GPUs and its selector."""
    requests = {name: value for name, value in REQUESTS.items() if name != "nvidia.com/gpu"}
    one["spec"]["containers"][0]["resources"]["requests"] = requests
    one["spec"]["nodeSelector"] = {}
    return one


def why(*pods, events=(), job=None, **more):
    return explain_waiting(job or JOB, pods, events, **{"config": CONFIG, "capacity": CAPACITY, **more})


def case(name, code, *pods, data=None, **arguments):
    """A row of the table: the pods, other arguments of `why`, the expected code, and expected entries of its data."""
    return pytest.param(pods, arguments, code, data or {}, id=name)


Code = WaitingCode
NO_FREE_GPUS = (
    "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match Pod's node affinity/selector. "
    "preemption: 0/2 nodes are available: 1 No preemption victims found for incoming pod, "
    "1 Preemption is not helpful for scheduling."
)
GPUS = unplaced(NO_FREE_GPUS)
CORDONED = "0/2 nodes are available: 2 node(s) were unschedulable."
TAINT = "0/1 nodes are available: 1 node(s) had untolerated taint"
UNBOUND = "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: none."
SMALL = Capacity((NodeCapacity("a", Resources(8, 65536, 1, "A100"), Resources(8, 65536, 1, "A100")),))
OVER_QUOTA = 'Error creating: pods "x" is forbidden: exceeded quota: trainyard, used: pods=6, limited: pods=6'
QUOTA = event("FailedCreate", OVER_QUOTA, uid="j")
POLICY = event("FailedCreate", 'pods "x" is forbidden: violates PodSecurity "restricted:latest": hostPath', uid="j")
MOUNT = event("FailedMount", 'MountVolume.SetUp failed for volume "storage": hostPath type check failed')
LATE_CONFIG_MAP = event("FailedMount", 'MountVolume.SetUp failed for volume "order": configmap "job-1-1" not found')
BACK_OFF = pulling("ImagePullBackOff", 'Back-off pulling image "x"')
PULL_EVENTS = [
    event("Failed", 'Failed to pull image "x": unexpected status: 401 Unauthorized'),
    event("Failed", "Error: ErrImagePull", at="2026-01-01T00:00:01Z"),
    event("Failed", 'Failed to pull image "x": not found', uid="another"),
]
NOT_ADMITTED = "couldn't assign flavors to pod set main: insufficient quota for nvidia.com/gpu"
WORKLOAD = {"status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": NOT_ADMITTED}]}}
SUSPENDED = {"metadata": {"uid": "j"}, "spec": {"completions": 2, "suspend": True}}
UP = {"name": "node", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
RUNNING = pod(spec={"nodeName": "a"}, containerStatuses=[UP])
CREATING = pulling("ContainerCreating")
GPU_DATA = {"wanted": 2, "gpu_type": "A100", "nodes": 2, "free": 1}
CPUS = unplaced("0/2 nodes are available: 2 Insufficient cpu.")
PARTLY_CLOSED = Capacity((CAPACITY.machines[0], replace(CAPACITY.machines[1], closed_to=frozenset({""}))))
MEMORY = unplaced("0/2 nodes are available: 2 Insufficient memory. preemption: not helpful.")
OTHER_CLAIM = unplaced('0/2 nodes are available: persistentvolumeclaim "other" not found.')


@pytest.mark.parametrize(
    ("pods", "arguments", "code", "data"),
    [
        case("missing GPUs name their type and how many are free", Code.GPUS, GPUS, GPUS, data=GPU_DATA),
        case("missing CPUs name the most free", Code.CPUS, CPUS, data={"wanted": 4.0, "nodes": 1, "free": 3}),
        case("missing memory names what is free", Code.MEMORY, MEMORY, data={"wanted": 4096, "nodes": 1, "free": 2048}),
        case("free are machines that the run may use", Code.CPUS, CPUS, capacity=PARTLY_CLOSED, data={"free": 2}),
        case("a request that fits no machine", Code.TOO_LARGE, GPUS, capacity=SMALL),
        case("a large request without known capacity", Code.GPUS, GPUS, capacity=None),
        case("a large request in an elastic cluster", Code.GPUS, GPUS, capacity=Capacity((), elastic=True)),
        case("a taint with its key", Code.TAINT, without_gpus(unplaced(TAINT + " {pool: gpu}. preemption: x"))),
        case("another obstacle", Code.UNSCHEDULABLE, without_gpus(unplaced(CORDONED)), data={"detail": CORDONED}),
        case("a pull in back-off, by its event", Code.IMAGE_CREDENTIALS, BACK_OFF, events=PULL_EVENTS),
        case("an invalid image name", Code.IMAGE_NAME, pulling("InvalidImageName", "Failed to apply default tag")),
        case("an unbound claim", Code.VOLUME, unplaced(UNBOUND), data={"claim": "c"}),
        case("a claim that does not exist", Code.VOLUME, OTHER_CLAIM, data={"claim": "other"}),
        case("a failed mount", Code.VOLUME, CREATING, events=[MOUNT]),
        case("an object that comes late is no fault", Code.STARTING, CREATING, CREATING, events=[LATE_CONFIG_MAP]),
        case("an exhausted quota", Code.QUOTA, events=[QUOTA], data={"detail": OVER_QUOTA}),
        case("an earlier quota event is ignored once all pods exist", Code.GPUS, GPUS, GPUS, events=[QUOTA]),
        case("a policy that rejects pods", Code.ADMISSION, events=[POLICY]),
        case(
            "a queue that has not admitted the run",
            Code.ADMISSION,
            job=SUSPENDED,
            workload=WORKLOAD,
            data={"queue": "training", "detail": NOT_ADMITTED},
        ),
        case("a queue that gives no reason", Code.ADMISSION, job=SUSPENDED, data={"detail": ""}),
        case("nodes without a container", Code.STARTING, RUNNING, CREATING, data={"nodes": 1, "step": "container"}),
        case("a start without any pod", Code.STARTING, data={"nodes": 2, "step": "place"}),
        case("what a person can fix comes first", Code.IMAGE_NAME, GPUS, pulling("ErrImagePull", "x: not found")),
    ],
)
def test_pods_and_events_show_the_reason_for_waiting(pods, arguments, code, data):
    waiting = why(*pods, **arguments)
    assert waiting.code is code
    assert {name: waiting.data[name] for name in data} == data


@pytest.mark.parametrize(
    ("pods", "arguments"),
    [
        pytest.param((), {"events": [event("FailedCreate", OVER_QUOTA + " " * 600)]}, id="quota"),
        pytest.param((), {"events": [event("FailedCreate", "violates PodSecurity" + " " * 600)]}, id="policy"),
        pytest.param((), {"events": [event("FailedCreate", "x" * 600)]}, id="rejected pods"),
        pytest.param((pulling("CreateContainerError", "x" * 600),), {}, id="container"),
        pytest.param(
            (),
            {
                "job": SUSPENDED,
                "workload": {"status": {"conditions": [{"type": "QuotaReserved", "message": "x" * 600}]}},
            },
            id="queue",
        ),
    ],
)
def test_a_long_message_is_cut_in_the_data(pods, arguments):
    assert len(why(*pods, **arguments).data["detail"]) == 500


NO_ACCESS = "pull access denied, repository does not exist or may require authorization: "
"""How containerd begins a message about a missing repository or missing credentials: only the rest tells which."""
PULL_ERRORS = {
    Code.IMAGE_NAME: [
        'failed to resolve reference "r.example.com/x:1": r.example.com/x:1: not found',
        "manifest for r.example.com/x:9 not found: manifest unknown: manifest unknown",
        NO_ACCESS + "insufficient_scope: authorization",
        'couldn\'t parse image name "X": invalid reference format',
        "no match for platform in manifest: not found",
    ],
    Code.IMAGE_CREDENTIALS: [
        NO_ACCESS + "authorization failed: 401",
        "failed to authorize: failed to fetch oauth token: unexpected status: 401 Unauthorized",
        "unexpected status from HEAD request to https://r/v2/x/manifests/1: 403 Forbidden",
        "Head https://r/v2/: no basic auth credentials",
        'failed to resolve "r:5000/tls/not-found@sha256:0503": HEAD http://r:5000/v2/: 401 Unauthorized',
    ],
    Code.IMAGE_NETWORK: [
        'failed to do request: Head "https://r/v2/x": dial tcp: lookup r on 10.0.0.10:53: no such host',
        "dial tcp 10.1.2.3:443: connect: connection refused",
        "net/http: TLS handshake timeout",
        "x509: certificate signed by unknown authority",
        "unexpected status: 429 Too Many Requests - toomanyrequests: You have reached your pull rate limit",
        "unexpected status from GET request: 503 Service Unavailable",
    ],
}
"""Messages of containerd, CRI-O and registries."""


@pytest.mark.parametrize(
    ("message", "code"), [(message, code) for code, messages in PULL_ERRORS.items() for message in messages]
)
def test_pull_errors_are_classified(message, code):
    assert classify_pull_error(message) is code
    waiting = why(pulling("ErrImagePull", f'failed to pull and unpack image "r.example.com/x:1": {message}'))
    assert (waiting.code, waiting.data["image"]) == (code, "registry.example.com/x:1")
