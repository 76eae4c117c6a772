"""The watches of two nodes with a fake clock: how they inspect ranks, talk to each other, and report a hang."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from runtime.launcher.telemetry import node_watch as module
from runtime.launcher.telemetry import sampling
from runtime.launcher.telemetry.hang_detector import NOT_WAITING, WAITING, NodeProgress, RankState
from runtime.launcher.telemetry.node_watch import NodeWatch
from runtime.launcher.telemetry.sampling import Process, Reading
from runtime.launcher.telemetry.stacks import StackCapture
from runtime.launcher.worker_group import Rank

HANG_SECONDS = 40


@dataclass
class FakeRun:
    """A clock, the CPU time of every node, and the state of each rank. Inspections take no time."""

    now: float = 1000.0
    cpu: float = 0.0
    states: dict[int, RankState] = field(default_factory=dict)
    inspections: int = 0

    def read(self):
        """Return what a node's watch reads: one process, its rank, with pid 7."""
        return Reading(self.now, {7: Process(7, 1, "S", 1, self.cpu, self.cpu, 0, 0)}, None, None)


class Node:
    """One node: its watch, its reports to the supervisor, and its connection to the other node."""

    def __init__(self, run, number):
        self.run = run
        self.number = number
        self.other = None
        self.reports = []
        self.is_cut_off = False  # while it is cut off, messages to it are lost
        plan = SimpleNamespace(
            node=number, workers=1, cpus=1.0, hang_seconds=HANG_SECONDS, own_network=False, run_dir="/nowhere"
        )
        self.watch = NodeWatch(plan, [], report=self.reports.append, send=self.send)
        reading, self.writing = os.pipe()
        self.ranks = [Rank(number, 7, reading)]
        self.cause = None

    def send(self, message):
        if self.other is not None and not self.other.is_cut_off:
            self.other.watch.handle_message(self.number, message)

    def tick(self, round_number=0):
        self.cause = self.cause or self.watch.handle_timers(round_number, (0, 1), self.ranks)

    def reports_of(self, kind):
        return [report for report in self.reports if report["type"] == kind]

    def close(self):
        os.close(self.writing)
        os.close(self.ranks[0].report_fd)


@pytest.fixture
def run(monkeypatch):
    """A run whose two ranks wait for each other, at different places. The watches read it instead of this machine."""
    run = FakeRun(
        states={0: RankState("a", WAITING, "train.py, line 1, f"), 1: RankState("b", WAITING, "train.py, line 1, f")}
    )

    def start(_capture, _now):
        run.inspections += 1

    clock = SimpleNamespace(monotonic=lambda: run.now, time=lambda: run.now + 1e9)
    for user in (module, sampling):
        monkeypatch.setattr(user, "time", clock)
    monkeypatch.setattr(module.Sampler, "read", lambda _sampler: run.read())
    monkeypatch.setattr(module, "read_processes", lambda: run.read().processes)
    monkeypatch.setattr(module, "read_threads", lambda _pid: {7: run.cpu})
    monkeypatch.setattr(StackCapture, "start", start)
    monkeypatch.setattr(StackCapture, "is_over", lambda _capture, _now: True)
    monkeypatch.setattr(
        StackCapture, "rank_states", lambda capture: {rank: run.states[rank] for rank in capture._ranks}
    )
    return run


@pytest.fixture
def nodes(run):
    hub, member = Node(run, 0), Node(run, 1)
    hub.other, member.other = member, hub
    yield hub, member
    for node in (hub, member):
        node.close()


def pass_time(run, nodes, seconds, round_number=0):
    """Tick both nodes every half second, and return the cause as soon as there is one."""
    for _ in range(2 * seconds):
        run.now += 0.5
        for node in nodes:
            node.tick(round_number)
        if nodes[0].cause is not None:
            return nodes[0].cause
    return None


def test_a_hang_reports_the_cpu_time_since_the_last_progress(run, nodes):
    """CPU time below what counts as progress is still charged."""
    share = 0.02  # of the core that each node has
    run.states[0] = RankState("a", NOT_WAITING, "train.py, line 9, sleep")
    nodes[0].watch.note_output()  # the last sign of progress
    cause = None
    for _second in range(2 * HANG_SECONDS + 10):  # more than enough: the hang comes after HANG_SECONDS
        run.cpu += share
        cause = cause or pass_time(run, nodes, 1)
    assert cause["data"]["used_seconds"] == pytest.approx(share * cause["data"]["seconds"], abs=0.1)


def test_a_silent_node_does_not_delay_the_report_of_a_hang(run, nodes):
    hub, member = nodes
    pass_time(run, nodes, HANG_SECONDS - 6)
    member.is_cut_off = True
    assert pass_time(run, nodes, 20) is not None, "6 s to the hang, then a few for the stacks of the silent node"
    assert hub.reports_of("stacks")
    assert not member.reports_of("stacks")


def test_messages_of_another_round_are_ignored(run, nodes):
    hub, member = nodes
    hub.tick()
    member.tick()
    hub.watch.handle_message(1, {"type": "capture_stacks", "round": 5})
    hub.watch.handle_message(1, {"type": "progress", "round": 5, **NodeProgress(1e9, 1e9, True)._asdict()})
    member.watch.handle_message(0, {"type": "inspect", "round": 5})
    pass_time(run, nodes, 2)
    assert run.inspections == 0


def test_a_new_round_restarts_the_timer(run, nodes):
    assert pass_time(run, nodes, HANG_SECONDS - 5) is None
    assert pass_time(run, nodes, HANG_SECONDS - 5, round_number=1) is None
