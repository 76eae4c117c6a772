"""Two nodes' watches, by hand: who looks when, who tells whom, and what comes of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.launcher import sampling
from runtime.launcher import watch as module
from runtime.launcher.progress import NOT_WAITING, WAITING, Stand
from runtime.launcher.ranks import Rank
from runtime.launcher.sampling import Process, Reading
from runtime.launcher.stacks import Look
from runtime.launcher.watch import Watch

HANG = 40


@dataclass
class World:
    """A clock, what every node's processes do, and where each rank stands; looks into ranks cost no time."""

    now: float = 1000.0
    cpu: float = 0.0
    stands: dict[int, Stand] = field(default_factory=dict)
    looks: int = 0

    def read(self) -> Reading:
        return Reading(self.now, {7: Process(7, 1, "S", 1, self.cpu, self.cpu, 0, 0)}, None, None)


class Node:
    """One node: its watch, what it told its supervisor, and the line to the other node."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.other: Node | None = None
        self.reports: list[dict[str, Any]] = []
        self.deaf = False
        plan = SimpleNamespace(
            node=number, workers=1, cpus=1.0, hang_seconds=HANG, own_network=False, run_dir="/nowhere"
        )
        self.watch = Watch(plan, [], report=self.reports.append, tell=self.tell)
        reading, self.writing = os.pipe()
        self.ranks = [Rank(number, 7, reading)]
        self.verdict: dict[str, Any] | None = None

    def tell(self, message: dict[str, Any]) -> None:
        if self.other is not None and not self.other.deaf:
            self.other.watch.heard(self.number, message)

    def tick(self) -> None:
        self.verdict = self.verdict or self.watch.keep_time(0, (0, 1), self.ranks)

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [report for report in self.reports if report["type"] == kind]

    def close(self) -> None:
        os.close(self.writing)
        os.close(self.ranks[0].notes)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(stands={0: Stand("a", WAITING, "train.py, line 1, f"), 1: Stand("b", WAITING, "train.py, line 1, f")})

    def begin(_look: Look, _now: float) -> None:
        world.looks += 1

    clock = SimpleNamespace(monotonic=lambda: world.now, time=lambda: world.now + 1e9)
    for user in (module, sampling):
        monkeypatch.setattr(user, "time", clock)
    monkeypatch.setattr(module.Sampler, "read", lambda _sampler: world.read())
    monkeypatch.setattr(module, "read_processes", lambda: world.read().processes)
    monkeypatch.setattr(module, "read_threads", lambda _pid: {7: world.cpu})
    monkeypatch.setattr(Look, "begin", begin)
    monkeypatch.setattr(Look, "is_over", lambda _look, _now: True)
    monkeypatch.setattr(Look, "stands", lambda look: {seat: world.stands[seat] for seat in look._ranks})
    return world


@pytest.fixture
def nodes(world: World) -> Iterator[tuple[Node, Node]]:
    hub, member = Node(world, 0), Node(world, 1)
    hub.other, member.other = member, hub
    yield hub, member
    for node in (hub, member):
        node.close()


def pass_time(world: World, nodes: tuple[Node, Node], seconds: int) -> dict[str, Any] | None:
    """Tick both every half second; the verdict as soon as there is one."""
    for _ in range(2 * seconds):
        world.now += 0.5
        for node in nodes:
            node.tick()
        if nodes[0].verdict is not None:
            return nodes[0].verdict
    return None


def test_a_run_that_works_is_sampled_and_seldom_looked_at(world: World, nodes: tuple[Node, Node]) -> None:
    world.stands[0] = Stand("a", NOT_WAITING, "train.py, line 9, evaluate")
    for _ in range(3 * HANG):
        world.cpu += 0.5
        assert pass_time(world, nodes, 1) is None
    assert world.looks <= 2 * 5, "it says nothing for minutes, and is found at work each time"
    for node in nodes:
        samples = node.told("sample")
        assert samples[0]["at"] - 1e9 < 1010
        assert all(sample["cpu"] == pytest.approx(0.5, abs=0.15) for sample in samples[1:])
        # Every two seconds for a minute, then every ten.
        assert 30 <= len(samples) <= 30 + 2 * HANG / 10 + 2
        assert node.told("progress")[-1]["at"] - 1e9 > world.now - 6
        assert node.told("stacks") == []


def test_a_hang_is_found_by_the_hub_and_shown_by_both(world: World, nodes: tuple[Node, Node]) -> None:
    nodes[1].watch.printed()
    nodes[0].watch.printed()
    world.stands[1] = Stand("b", NOT_WAITING, "train.py, line 9, evaluate")
    found = pass_time(world, nodes, 2 * HANG)
    assert found is not None
    assert (found["kind"], found["code"], found["rank"], found["node"]) == ("hung", "hung", 1, 1)
    assert found["data"]["where"] == "train.py, line 9, evaluate"
    assert HANG <= found["data"]["seconds"] <= HANG + 3
    assert found["data"]["progress_at"] - 1e9 == pytest.approx(world.now - found["data"]["seconds"], abs=2)
    for node in nodes:
        assert [report["rank"] for report in node.told("stacks")] == [node.number]


def test_a_node_that_does_not_answer_does_not_hold_up_the_verdict(world: World, nodes: tuple[Node, Node]) -> None:
    hub, member = nodes
    pass_time(world, nodes, HANG - 6)
    member.deaf = True
    assert pass_time(world, nodes, 20) is not None
    assert hub.told("stacks")
    assert not member.told("stacks")


def test_words_of_another_round_are_not_heard(world: World, nodes: tuple[Node, Node]) -> None:
    hub, member = nodes
    hub.tick()
    member.tick()
    hub.watch.heard(1, {"type": "hang", "round": 5})
    hub.watch.heard(1, {"type": "pulse", "round": 5, "quiet": 1e9, "silent": 1e9, "begun": True})
    member.watch.heard(0, {"type": "look", "round": 5})
    pass_time(world, nodes, 2)
    assert world.looks == 0


def test_a_node_that_has_finished_is_not_waited_for(world: World, nodes: tuple[Node, Node]) -> None:
    hub, _member = nodes
    hub.other = None
    hub.watch.left(1)
    hub.watch.printed()
    for _ in range(4 * HANG):
        world.now += 0.5
        hub.tick()
    assert hub.verdict is not None


def test_a_new_round_begins_with_all_its_time(world: World, nodes: tuple[Node, Node]) -> None:
    hub, member = nodes
    assert pass_time(world, nodes, HANG - 5) is None
    for _ in range(2 * (HANG - 5)):
        world.now += 0.5
        for node in (hub, member):
            node.verdict = node.verdict or node.watch.keep_time(1, (0, 1), node.ranks)
    assert hub.verdict is None


def test_a_last_sample_at_the_end(world: World, nodes: tuple[Node, Node]) -> None:
    pass_time(world, nodes, 3)
    before = len(nodes[0].told("sample"))
    world.now += 0.5
    nodes[0].watch.finish(nodes[0].ranks)
    assert len(nodes[0].told("sample")) == before + 1
