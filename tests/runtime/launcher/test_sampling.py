"""What the launcher reads about its node, from a /proc made for the test and from the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.launcher import sampling
from runtime.launcher.sampling import Process, Reading, Sampler, belonging, network_bytes, read_process, read_processes
from runtime.launcher.steps import Counts

TICKS = os.sysconf("SC_CLK_TCK")
NETWORK = b"""Inter-|   Receive                                                |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 1000 1 0 0 0 0 0 0 2000 1 0 0 0 0 0 0
"""


def process(pid: int, parent: int = 1, **changes: object) -> Process:
    return Process(pid, parent, "S", 1, 0.0, 0.0, 0, 0)._replace(**changes)


def write_process(proc: Path, pid: int, *, name: str = "python", ticks: int = 100) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    fields = [
        "S",
        "1",
        "1",
        "1",
        "0",
        "-1",
        "0",
        "0",
        "0",
        "0",
        "0",
        str(ticks),
        "10",
        "5",
        "5",
        "20",
        "0",
        "1",
        "0",
        "77",
    ]
    (folder / "stat").write_text(f"{pid} ({name}) {' '.join(fields)} 0 0\n")
    (folder / "io").write_text("rchar: 1\nwchar: 2\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n")
    (folder / "schedstat").write_text("1500000000 500000000 7\n")


def test_a_process_is_read_whatever_its_name(tmp_path: Path) -> None:
    write_process(tmp_path, 7, name="a) S 1 1 (b c")
    assert read_process(7, str(tmp_path)) == Process(7, 1, "S", 77, 120 / TICKS, 2.0, 4096, 8192)


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    write_process(tmp_path, 7)
    for path in ("io", "schedstat"):
        (tmp_path / "7" / path).unlink()
    (tmp_path / "8").mkdir()
    (tmp_path / "self").mkdir()
    assert read_processes(str(tmp_path)) == {7: Process(7, 1, "S", 77, 120 / TICKS, 120 / TICKS, 0, 0)}


def test_the_real_proc_is_read() -> None:
    script = (
        "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\nimport sys; sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = read_processes()[child.pid]
        assert 0.25 < found.cpu < 30
        assert found.parent == os.getpid()
        assert os.getpid() not in read_processes()
        child.kill()


def test_processes_belong_to_the_rank_they_descend_from() -> None:
    processes = {pid: process(pid, parent) for pid, parent in [(2, 1), (3, 1), (4, 2), (5, 4), (6, 1), (7, 8), (8, 7)]}
    assert belonging(processes, {2: 0, 3: 1, 99: 2}) == {0: [2, 4, 5], 1: [3], 2: []}


def test_loopback_counts_where_there_is_nothing_else() -> None:
    assert network_bytes(NETWORK) == (1000, 2000)
    assert network_bytes(NETWORK + b"  eth0:50 1 0 0 0 0 0 0 70 1 0 0 0 0 0 0\n") == (50, 70)
    assert network_bytes(b"") == (0, 0)
    assert network_bytes(b"a\nb\nnonsense\n") == (0, 0)


def reading(at: float, *processes: Process, network: tuple[int, int] | None = None) -> Reading:
    return Reading(at, {one.pid: one for one in processes}, network, None)


def test_a_sample_is_what_grew_since_the_one_before() -> None:
    sampler = Sampler(own_network=True, proc="/nowhere")
    before = reading(10.0, process(2, cpu=1.0, read=100), process(3, 2, cpu=4.0), network=(0, 0))
    after = reading(12.0, process(2, cpu=2.0, read=300, written=50), process(3, 2, cpu=6.0), network=(10, 20))
    assert sampler.sample(before, {2: 5}, {5: Counts(1, 0, 0.0, None)}) is None
    sample = sampler.sample(after, {2: 5}, {5: Counts(9, 8, 1.6, 0.4)})
    assert sample is not None
    assert (sample["seconds"], sample["cpu"], sample["processes"]) == (2.0, 1.5, 2)
    assert (sample["disk_read"], sample["disk_write"]) == (100, 25)
    assert (sample["net_rx"], sample["net_tx"]) == (5, 10)
    assert sample["ranks"] == [
        {"rank": 5, "cpu": 1.5, "memory": 0, "steps": 8, "step_seconds": 1.6, "comm_seconds": 0.4}
    ]


def test_processes_that_came_or_went_make_no_false_figures() -> None:
    sampler = Sampler(own_network=False, proc="/nowhere")
    sampler.sample(reading(10.0, process(2, cpu=9.0, read=900), process(3, 2, cpu=50.0, read=500)), {2: 0}, {})
    # The child that went is counted in its parent now; another one that went without a parent is counted nowhere.
    sample = sampler.sample(reading(11.0, process(2, cpu=60.0, read=1500), process(4, 2, cpu=0.5)), {2: 0}, {})
    assert sample is not None
    assert sample["cpu"] == 1.5
    assert sample["disk_read"] == 100
    assert sample["net_rx"] is None
    gone = sampler.sample(reading(12.0), {}, {})
    assert gone is not None
    assert (gone["cpu"], gone["disk_read"], gone["ranks"]) == (0.0, 0, [])


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (Counts(1, 0, 0.0, None), Counts(5, 4, 2.0, None), (4, 2.0, None)),
        (Counts(5, 4, 2.0, 0.5), Counts(5, 4, 2.0, 0.5), (0, 0.0, 0.0)),
        # A rank that was started again begins from nothing.
        (Counts(5, 4, 2.0, 0.5), Counts(2, 1, 0.5, 0.1), (1, 0.5, 0.1)),
        (Counts(5, 4, 2.0, 0.5), Counts(6, 5, 3.0, 9.0), (1, 1.0, 1.0)),
        (Counts(5, 4, 2.0, 0.5), Counts(6, 5, 1.0, 0.1), (1, 0.0, 0.0)),
    ],
)
def test_counts_are_told_as_what_was_added(before: Counts, after: Counts, told: tuple[object, ...]) -> None:
    sampler = Sampler(own_network=False, proc="/nowhere")
    sampler.sample(reading(10.0, process(2)), {2: 0}, {})
    sampler.sample(reading(11.0, process(2)), {2: 0}, {0: before})
    sample = sampler.sample(reading(12.0, process(2)), {2: 0}, {0: after})
    assert sample is not None
    rank = sample["ranks"][0]
    assert (rank["steps"], rank["step_seconds"], rank["comm_seconds"]) == told


def test_the_steps_of_a_rank_that_ended_are_told_once() -> None:
    sampler = Sampler(own_network=False, proc="/nowhere")
    told = []
    for at, ranks, counts in [
        (1.0, {2: 0}, {0: Counts(3, 2, 1.0, None)}),
        (2.0, {2: 0}, {0: Counts(5, 4, 2.0, None)}),
        (3.0, {}, {}),
        (4.0, {}, {0: Counts(6, 5, 2.5, None)}),
    ]:
        sample = sampler.sample(reading(at, process(2)), ranks, counts)
        told += [rank["steps"] for rank in (sample or {"ranks": []})["ranks"]]
    assert told == [4, 1]


def test_the_cgroup_is_believed_where_it_can_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_CGROUP", str(tmp_path))
    sampler = Sampler(own_network=False)
    assert sampler.read().cpu is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (tmp_path / "memory.current").write_text("123456\n")
    first = sampler.read()
    assert first.cpu == 2.5
    sampler.sample(first, {}, {})
    (tmp_path / "cpu.stat").write_text("usage_usec 3500000\nuser_usec 1\n")
    sample = sampler.sample(sampler.read()._replace(at=first.at + 2), {}, {})
    assert sample is not None
    assert (sample["cpu"], sample["memory"]) == (0.5, 123456)
