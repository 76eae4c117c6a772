"""Pods that go while their run is well, and those that go because it has failed: who is to blame for what."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.backends import kubernetes_history
from runtime.backends.kubernetes_departures import Departures
from runtime.backends.kubernetes_facts import REMOVED, PodFact, latest, removed
from runtime.backends.kubernetes_history import History
from runtime.backends.kubernetes_names import POD
from runtime.backends.kubernetes_outcome import merge
from runtime.specs import FailureCode, Outcome, RunPhase, RunStatus
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.sites import FakeSite
from tests.kubernetes.yard import ClusterYard
from tests.runtime.backends.going import NAME, job_of, until
from tests.runtime.backends.samples import END, FAILED, JOB, START, over, pod

PEERS = """
    import os, signal, socket, sys, time
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":
        peers = socket.create_server(address)
        peer = peers.accept()[0]
        signal.signal(signal.SIGTERM, lambda *_: peer.close())  # and stay: its peer fails well before it has ended
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
FAILS = """
    import os, signal, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that it is there when its peer has failed
    print("up", flush=True)
    while os.environ["RANK"] == "0":
        signal.pause()
    while not os.path.exists(os.environ["WORKSPACE"] + "/go"):
        signal.sigtimedwait([], 0.05)
    sys.exit(3)
"""
RANK = {"kind": "code_failed", "code": "rank_exited", "at": END - 1, "node": 1, "rank": 1, "exit_code": 3}
RECORDS = {1: {"phase": "ended", "started_at": START, "causes": [RANK]}}


def a_pod(uid: str, phase: str = "Running", *, going: bool = False, owner: str = "job") -> dict[str, Any]:
    meta = {"uid": uid, "ownerReferences": [{"uid": owner, "controller": True}]}
    return {"metadata": {**meta, **({"deletionTimestamp": "x"} if going else {})}, "status": {"phase": phase}}


# By the order of a watch


def test_a_pod_that_goes_before_any_failed_goes_first() -> None:
    order = Departures()
    order.begin([])
    assert [order.take("ADDED", a_pod(uid)) for uid in "ab"] == [False, False]
    assert order.take("MODIFIED", a_pod("a", going=True))
    assert not order.take("MODIFIED", a_pod("a", going=True)), "told once"
    assert not order.take("MODIFIED", a_pod("b", "Failed"))
    assert not order.take("DELETED", a_pod("a", "Failed", going=True))


def test_pods_that_go_after_another_failed_do_not_though_that_one_is_gone_by_then() -> None:
    order = Departures()
    order.begin([a_pod("a"), a_pod("b"), a_pod("c"), a_pod("d", owner="another")])
    order.take("MODIFIED", a_pod("b", "Failed"))
    assert not order.take("MODIFIED", a_pod("a", going=True))
    order.take("DELETED", a_pod("b", "Failed", going=True))
    assert not order.take("DELETED", a_pod("c"))
    assert order.take("DELETED", a_pod("d", owner="another")), "another run's"


def test_what_changed_between_two_lists_has_no_order() -> None:
    order = Departures()
    order.begin([a_pod("a"), a_pod("b")])
    order.begin([a_pod("a", going=True), a_pod("b"), a_pod("c", "Failed")])
    assert not order.take("MODIFIED", a_pod("a", going=True))
    assert not order.take("MODIFIED", a_pod("b", going=True)), "one had failed before the list"
    order.forget("job")
    assert order.take("MODIFIED", a_pod("e")) is False
    assert order.take("MODIFIED", a_pod("e", going=True))


# By what events say afterwards


def event(name: str) -> dict[str, Any]:
    return {"reason": "SuccessfulDelete", "message": f"Deleted pod: {name}"}


LAST = {"reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit"}


def unready(name: str, at: str = "1970-01-01T00:18:00Z") -> dict[str, Any]:
    return {"involvedObject": {"name": name}, "firstTimestamp": at}


def read(*events: dict[str, Any], now: float = END + 60, **changes: Any) -> History:
    return kubernetes_history.read(dataclasses.replace(FAILED, **changes), events, [], now=now)


def test_whom_its_own_controller_sent_is_known_while_no_event_can_be_missing() -> None:
    found = read(event("job-1-1-0-x7k2p"), event("job-1-11-1-x7k2p"), event("odd"), {}, LAST)
    assert (found.deleted, found.whole, found.late_until) == ({0}, True, 0.0)
    assert found.by_others([0, 1]) == {1}
    missing = [
        read(LAST, nodes=11),
        read(LAST, now=END + 3600),
        read(LAST, failed_at=None),
        read(),
        read(LAST, ended_as=""),
    ]
    assert all(one.by_others([0, 1]) == set() for one in missing)


def test_the_controllers_last_word_is_waited_for_where_it_could_say_more() -> None:
    early = read(event("job-1-1-0-x7k2p"), now=END + 5)
    assert early.is_awaited([0, 1], END + 5)
    assert not early.is_awaited([0], END + 5), "all is known"
    assert not early.is_awaited([0, 1], END + 40), "it was never said"
    assert not read(LAST, now=END + 5).is_awaited([0, 1], END + 5)
    elastic = {**FAILED.told, "min_nodes": 1}
    assert not any(one.is_awaited([0, 1], END + 5) for one in (read(nodes=11), read(told=elastic)))
    assert run(over(1, 1), history=early).phase is RunPhase.ENDED
    waiting = run(over(1, 1), history=read(now=END + 5))
    assert (waiting.phase, waiting.outcome) == (RunPhase.STOPPING, None)


def test_machines_that_were_not_ready_are_known_by_their_pods() -> None:
    told = [unready("job-1-1-0-x7k2p", "1970-01-01T00:17:00Z"), unready("job-1-1-0-x7k2p"), unready("job-1-2-1-aaaaa")]
    before = unready("job-1-1-1-aaaaa", "1970-01-01T00:16:00Z")
    found = kubernetes_history.read(FAILED, [], [*told, before], now=END)
    assert found.unready == {0: 1020.0}, "before this run began, a pod of another one of its name had it"


def run(*pods: PodFact, history: History | None = None, now: float = END + 5, job: Any = FAILED) -> RunStatus:
    return merge(job, {one.node: one for one in pods}, RECORDS, now=now, history=history)


SENT = History(deleted=frozenset({0}), whole=True)
GONE = pod(0, deleted_at=END, ended=True, finished_at=END)
TABLE = {
    "sent by its Job": ((over(1, 1),), SENT, Outcome.CODE_FAILED),
    "sent by its Job, and still seen": ((GONE, over(1, 1)), SENT, Outcome.CODE_FAILED),
    "sent by others": ((over(1, 1),), History(whole=True), Outcome.NODE_LOST),
    "sent by others, and still seen": ((GONE, over(1, 1)), History(whole=True), Outcome.NODE_LOST),
    "sent by who knows whom": ((over(1, 1),), History(), Outcome.CODE_FAILED),
    "nobody asked": ((over(1, 1),), None, Outcome.CODE_FAILED),
    "on a machine that was not ready": (
        (over(1, 1),),
        dataclasses.replace(SENT, unready={0: END + 50}),
        Outcome.NODE_LOST,
    ),
    "on a machine that was not ready much later": (
        (over(1, 1),),
        dataclasses.replace(SENT, unready={0: END + 500}),
        Outcome.CODE_FAILED,
    ),
    "seen to the end, on a machine that was not ready": (
        (over(0, 0), over(1, 1)),
        dataclasses.replace(SENT, unready={0: END}),
        Outcome.CODE_FAILED,
    ),
    "seen to go first": ((dataclasses.replace(GONE, disruption=REMOVED, disrupted_at=END - 1), over(1, 1)), None,
                         Outcome.NODE_LOST),
}  # fmt: skip


@pytest.mark.parametrize("line", TABLE)
def test_who_pays_for_a_run_of_which_a_pod_is_gone(line: str) -> None:
    pods, history, outcome = TABLE[line]
    status = run(*pods, history=history)
    assert (status.phase, status.outcome) == (RunPhase.ENDED, outcome)
    assert status.failure is not None
    lost = outcome is Outcome.NODE_LOST
    assert (status.failure.code, status.failure.node) == (
        (FailureCode.NODE_LOST, 0) if lost else (FailureCode.RANK_EXITED, 1)
    )


def test_a_job_is_given_a_while_to_say_why_its_pods_went() -> None:
    early = run(GONE, over(1, 1), job=JOB)
    assert (early.phase, early.outcome) == (RunPhase.STOPPING, None)
    assert run(GONE, over(1, 1), job=JOB, now=END + 31).phase is RunPhase.ENDED, "its controller is not there"
    known = dataclasses.replace(GONE, disruption=REMOVED, disrupted_at=END)
    assert run(known, over(1, 1), job=JOB).phase is RunPhase.ENDED
    assert run(dataclasses.replace(GONE, exit_code=0), over(1), job=JOB).outcome is Outcome.COMPLETED


def test_that_a_pod_was_removed_is_remembered_as_long_as_it_is_there() -> None:
    item = {
        "metadata": {
            "name": "p0", "uid": "p0", "creationTimestamp": "1970-01-01T00:16:30Z",
            "annotations": {"batch.kubernetes.io/job-completion-index": "0"},
            "deletionTimestamp": "1970-01-01T00:18:20Z", "deletionGracePeriodSeconds": 25,
        },
        "status": {"phase": "Running"},
    }  # fmt: skip
    fact = removed(item, now=0.0)
    assert fact is not None
    assert (fact.disruption, fact.disrupted_at) == (REMOVED, END - 25), "when it was told, not when it is to be gone"
    kept = dataclasses.replace(JOB, kept={0: PodFact.from_json(fact.to_json())})
    assert latest(kept, [pod(0, deleted_at=END)])[0].disrupted_at == END - 25
    assert latest(kept, [pod(0, uid="new", created_at=999.0)])[0].disruption == ""
    drained = pod(0, disruption="EvictionByEvictionAPI", disrupted_at=END)
    assert latest(kept, [drained])[0].disruption == "EvictionByEvictionAPI", "its own word is better"


# On a cluster


@pytest.fixture
def unwatched(fake_site: FakeSite) -> Iterator[ClusterYard]:
    """A yard whose console is away: nobody follows, nobody asks."""
    made = ClusterYard(fake_site, watched=False)
    yield made
    made.close()


def up(yard: ClusterYard, script: str, **changes: Any) -> None:
    yard.backend.submit(yard.spec(script, nodes=2, **changes))
    for rank in range(2):
        yard.wait_for_text("up", rank=rank)


def over_by_itself(fake: FakeCluster) -> dict[str, Any]:
    """Wait until the Job has failed, asking the console's backend nothing."""

    def failed() -> Any:
        conditions = job_of(fake).get("status", {}).get("conditions", [])
        return any(one["type"] == "Failed" and one["status"] == "True" for one in conditions)

    until(failed)
    return job_of(fake)


@pytest.mark.parametrize("grace_seconds", [0, None])
def test_who_removes_a_pod_pays_for_what_its_peers_make_of_it(own_yard: ClusterYard, grace_seconds: int | None) -> None:
    up(own_yard, PEERS)
    gone = own_yard.site.pods(NAME)[0].metadata.name
    own_yard.site.core.delete_namespaced_pod(gone, own_yard.site.namespace, grace_period_seconds=grace_seconds)
    ended = own_yard.wait_for_end()
    assert ended.failure is not None
    assert (ended.outcome, ended.failure.code, ended.failure.node) == (Outcome.NODE_LOST, FailureCode.NODE_LOST, 0)


def test_a_pod_that_went_while_nobody_watched_was_removed_if_its_job_did_not_send_it(
    unwatched: ClusterYard, fake: FakeCluster
) -> None:
    up(unwatched, PEERS)
    gone = unwatched.site.pods(NAME)[0].metadata.name
    unwatched.site.core.delete_namespaced_pod(gone, unwatched.site.namespace, grace_period_seconds=0)
    job = over_by_itself(fake)
    assert not any(note.startswith(POD) for note in job["metadata"]["annotations"]), "nobody saw it go"
    left = [one.metadata.name for one in unwatched.site.pods(NAME)]
    assert len(left) == 1
    assert gone not in left
    ended = unwatched.backend.describe(NAME)
    assert ended.failure is not None
    assert (ended.outcome, ended.failure.code, ended.failure.node) == (Outcome.NODE_LOST, FailureCode.NODE_LOST, 0)


def test_code_that_failed_while_nobody_watched_has_failed_though_its_peer_is_gone(
    unwatched: ClusterYard, fake: FakeCluster
) -> None:
    up(unwatched, FAILS)
    unwatched.write({"workspace/go": ""})
    over_by_itself(fake)
    assert len(unwatched.site.pods(NAME)) == 1, "the other one was sent by the Job, and is gone"
    ended = unwatched.backend.describe(NAME)
    assert ended.failure is not None
    assert (ended.outcome, ended.failure.node, ended.failure.exit_code) == (Outcome.CODE_FAILED, 1, 3)


def test_code_that_failed_has_failed_though_its_peer_is_told_to_go(own_yard: ClusterYard, fake: FakeCluster) -> None:
    up(own_yard, FAILS)
    own_yard.write({"workspace/go": ""})
    ended = own_yard.wait_for_end()
    assert ended.failure is not None
    assert (ended.outcome, ended.failure.node, ended.failure.exit_code) == (Outcome.CODE_FAILED, 1, 3)


def test_a_machine_that_went_while_nobody_watched_is_a_lost_node(unwatched: ClusterYard, fake: FakeCluster) -> None:
    """Its pod is removed with its node's object, as a cloud does, after the peers' failure made the Job send it."""
    up(unwatched, PEERS)
    pods = {one.metadata.name: one.spec.node_name for one in unwatched.site.pods(NAME)}
    gone, machine = next(iter(pods.items()))
    fake.nodes[machine].crash()
    until(lambda: gone not in [one.metadata.name for one in unwatched.site.pods(NAME)] or _remove(fake, machine))
    over_by_itself(fake)
    ended = unwatched.backend.describe(NAME)
    assert ended.failure is not None
    assert (ended.outcome, ended.failure.node) == (Outcome.NODE_LOST, 0)


def _remove(fake: FakeCluster, machine: str) -> bool:
    """The cloud takes the dead machine's object away, once its pod was found not ready."""
    events = fake.store.find("events", "", lambda one: one["reason"] == "NodeNotReady")
    if events and fake.store.find("nodes", "", lambda one: one["metadata"]["name"] == machine):
        fake.store.delete("nodes", "", machine)
    return False


def test_what_we_told_to_go_ourselves_nobody_removed(own_yard: ClusterYard) -> None:
    up(own_yard, PEERS)
    own_yard.backend.stop(NAME, 1)
    ended = own_yard.wait_for_end()
    assert ended.outcome is Outcome.STOPPED
