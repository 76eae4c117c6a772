"""Every request of the backend fails in every way, one at a time: no run is duplicated, lost, or left incomplete.

Requests are counted without faults first, so that a request added later is covered.
"""

import contextlib
import dataclasses
import itertools
import math
import threading
import time

import pytest

from runtime.backends.kubernetes import client
from runtime.backends.kubernetes.backend import KubernetesBackend
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.state import Termination, read_job
from runtime.errors import BackendUnavailable, RunNotFound
from runtime.specs import FailureCode, Framework, Image, Mount, Outcome, PullSecret, Resources, RunPhase, RunSpec
from tests.kubernetes import pod_status
from tests.kubernetes.api import ENDED
from tests.kubernetes.controllers import make_node
from tests.kubernetes.faults import Fault
from tests.kubernetes.jobs import INDEX
from tests.kubernetes.resources import ApiError, now
from tests.kubernetes.sites import FakeSite

pytestmark = pytest.mark.slow

NAME = "job-1-1"
NAMESPACE = "trainyard-runs"
GRACE_SECONDS = 5
QUICK_FAULTS = (Fault.BROKEN_BEFORE, Fault.BROKEN_AFTER, Fault.INTERNAL)
"""The faults for which a client need not wait."""
OWNED = ("services", "configmaps", "networkpolicies")
"""The kinds of objects that a Job owns."""
SPEC = RunSpec(
    name=NAME,
    framework=Framework.PYTORCH,
    image=Image(reference="registry.example.com/x:1"),
    nodes=2,
    workers_per_node=1,
    resources=Resources(cpus=0.1, memory_mib=64),
    script="train.py",
    deadline_seconds=600,
    pull_secret=PullSecret("registry.example.com", "me", "secret"),
)


class FakePods(FakeSite):
    """A cluster with one node that runs no processes: its Pods run at once and end when the test says so."""

    def __init__(self, folder):
        super().__init__(folder, nodes={}, secure=False)
        # Other tests validate every object; this one creates thousands.
        self.fake.api.checks_schemas = False
        self.fake.faults.retry_after_seconds = 0
        self.fake.controllers.pace.collect_seconds = 0  # each of some hundred deletions is awaited
        self.fake.controllers.heartbeats["node"] = math.inf  # as of a kubelet that lives
        make_node(self.fake.api, "node", {}, {"cpu": "64", "memory": "256Gi"})
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        """Start and end Pods in the API, as the node's kubelet would."""
        store = self.fake.store
        while not self._closing.is_set():
            for pod in store.find("pods", NAMESPACE, lambda one: bool(one["spec"].get("nodeName"))):
                name, phase = pod["metadata"]["name"], pod["status"]["phase"]
                if phase not in ENDED and pod["metadata"].get("deletionTimestamp"):
                    self.finish(pod, 1)
                    with contextlib.suppress(ApiError):
                        store.delete("pods", NAMESPACE, name, {"gracePeriodSeconds": 0})
                elif phase == "Pending":
                    store.edit(
                        "pods", NAMESPACE, name, lambda result: pod_status.set_running(result, "10.0.0.9", time.time())
                    )
            with store.changed:
                store.changed.wait(0.02)

    def finish(self, pod, exit_code):
        """End a Pod's container."""
        state = {
            "exitCode": exit_code,
            "reason": "Error" if exit_code else "Completed",
            "startedAt": now(),
            "finishedAt": now(),
        }
        name = pod["metadata"]["name"]
        self.fake.store.edit("pods", NAMESPACE, name, lambda result: pod_status.set_ended(result, state))

    def close(self):
        self._closing.set()
        self._thread.join()
        super().close()


@pytest.fixture(scope="module")
def fake_pods(tmp_path_factory):
    site = FakePods(tmp_path_factory.mktemp("cluster"))
    yield site
    site.close()


class FaultyCluster:
    """A fake cluster whose requests fail as a test says, a backend on it, and the objects of the backend's run."""

    def __init__(self, site):
        self.site, self.fake = site, site.fake
        self.config = ClusterConfig.from_data("test", site.settings(request_seconds=1))
        self.backend = self.new_backend()
        site.place({"workspace/train.py": "print('hello')"})
        workspace = Mount(str(site.root / "workspace"), "/workspace", read_only=False)
        self.spec = dataclasses.replace(SPEC, mounts=(workspace,))

    def new_backend(self):
        """Return a backend as a new process of the console would have it."""
        return KubernetesBackend(config=self.config, root=self.site.root / "runs")

    def requests(self, call, faults=QUICK_FAULTS):
        """Call without faults, and count the requests. Return all pairs of a request's number and a fault."""
        before = len(self.fake.faults.calls)
        call()
        return list(itertools.product(range(len(self.fake.faults.calls) - before), faults))

    def try_with(self, call, *, nth, fault, times=1, version=0):
        """Call with a fault in the nth request, and in the following `times - 1`. Return None for BackendUnavailable.

        `version` is what a stale read returns; 0: the state before the call.
        """
        self.fake.faults.arm(nth, fault, version=version or self.fake.store.version, times=times)
        try:
            return call()
        except BackendUnavailable:
            return None
        finally:
            self.fake.faults.disarm()

    def find(self, plural):
        return self.fake.store.find(plural, NAMESPACE)

    def wait(self, condition, seconds=30):
        give_up_at = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < give_up_at, [(key, item.get("status")) for key, item in self.fake.store.items()]
            time.sleep(0.01)

    def assert_one_whole_run(self):
        """Check that there is one Job, with everything that it owns and its two Pods."""
        (job,) = self.find("jobs")
        assert (job["metadata"]["name"], job["spec"]["suspend"]) == (NAME, False)
        for plural in OWNED:
            (own,) = [one["metadata"] for one in self.find(plural) if one["metadata"].get("ownerReferences")]
            assert (own["name"], own["ownerReferences"][0]["uid"]) == (NAME, job["metadata"]["uid"])
        assert {one["metadata"]["name"] for one in self.find("secrets")} == {NAME, f"{NAME}-pull"}
        self.wait(lambda: len(self.find("pods")) == 2)
        assert {pod["metadata"]["annotations"][INDEX] for pod in self.find("pods")} == {"0", "1"}

    def left(self):
        """Return the run's objects and folders. Objects named `trainyard-...` belong to no run."""
        kinds = (*OWNED, "secrets", "jobs", "pods")
        result = [(kind, one["metadata"]) for kind in kinds for one in self.find(kind)]
        runs = [path.name for path in (self.site.root / "runs").glob("*") if not path.name.startswith(".")]
        return [f"{kind} {meta['name']}" for kind, meta in result if not meta["name"].startswith("trainyard-")] + runs

    def clear(self):
        """Delete the run, and check that nothing is left."""
        self.backend.delete(NAME)
        self.wait(lambda: not self.left())

    def finish_pods(self, exit_code):
        for pod in self.find("pods"):
            self.site.finish(pod, exit_code)

    def submit(self):
        self.backend.submit(self.spec)

    def start(self):
        """Submit the run, and wait until it runs."""
        self.submit()
        self.wait(lambda: self.backend.describe(NAME).phase is RunPhase.RUNNING)


@pytest.fixture
def cluster(fake_pods, monkeypatch):
    # The client repeats requests without a pause, and never refuses calls because the server was just down.
    monkeypatch.setattr(client, "_RETRY", client._RETRY.new(backoff_factor=0.0, backoff_jitter=0.0))
    monkeypatch.setattr(client, "_DOWN_SECONDS", 0.0)
    fake_pods.fake.faults.hold_seconds = 2  # longer than the client waits for a response (`request_seconds`)
    faulty = FaultyCluster(fake_pods)
    yield faulty
    fake_pods.fake.faults.disarm()
    faulty.clear()


# A client waits a second for each time-out, so these are cases of their own.
@pytest.mark.parametrize(
    "faults", [(*QUICK_FAULTS, Fault.TOO_MANY, Fault.STALE), (Fault.TIMEOUT_BEFORE,), (Fault.TIMEOUT_AFTER,)]
)
def test_a_submission_survives_a_fault_in_any_request(cluster, faults):
    requests = cluster.requests(cluster.submit, faults)
    assert len(requests) >= 7 * len(faults), "it creates the Job and its five objects, and then resumes the Job"
    for nth, fault in requests:
        cluster.clear()
        cluster.backend = cluster.new_backend()  # one that remembers nothing
        cluster.try_with(cluster.submit, nth=nth, fault=fault)
        cluster.submit()  # as the console does if the first call has failed
        cluster.assert_one_whole_run()


@pytest.mark.parametrize("next_step", ["submit", "delete"])
def test_an_abandoned_submission_is_continued_or_deleted_after_any_request(cluster, next_step):
    """The console died, or the cluster was away for long; another process takes over."""

    def keys():
        """Return the run's keys in a list; none if it has no keys yet."""
        return [one["data"] for one in cluster.find("secrets") if one["metadata"]["name"] == NAME]

    for nth, fault in cluster.requests(cluster.submit, (Fault.BROKEN_BEFORE, Fault.BROKEN_AFTER)):
        cluster.clear()
        cluster.backend = cluster.new_backend()
        assert cluster.try_with(cluster.submit, nth=nth, fault=fault, times=1000) is None  # no retry helps
        with contextlib.suppress(RunNotFound):
            assert cluster.new_backend().describe(NAME).outcome is None, "a run that is not whole has not ended"
        if next_step == "delete":
            continue  # `clear` deletes it
        before = keys()
        cluster.new_backend().submit(cluster.spec)
        cluster.assert_one_whole_run()
        assert before in ([], keys()), "pods may hold the keys already"


@pytest.mark.parametrize("exit_code", [0, 1])
def test_describe_survives_a_fault_in_any_request(cluster, exit_code):
    outcome = Outcome.COMPLETED if exit_code == 0 else Outcome.CODE_FAILED
    cluster.start()
    version_while_running = cluster.fake.store.version
    requests = cluster.requests(lambda: cluster.backend.describe(NAME))
    for nth, fault in requests:
        status = cluster.try_with(lambda: cluster.backend.describe(NAME), nth=nth, fault=fault)
        assert status is None or status.phase is RunPhase.RUNNING
    cluster.finish_pods(exit_code)
    cluster.wait(
        lambda: any(one["type"] in {"Complete", "Failed"} for one in cluster.find("jobs")[0]["status"]["conditions"])
    )
    request_count = len(requests) // len(QUICK_FAULTS) + 2  # an ended run is described with at most two more
    for nth, fault in itertools.product(range(request_count), (*QUICK_FAULTS, Fault.STALE)):
        status = cluster.try_with(
            lambda: cluster.new_backend().describe(NAME), nth=nth, fault=fault, version=version_while_running
        )
        # The stale read shows the run while it had no outcome yet.
        assert status is None or status.outcome in {None, outcome}
    # A backend that saw the run before its end describes it as a new one does.
    assert cluster.new_backend().describe(NAME) == cluster.backend.describe(NAME)


def test_a_stop_survives_a_fault_in_any_request(cluster):
    cluster.start()
    for nth, fault in cluster.requests(lambda: cluster.backend.stop(NAME, GRACE_SECONDS)):
        cluster.clear()
        cluster.start()
        cluster.try_with(lambda: cluster.backend.stop(NAME, GRACE_SECONDS), nth=nth, fault=fault)
        cluster.backend.stop(NAME, GRACE_SECONDS)
        cluster.wait(lambda: cluster.backend.describe(NAME).phase is RunPhase.ENDED)
        assert cluster.backend.describe(NAME).outcome is Outcome.STOPPED


def test_the_first_of_two_processes_decides_how_a_run_ends(cluster):
    """Both have read the Job before either changes it."""
    cluster.start()
    runs = cluster.backend._runs
    job, running = read_job(runs.get_job(NAME)), runs.status(NAME)
    stopped, preempted = (
        Termination(Outcome.STOPPED, code, code.value, at=1.0) for code in (FailureCode.STOPPED, FailureCode.PREEMPTED)
    )
    runs.terminate(job, stopped, ends_pods=False)  # as `stop` does, before it shortens the grace period
    runs.terminate(job, preempted)
    current = read_job(runs.get_job(NAME))
    assert (current.termination, current.is_ending) == (stopped, True)
    lost, completed = (
        dataclasses.replace(running, phase=RunPhase.ENDED, outcome=outcome)
        for outcome in (Outcome.NODE_LOST, Outcome.COMPLETED)
    )
    assert [runs._save_final_status(job, {}, status) for status in (lost, completed)] == [lost, lost]
    assert runs.status(NAME) == lost


def test_a_deletion_survives_a_fault_in_any_request(cluster):
    cluster.start()
    for nth, fault in cluster.requests(lambda: cluster.backend.delete(NAME)):
        cluster.clear()
        cluster.start()
        # No retry helps: the console died, or the cluster was away for long. Reconciliation sees only listed runs.
        cluster.try_with(lambda: cluster.backend.delete(NAME), nth=nth, fault=fault, times=1000)
        assert NAME in cluster.new_backend().names() or not cluster.backend.run_folder(NAME).exists()
        cluster.clear()  # deletes it again
        with pytest.raises(RunNotFound):
            cluster.backend.describe(NAME)


@pytest.mark.parametrize("trouble", ["dropped", "doubled", "late", "forgotten", "down"])
def test_changes_are_reported_after_any_watch_failure(cluster, trouble):
    """`trouble`: how the watches fail around the end of the run's Pods, which is the change."""
    faults = cluster.fake.faults
    cluster.start()

    def change():
        if trouble == "dropped":
            faults.watch_drops_after = 0
        faults.watch_repeats = trouble == "doubled"
        faults.watch_lag_seconds = 0.3 if trouble == "late" else 0.0
        if trouble == "forgotten":
            cluster.fake.store.compact()  # the server no longer has the changes since the watch's version
        faults.down = trouble == "down"
        cluster.finish_pods(0)
        if trouble in {"down", "dropped"}:
            time.sleep(0.3)  # long enough for every watch to meet it
            faults.down, faults.watch_drops_after = False, None

    # `changes` yields at least every second, an empty set if nothing has changed.
    for number, names in enumerate(cluster.new_backend().changes(stop_after_seconds=10)):
        if number == 1:  # the watches have begun
            change()
        elif number > 1 and NAME in names:
            break
    else:
        pytest.fail("The change is not reported.")
    faults.disarm()
    cluster.wait(lambda: cluster.backend.describe(NAME).outcome is Outcome.COMPLETED)


def test_an_unavailable_cluster_raises_and_loses_nothing(cluster):
    cluster.start()
    cluster.fake.faults.down = True
    for call in (
        lambda: cluster.new_backend().describe(NAME),
        lambda: cluster.new_backend().names(),
        lambda: cluster.new_backend().capacity(),
        lambda: cluster.new_backend().submit(cluster.spec),
        lambda: cluster.new_backend().stop(NAME, GRACE_SECONDS),
        lambda: cluster.new_backend().delete(NAME),
    ):
        with pytest.raises(BackendUnavailable):
            call()
    cluster.fake.faults.disarm()
    assert cluster.new_backend().describe(NAME).phase is RunPhase.RUNNING
    cluster.assert_one_whole_run()
