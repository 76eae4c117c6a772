"""Every call that the backend makes is hurt in every way, one at a time: no run is doubled, lost, or left in pieces.

The calls are counted in a run without faults, so that a call which is added later is hurt, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.backends import kubernetes_api
from runtime.backends.kubernetes import KubernetesBackend
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.errors import BackendUnavailable, RunNotFound
from runtime.specs import Framework, Image, Mount, Outcome, PullSecret, Resources, RunPhase, RunSpec, RunStatus
from tests.kubernetes.faults import Fault
from tests.kubernetes.puppets import NAMESPACE, PuppetSite

NAME = "job-1-1"
ONCE = (Fault.BROKEN_BEFORE, Fault.BROKEN_AFTER, Fault.TOO_MANY, Fault.INTERNAL, Fault.UNAVAILABLE)
OWNED = ("services", "configmaps", "networkpolicies")
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


@pytest.fixture(scope="module")
def puppets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PuppetSite]:
    site = PuppetSite(tmp_path_factory.mktemp("puppets"))
    yield site
    site.close()


class Hurt:
    """A backend on the puppets, and what is there of its runs."""

    def __init__(self, site: PuppetSite) -> None:
        self.site, self.fake = site, site.fake
        self.config = ClusterConfig.from_data("test", site.settings(request_seconds=1))
        self.backend = self.another()
        site.place({"workspace/train.py": "print('hello')"})
        workspace = Mount(str(site.root / "workspace"), "/workspace", read_only=False)
        self.spec = dataclasses.replace(SPEC, mounts=(workspace,))

    def another(self) -> KubernetesBackend:
        return KubernetesBackend(config=self.config, root=self.site.root / "runs")

    def count(self, call: Callable[[], object]) -> int:
        """How many calls it makes."""
        before = len(self.fake.faults.calls)
        call()
        return len(self.fake.faults.calls) - before

    def tried(self, call: Callable[[], Any], *, nth: int, fault: Fault, times: int = 1, version: int = 0) -> Any:
        """The call with a fault on the way; None where it says that the cluster did not answer."""
        self.fake.faults.arm(nth, fault, version=version or self.fake.store.version, times=times)
        try:
            return call()
        except BackendUnavailable:
            return None
        finally:
            self.fake.faults.disarm()

    def find(self, plural: str) -> list[dict[str, Any]]:
        return self.fake.store.find(plural, NAMESPACE)

    def wait(self, condition: Callable[[], object], seconds: float = 30) -> None:
        give_up_at = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < give_up_at, [(key, item.get("status")) for key, item in self.fake.store.items()]
            time.sleep(0.01)

    def running(self) -> RunStatus:
        self.wait(lambda: self.backend.describe(NAME).phase is RunPhase.RUNNING)
        return self.backend.describe(NAME)

    def assert_one_whole_run(self) -> None:
        """One Job, everything that it owns once, and its two pods."""
        jobs = self.find("jobs")
        assert [job["metadata"]["name"] for job in jobs] == [NAME]
        assert not jobs[0]["spec"]["suspend"]
        uid = jobs[0]["metadata"]["uid"]
        for plural in OWNED:
            own = [one for one in self.find(plural) if one["metadata"].get("ownerReferences")]
            assert [(one["metadata"]["name"], one["metadata"]["ownerReferences"][0]["uid"]) for one in own] == [
                (NAME, uid)
            ]
        secrets = {one["metadata"]["name"] for one in self.find("secrets")}
        assert secrets == {NAME, f"{NAME}-pull"}
        self.wait(lambda: len(self.find("pods")) == 2)
        indexes = [
            pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] for pod in self.find("pods")
        ]
        assert sorted(indexes) == ["0", "1"]

    def left(self) -> list[str]:
        kinds = (*OWNED, "secrets", "jobs", "pods")
        found = [(kind, one["metadata"]) for kind in kinds for one in self.find(kind)]
        runs = [path.name for path in (self.site.root / "runs").glob("*") if not path.name.startswith(".")]
        return [f"{kind} {meta['name']}" for kind, meta in found if not meta["name"].startswith("trainyard-")] + runs

    def clear(self) -> None:
        """Delete the run; nothing is left."""
        self.backend.delete(NAME)
        self.wait(lambda: not self.left())


@pytest.fixture
def hurt(puppets: PuppetSite, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hurt]:
    monkeypatch.setattr(kubernetes_api, "_FIRST_PAUSE_SECONDS", 0.005)
    monkeypatch.setattr(kubernetes_api, "_DOWN_SECONDS", 0.0)
    made = Hurt(puppets)
    yield made
    puppets.fake.faults.disarm()
    made.clear()


def test_a_submission_is_whole_whatever_happens_to_one_of_its_calls(hurt: Hurt) -> None:
    calls = hurt.count(lambda: hurt.backend.submit(hurt.spec))
    assert calls >= 7
    for nth in range(calls):
        for fault in (*ONCE, Fault.STALE):
            hurt.clear()
            hurt.backend = hurt.another()
            hurt.tried(lambda: hurt.backend.submit(hurt.spec), nth=nth, fault=fault)
            hurt.backend.submit(hurt.spec)
            hurt.assert_one_whole_run()


def test_a_submission_that_was_given_up_at_any_call_is_finished_by_another(hurt: Hurt) -> None:
    """The console died there, or the cluster went away for long: `tried` gives up, and somebody else submits again."""
    calls = hurt.count(lambda: hurt.backend.submit(hurt.spec))
    for nth in range(calls):
        for fault in (Fault.BROKEN_BEFORE, Fault.BROKEN_AFTER):
            hurt.clear()
            died = hurt.another()
            assert hurt.tried(lambda died=died: died.submit(hurt.spec), nth=nth, fault=fault, times=1000) is None  # type: ignore[misc]
            with contextlib.suppress(RunNotFound):
                assert hurt.another().describe(NAME).outcome is None
            keys = [one["data"] for one in hurt.find("secrets") if one["metadata"]["name"] == NAME]
            hurt.another().submit(hurt.spec)
            hurt.assert_one_whole_run()
            kept = [one["data"] for one in hurt.find("secrets") if one["metadata"]["name"] == NAME]
            assert not keys or keys == kept, "pods may hold the keys already"


def test_a_submission_that_was_given_up_leaves_nothing_when_it_is_deleted(hurt: Hurt) -> None:
    calls = hurt.count(lambda: hurt.backend.submit(hurt.spec))
    for nth in range(calls):
        hurt.clear()
        died = hurt.another()
        hurt.tried(lambda died=died: died.submit(hurt.spec), nth=nth, fault=Fault.BROKEN_AFTER, times=1000)  # type: ignore[misc]
        hurt.backend.delete(NAME)
        hurt.wait(lambda: not hurt.left())


@pytest.mark.parametrize("fault", [Fault.TIMEOUT_BEFORE, Fault.TIMEOUT_AFTER])
def test_a_call_of_a_submission_that_is_never_answered_is_made_again(hurt: Hurt, fault: Fault) -> None:
    hurt.fake.faults.hold_seconds = 2
    calls = hurt.count(lambda: hurt.backend.submit(hurt.spec))
    for nth in range(calls):
        hurt.clear()
        hurt.backend = hurt.another()
        hurt.tried(lambda: hurt.backend.submit(hurt.spec), nth=nth, fault=fault)
        hurt.backend.submit(hurt.spec)
        hurt.assert_one_whole_run()


def end_by_hand(hurt: Hurt, exit_code: int) -> None:
    for pod in hurt.find("pods"):
        hurt.site.finish(pod, exit_code)


@pytest.mark.parametrize("exit_code", [0, 1])
def test_what_is_described_is_true_whatever_happens_to_a_call(hurt: Hurt, exit_code: int) -> None:
    outcome = Outcome.COMPLETED if exit_code == 0 else Outcome.CODE_FAILED
    hurt.backend.submit(hurt.spec)
    hurt.running()
    before = hurt.fake.store.version
    calls = hurt.count(lambda: hurt.backend.describe(NAME))
    for nth in range(calls):
        for fault in ONCE:
            told = hurt.tried(lambda: hurt.backend.describe(NAME), nth=nth, fault=fault)
            assert told is None or told.phase is RunPhase.RUNNING
    end_by_hand(hurt, exit_code)
    hurt.wait(
        lambda: any(one["type"] in {"Complete", "Failed"} for one in hurt.find("jobs")[0]["status"]["conditions"])
    )
    for nth in range(calls + 2):
        for fault in (*ONCE, Fault.STALE):
            told = hurt.tried(lambda: hurt.another().describe(NAME), nth=nth, fault=fault, version=before)
            assert told is None or told.phase is RunPhase.RUNNING or told.outcome is outcome
    final = hurt.backend.describe(NAME)
    assert final.outcome is outcome
    for nth in range(3):
        told = hurt.tried(lambda: hurt.another().describe(NAME), nth=nth, fault=Fault.STALE, version=before)
        assert told.phase is RunPhase.RUNNING or told == final
    assert hurt.another().describe(NAME) == final


def test_a_stop_stops_whatever_happens_to_one_of_its_calls(hurt: Hurt) -> None:
    hurt.backend.submit(hurt.spec)
    hurt.running()
    calls = hurt.count(lambda: hurt.backend.stop(NAME, 5))
    for nth in range(calls):
        for fault in (Fault.BROKEN_BEFORE, Fault.BROKEN_AFTER, Fault.INTERNAL):
            hurt.clear()
            hurt.backend.submit(hurt.spec)
            hurt.running()
            hurt.tried(lambda: hurt.backend.stop(NAME, 5), nth=nth, fault=fault)
            hurt.backend.stop(NAME, 5)
            hurt.wait(lambda: hurt.backend.describe(NAME).phase is RunPhase.ENDED)
            assert hurt.backend.describe(NAME).outcome is Outcome.STOPPED


def test_a_deletion_leaves_nothing_whatever_happens_to_one_of_its_calls(hurt: Hurt) -> None:
    hurt.backend.submit(hurt.spec)
    hurt.running()
    calls = hurt.count(lambda: hurt.backend.delete(NAME))
    for nth in range(calls):
        for fault in ONCE:
            hurt.wait(lambda: not hurt.left())
            hurt.backend.submit(hurt.spec)
            hurt.running()
            hurt.tried(lambda: hurt.backend.delete(NAME), nth=nth, fault=fault)
            hurt.backend.delete(NAME)
            hurt.wait(lambda: not hurt.left())
            with pytest.raises(RunNotFound):
                hurt.backend.describe(NAME)


def told_of(hurt: Hurt, happens: Callable[[], object], seconds: float = 10) -> bool:
    """Whether a watch tells of what happens."""
    for number, names in enumerate(hurt.another().changes(stop_after=seconds)):
        if number == 1:
            happens()
        elif number > 1 and NAME in names:
            return True
    return False


@pytest.mark.parametrize("trouble", ["dropped", "doubled", "late", "forgotten", "down"])
def test_changes_are_told_whatever_happens_to_the_watch(hurt: Hurt, trouble: str) -> None:
    faults = hurt.fake.faults
    hurt.backend.submit(hurt.spec)
    hurt.running()

    def happens() -> None:
        if trouble == "dropped":
            faults.watch_drops_after = 0
        faults.watch_repeats = trouble == "doubled"
        faults.watch_lag_seconds = 0.3 if trouble == "late" else 0.0
        if trouble == "forgotten":
            hurt.fake.store.compact()
        faults.down = trouble == "down"
        end_by_hand(hurt, 0)
        if trouble in {"down", "dropped"}:
            time.sleep(0.3)  # long enough for every watch to meet it
            faults.down, faults.watch_drops_after = False, None

    assert told_of(hurt, happens)
    faults.disarm()
    hurt.wait(lambda: hurt.backend.describe(NAME).outcome is Outcome.COMPLETED)


def test_a_cluster_that_is_down_is_said_to_be_and_loses_nothing(hurt: Hurt, tmp_path: Path) -> None:
    hurt.backend.submit(hurt.spec)
    hurt.running()
    hurt.fake.faults.down = True
    for call in (
        lambda: hurt.another().describe(NAME),
        lambda: hurt.another().names(),
        lambda: hurt.another().capacity(),
        lambda: hurt.another().submit(hurt.spec),
        lambda: hurt.another().stop(NAME, 5),
        lambda: hurt.another().delete(NAME),
    ):
        with pytest.raises(BackendUnavailable):
            call()
    hurt.fake.faults.disarm()
    assert hurt.another().describe(NAME).phase is RunPhase.RUNNING
    hurt.assert_one_whole_run()
