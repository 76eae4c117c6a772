"""Pods that others deleted, as opposed to those that the Job controller deleted after a failure."""

import dataclasses
import time

import pytest

from runtime.backends.kubernetes import runs
from runtime.backends.kubernetes.disruptions import DeletionEvents, DeletionTracker, read_events
from runtime.backends.kubernetes.outcome import derive_status
from runtime.backends.kubernetes.state import EXTERNALLY_DELETED, PodState, as_externally_deleted, newest_pods
from runtime.specs import FailureCode, Outcome, RunPhase
from tests.console.processes import wait_for
from tests.kubernetes.harness import KubernetesHarness
from tests.runtime.backends.cluster_runs import NAME, job_of
from tests.runtime.backends.samples import END, FAILED, JOB, START, ended, running

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")

PEERS = """
    import os, signal, socket, sys, time
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":
        peers = socket.create_server(address)
        peer = peers.accept()[0]
        signal.signal(signal.SIGTERM, lambda *_: peer.close())  # but stay, so that the peer fails first
        print("up", flush=True)
        while True:
            signal.pause()
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    print("up", flush=True)
    peer.recv(1)
    sys.exit("my peer is gone")
"""
"""Rank 1 fails once the Pod of rank 0 is being deleted."""
FAILS = """
    import os, signal, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to outlive its peer
    print("up", flush=True)
    while os.environ["RANK"] == "0":
        signal.pause()
    while not os.path.exists(os.environ["WORKSPACE"] + "/go"):
        signal.sigtimedwait([], 0.05)
    sys.exit(3)
"""
"""Rank 1 fails once the workspace has the file `go`."""
RANK_1_EXITED = {"kind": "code_failed", "code": "rank_exited", "at": END - 1, "node": 1, "rank": 1, "exit_code": 3}
RECORDS = {1: {"phase": "ended", "started_at": START, "causes": [RANK_1_EXITED]}}


def api_pod(uid, phase="Running", *, is_deleting=False, owner="job"):
    meta = {"uid": uid, "ownerReferences": [{"uid": owner, "controller": True}]}
    return {"metadata": {**meta, **({"deletionTimestamp": "x"} if is_deleting else {})}, "status": {"phase": phase}}


# By the tracker of watch events


def test_the_tracker_reports_a_pod_deleted_before_any_failure():
    tracker = DeletionTracker()
    tracker.reset([])
    assert [tracker.observe("ADDED", api_pod(uid)) for uid in "ab"] == [False, False]
    assert tracker.observe("MODIFIED", api_pod("a", is_deleting=True))
    assert not tracker.observe("MODIFIED", api_pod("a", is_deleting=True)), "reported once"
    assert not tracker.observe("MODIFIED", api_pod("b", "Failed"))
    assert not tracker.observe("DELETED", api_pod("a", "Failed", is_deleting=True))


def test_the_tracker_ignores_what_follows_a_failure_or_changed_between_two_lists():
    """After a failure, the Job controller deletes the other Pods. A list does not show the order of earlier changes."""
    tracker = DeletionTracker()
    tracker.reset([api_pod("a"), api_pod("b"), api_pod("c"), api_pod("d", owner="another")])
    tracker.observe("MODIFIED", api_pod("b", "Failed"))
    assert not tracker.observe("MODIFIED", api_pod("a", is_deleting=True))
    tracker.observe("DELETED", api_pod("b", "Failed", is_deleting=True))
    assert not tracker.observe("DELETED", api_pod("c"))
    assert tracker.observe("DELETED", api_pod("d", owner="another")), "another run's"
    tracker.reset([api_pod("a", is_deleting=True), api_pod("b"), api_pod("c", "Failed")])
    assert not tracker.observe("MODIFIED", api_pod("a", is_deleting=True))
    assert not tracker.observe("MODIFIED", api_pod("b", is_deleting=True)), "one had failed before the list"
    tracker.forget("job")  # and the failure that was remembered for it
    assert tracker.observe("MODIFIED", api_pod("e")) is False
    assert tracker.observe("MODIFIED", api_pod("e", is_deleting=True))


# By the events of the Job


def event(name, *, prefix="", at=""):
    return {"reason": "SuccessfulDelete", "message": f"{prefix}Deleted pod: {name}", "lastTimestamp": at}


LAST_EVENT = {"reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit"}


def unready(name, at="1970-01-01T00:18:00Z"):
    """A NodeNotReady event of a Pod, by default at the Unix time 1080, between START and END."""
    return {"involvedObject": {"name": name}, "firstTimestamp": at}


def read(*events, now=END + 60, **changes):
    return read_events(dataclasses.replace(FAILED, **changes), events, [], now=now)


def test_events_are_complete_only_if_none_can_be_missing():
    # Only the first is of a Pod of this run, job-1-1: that of node 0. The last is of the time before Kueue resumed it.
    before = event("job-1-1-1-x7k2p", at="1970-01-01T00:16:00Z")
    events = read(event("job-1-1-0-x7k2p"), event("job-1-11-1-x7k2p"), event("odd"), {}, LAST_EVENT, before)
    assert (events.deleted_by_controller, events.is_complete, events.wait_until) == ({0}, True, 0.0)
    assert events.deleted_externally([0, 1]) == {1}
    missing = [
        read(LAST_EVENT, nodes=11),  # the controller may have combined the events of so many Pods
        read(LAST_EVENT, event("job-1-1-0-x7k2p", prefix="(combined from similar events): ")),  # others are in it
        read(LAST_EVENT, now=END + 3600),  # the API server may have deleted them
        read(LAST_EVENT, failed_at=None),  # nothing shows how old the events are
        read(),  # the controller's last event has not arrived
        read(LAST_EVENT, end_condition=""),  # the controller may still delete Pods
    ]
    assert all(one.deleted_externally([0, 1]) == set() for one in missing)


def test_a_run_waits_for_the_controllers_last_event():
    early = read(event("job-1-1-0-x7k2p"), now=END + 5)
    assert early.are_expected([0, 1], END + 5)
    assert not early.are_expected([0], END + 5), "all deletions are explained"
    assert not early.are_expected([0, 1], END + 40), "the event never arrived"
    assert not read(LAST_EVENT, now=END + 5).are_expected([0, 1], END + 5)
    # The events of elastic and of large runs are never complete, so no run waits for them.
    elastic = dataclasses.replace(FAILED.spec, min_nodes=1)
    assert not any(one.are_expected([0, 1], END + 5) for one in (read(nodes=11), read(spec=elastic)))
    assert status_of(ended(1, 1), events=early).phase is RunPhase.ENDED
    waiting = status_of(ended(1, 1), events=read(now=END + 5))
    assert (waiting.phase, waiting.outcome) == (RunPhase.STOPPING, None)


def test_not_ready_machines_are_read_from_pod_events():
    unready_events = [
        unready("job-1-1-0-x7k2p", "1970-01-01T00:17:00Z"),
        unready("job-1-1-0-x7k2p"),
        unready("job-1-2-1-aaaaa"),
    ]
    before = unready("job-1-1-1-aaaaa", "1970-01-01T00:16:00Z")
    events = read_events(FAILED, [], [*unready_events, before], now=END)
    assert events.not_ready_at == {0: 1020.0}, "the first event of node 0; that of node 1 is older than this run"


def status_of(*pods, events=None, now=END + 5, job=FAILED):
    return derive_status(job, {one.node: one for one in pods}, RECORDS, now=now, events=events)


BY_CONTROLLER = DeletionEvents(deleted_by_controller=frozenset({0}), is_complete=True)
DELETED_POD = running(0, deletion_deadline=END, ended=True, finished_at=END)
BY_OTHERS = DeletionEvents(is_complete=True)
# A machine counts as lost at the time of a failure if it became NotReady at most 120 s later.
NOT_READY = {at: dataclasses.replace(BY_CONTROLLER, not_ready_at={0: at}) for at in (END, END + 50, END + 500)}
SEEN_BY_WATCH = dataclasses.replace(DELETED_POD, disruption=EXTERNALLY_DELETED, disrupted_at=END - 1)


@pytest.mark.parametrize(
    ("pods", "events", "is_lost"),
    [
        pytest.param((), BY_CONTROLLER, False, id="deleted by its Job"),
        pytest.param((DELETED_POD,), BY_CONTROLLER, False, id="being deleted by its Job"),
        pytest.param((), BY_OTHERS, True, id="deleted by others"),
        pytest.param((DELETED_POD,), BY_OTHERS, True, id="being deleted by others"),
        pytest.param((), DeletionEvents(), False, id="incomplete events"),
        pytest.param((), None, False, id="no events"),
        pytest.param((), NOT_READY[END + 50], True, id="on a machine that was NotReady"),
        pytest.param((), NOT_READY[END + 500], False, id="on a machine that was NotReady much later"),
        pytest.param((ended(0, 0),), NOT_READY[END], False, id="completed on a machine that was NotReady"),
        pytest.param((SEEN_BY_WATCH,), None, True, id="deleted before the failure, as the watch saw"),
    ],
)
def test_outcome_of_a_run_with_a_deleted_pod(pods, events, is_lost):
    status = status_of(*pods, ended(1, 1), events=events)
    assert (status.phase, status.outcome) == (RunPhase.ENDED, Outcome.NODE_LOST if is_lost else Outcome.CODE_FAILED)
    expected = (FailureCode.NODE_LOST, 0) if is_lost else (FailureCode.RANK_EXITED, 1)
    assert (status.failure.code, status.failure.node) == expected


def test_a_run_waits_for_the_job_controllers_verdict():
    early = status_of(DELETED_POD, ended(1, 1), job=JOB)
    assert (early.phase, early.outcome) == (RunPhase.STOPPING, None)
    assert status_of(DELETED_POD, ended(1, 1), job=JOB, now=END + 31).phase is RunPhase.ENDED, (
        "the controller never answered"
    )
    known = dataclasses.replace(DELETED_POD, disruption=EXTERNALLY_DELETED, disrupted_at=END)
    assert status_of(known, ended(1, 1), job=JOB).phase is RunPhase.ENDED
    assert status_of(dataclasses.replace(DELETED_POD, exit_code=0), ended(1), job=JOB).outcome is Outcome.COMPLETED


def test_a_pod_that_others_deleted_stays_marked_as_deleted_by_others():
    # Created at 990 and due at 1100, which is END.
    item = {
        "metadata": {
            "name": "p0", "uid": "p0", "creationTimestamp": "1970-01-01T00:16:30Z",
            "annotations": {"batch.kubernetes.io/job-completion-index": "0"},
            "deletionTimestamp": "1970-01-01T00:18:20Z", "deletionGracePeriodSeconds": 25,
        },
        "status": {"phase": "Running"},
    }  # fmt: skip
    removed = as_externally_deleted(item, now=0.0)
    assert (removed.disruption, removed.disrupted_at) == (EXTERNALLY_DELETED, END - 25), (
        "when the deletion was requested, not its deadline"
    )
    kept = dataclasses.replace(JOB, saved_pods={0: PodState.from_json(removed.to_json())})
    assert newest_pods(kept, [running(0, deletion_deadline=END)])[0].disrupted_at == END - 25
    assert newest_pods(kept, [running(0, uid="new", created_at=999.0)])[0].disruption == "", "a newer Pod"
    drained = running(0, disruption="EvictionByEvictionAPI", disrupted_at=END)
    assert newest_pods(kept, [drained])[0].disruption == "EvictionByEvictionAPI", "its own condition takes precedence"


# On a cluster


@pytest.fixture
def unwatched(fake_site):
    """A harness without a console: nothing follows the cluster."""
    harness = KubernetesHarness(fake_site, watched=False)
    yield harness
    harness.close()


def start(harness, script):
    harness.start(script, text="up", nodes=2, grace_seconds=2)  # long enough for the peer to fail first


def wait_for_job_failure(fake):
    """Wait until the Job has failed, without a call to the backend."""

    def failed():
        conditions = job_of(fake).get("status", {}).get("conditions", [])
        return any(one["type"] == "Failed" and one["status"] == "True" for one in conditions)

    wait_for(failed, 60)


@pytest.mark.slow
def test_deleting_a_pod_makes_the_run_free(own_harness):
    start(own_harness, PEERS)
    deleted = own_harness.site.pods(NAME)[0].metadata.name
    own_harness.site.core.delete_namespaced_pod(deleted, own_harness.site.namespace)
    failure = own_harness.wait_for_failure(Outcome.NODE_LOST)
    assert (failure.code, failure.node) == (FailureCode.NODE_LOST, 0)


def test_a_code_failure_while_no_console_ran_is_billed_once_its_events_are_there(unwatched, fake, monkeypatch):
    start(unwatched, FAILS)
    unwatched.write({"workspace/go": ""})
    wait_for_job_failure(fake)
    assert len(unwatched.site.pods(NAME)) == 1, "the Job controller deleted the other one"
    not_arrived = DeletionEvents(wait_until=time.time() + 60)
    with monkeypatch.context() as patched:
        patched.setattr(runs, "read_events", lambda *_arguments, **_options: not_arrived)
        status = unwatched.backend.describe(NAME)
    assert (status.phase, status.outcome) == (RunPhase.STOPPING, None)
    final = unwatched.backend.describe(NAME)
    assert (final.outcome, final.failure.node, final.failure.exit_code) == (Outcome.CODE_FAILED, 1, 3)


def test_a_machine_lost_while_no_console_ran_is_a_lost_node(unwatched, fake):
    """The Job deletes the dead machine's Pod, since its peer failed. The Pod vanishes once the Node is removed."""
    start(unwatched, PEERS)
    pods = {one.metadata.name: one.spec.node_name for one in unwatched.site.pods(NAME)}
    deleted, machine = next(iter(pods.items()))
    fake.nodes[machine].crash()
    wait_for(lambda: fake.store.find("events", "", lambda one: one["reason"] == "NodeNotReady"), 60)
    fake.store.delete("nodes", "", machine)
    wait_for(lambda: deleted not in [one.metadata.name for one in unwatched.site.pods(NAME)], 60)
    wait_for_job_failure(fake)
    final = unwatched.backend.describe(NAME)
    assert (final.outcome, final.failure.node) == (Outcome.NODE_LOST, 0)
