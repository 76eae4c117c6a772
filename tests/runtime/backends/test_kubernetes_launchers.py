"""The launcher's archive on a cluster: which one is used, and that old ones go once nobody uses them."""

import time

import pytest

from runtime.backends import kubernetes_access, kubernetes_launchers, manifests
from runtime.backends.kubernetes_api import Api, path_of
from runtime.backends.kubernetes_names import USED
from runtime.backends.kubernetes_order import order
from runtime.specs import (
    Outcome,
)
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.yard import ClusterYard
from tests.runtime.backends.going import NAME, limited


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
