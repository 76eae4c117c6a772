"""What a cluster lacks is said in one sentence, before or instead of anything that is made there."""

from __future__ import annotations

import time

import pytest

from tests.kubernetes import needs, staged
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.sites import FakeSite
from tests.kubernetes.staged import StagedSite

Refused = pytest.exit.Exception


@pytest.fixture(autouse=True)
def _here(fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_TEST_HOST_PATH", str(fake_site.folder))


def test_a_cluster_that_has_all_is_used(fake_site: FakeSite) -> None:
    assert needs.demand(fake_site.config()) == ["node-a", "node-b"]


def test_machines_that_take_no_pods_are_named_with_the_reason(fake_site: FakeSite, fake: FakeCluster) -> None:
    taint = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    fake.edit_node("node-a", lambda found: found["spec"].update(taints=[taint]))
    assert needs.demand(fake_site.config()) == ["node-b"]
    fake.edit_node("node-b", lambda found: found["spec"].update(unschedulable=True))
    with pytest.raises(Refused, match=r"node-a: tainted with node-role.*; node-b: cordoned") as caught:
        StagedSite(fake_site.kubeconfig)
    assert caught.value.returncode == 1
    assert [one["metadata"]["name"] for one in fake.store.find("namespaces")] == [fake_site.namespace]


def test_too_little_room_is_told_in_figures(fake_site: FakeSite, fake: FakeCluster) -> None:
    for node in fake.nodes:
        fake.edit_node(node, lambda found: found["status"]["allocatable"].update(cpu="400m"))
    with pytest.raises(Refused, match=r"0\.5 cores and 1024 MiB .* node-a has 0\.4 cores and 16384 MiB"):
        needs.demand(fake_site.config())


def test_what_the_user_may_not_do_is_listed(fake_site: FakeSite, fake: FakeCluster) -> None:
    fake.make("serviceaccounts", fake_site.namespace, "nobody")
    token = fake.server.access.token_for(fake_site.namespace, "nobody")
    path = fake_site.kubeconfig_of(token, fake_site.folder / "narrow")
    with pytest.raises(Refused, match=r"may not: create namespaces, .* administrator"):
        StagedSite(path)


def test_a_server_that_is_not_there_is_told(fake_site: FakeSite, fake: FakeCluster) -> None:
    fake.server.close()
    with pytest.raises(Refused, match="does not let us in"):
        needs.demand(fake_site.config())


def test_an_image_that_a_machine_lacks_ends_the_tests_and_leaves_nothing(
    fake_site: FakeSite, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "IMAGE", "docker.io/library/python:0.1")
    monkeypatch.setattr(staged, "_PULL_SECONDS", 0.5)
    with pytest.raises(Refused, match=r"python:0\.1 is not on the machine node-a .* TRAINYARD_TEST_IMAGE"):
        StagedSite(fake_site.kubeconfig)
    assert [one["metadata"]["name"] for one in fake.store.find("namespaces")] == [fake_site.namespace]


def test_a_clock_that_is_far_off_is_told() -> None:
    now = time.time()
    needs.compare_clocks("node-a", f"time {now - 5}\n", now, now + 1)
    with pytest.raises(Refused, match="The clock of node-a is 60 s off"):
        needs.compare_clocks("node-a", f"time {now + 61}\n", now, now + 1)
