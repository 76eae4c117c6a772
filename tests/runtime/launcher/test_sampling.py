"""Samples of a node, read from a fake /proc and cgroup."""

import os

import pytest

from runtime.launcher.step_timer import Counts
from runtime.launcher.telemetry import sampling
from runtime.launcher.telemetry.sampling import (
    NetworkBytes,
    Process,
    Reading,
    Sampler,
    group_by_rank,
    parse_network_bytes,
    read_process,
)

TICKS = os.sysconf("SC_CLK_TCK")
NETWORK = b"""Inter-|   Receive                                                |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 1000 1 0 0 0 0 0 0 2000 1 0 0 0 0 0 0
"""


def process(pid, parent=1, **changes):
    """Return a sleeping process that has used nothing, except for the changes."""
    return Process(pid, parent, "S", 1, 0.0, 0.0, 0, 0)._replace(**changes)


def write_process(proc, pid, *, name="python", ticks=100):
    folder = proc / str(pid)
    folder.mkdir()
    # The ticks are CPU time in user mode, in the kernel, and of ended children; the process started at tick 77.
    fields = f"S 1 1 1 0 -1 0 0 0 0 0 {ticks} 10 5 5 20 0 1 0 77"
    (folder / "stat").write_text(f"{pid} ({name}) {fields} 0 0\n")
    (folder / "io").write_text("rchar: 1\nwchar: 2\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n")
    # Nanoseconds of running and of waiting for a core.
    (folder / "schedstat").write_text("1500000000 500000000 7\n")


def test_a_process_is_read_whatever_its_name(tmp_path):
    write_process(tmp_path, 7, name="a) S 1 1 (b c")
    assert read_process(7, str(tmp_path)) == Process(7, 1, "S", 77, 120 / TICKS, 2.0, 4096, 8192)


def test_processes_belong_to_the_rank_they_descend_from():
    # 6 descends from no rank. 7 and 8 seem to be each other's parent: one pid was reused while they were read.
    # Rank 2's process, 99, has ended.
    processes = {pid: process(pid, parent) for pid, parent in [(2, 1), (3, 1), (4, 2), (5, 4), (6, 1), (7, 8), (8, 7)]}
    assert group_by_rank(processes, {2: 0, 3: 1, 99: 2}) == {0: [2, 4, 5], 1: [3], 2: []}


def test_loopback_counts_only_without_another_interface():
    assert parse_network_bytes(NETWORK) == (1000, 2000)
    assert parse_network_bytes(NETWORK + b"  eth0:50 1 0 0 0 0 0 0 70 1 0 0 0 0 0 0\n") == (50, 70)
    assert parse_network_bytes(b"") == (0, 0)
    assert parse_network_bytes(b"a\nb\nnonsense\n") == (0, 0)


def reading(at, *processes, network=None):
    return Reading(at, {one.pid: one for one in processes}, network, None)


def test_a_sample_covers_the_time_since_the_previous_one():
    sampler = Sampler(own_network=True, proc="/nowhere")
    before = reading(
        10.0, process(2, cpu_seconds=1.0, read_bytes=100), process(3, 2, cpu_seconds=4.0), network=NetworkBytes(0, 0)
    )
    after = reading(
        12.0,
        process(2, cpu_seconds=2.0, read_bytes=300, written_bytes=50),
        process(3, 2, cpu_seconds=6.0),
        network=NetworkBytes(10, 20),
    )
    # Process 2 is rank 5. Its counts: calls of `step()`, steps with a duration, their seconds, and for communication.
    assert sampler.sample(before, {2: 5}, {5: Counts(1, 0, 0.0, None)}) is None
    sample = sampler.sample(after, {2: 5}, {5: Counts(9, 8, 1.6, 0.4)})
    assert (sample["seconds"], sample["cpu"], sample["processes"]) == (2.0, 1.5, 2)
    assert (sample["disk_read"], sample["disk_write"]) == (100, 25)
    assert (sample["net_rx"], sample["net_tx"]) == (5, 10)
    assert sample["ranks"] == [
        {"rank": 5, "cpu": 1.5, "memory": 0, "steps": 8, "step_seconds": 1.6, "comm_seconds": 0.4}
    ]


def test_starting_and_ending_processes_do_not_distort_samples():
    sampler = Sampler(own_network=False, proc="/nowhere")
    sampler.sample(
        reading(10.0, process(2, cpu_seconds=9.0, read_bytes=900), process(3, 2, cpu_seconds=50.0, read_bytes=500)),
        {2: 0},
        {},
    )
    # Process 3 has ended: what it had used is in its parent's sums now, and was in samples before. Process 4 is new.
    sample = sampler.sample(
        reading(11.0, process(2, cpu_seconds=60.0, read_bytes=1500), process(4, 2, cpu_seconds=0.5)), {2: 0}, {}
    )
    assert sample["cpu"] == sample["ranks"][0]["cpu"] == 1.5, "60 - (9 + 50), and 0.5 of process 4"
    assert sample["disk_read"] == 100, "1500 - (900 + 500)"
    assert sample["net_rx"] is None
    # The orphan that process 4 is now belongs to no rank; process 2 goes on.
    sample = sampler.sample(reading(12.0, process(2, cpu_seconds=60.4), process(4, 1, cpu_seconds=0.8)), {2: 0}, {})
    assert (sample["cpu"], sample["ranks"][0]["cpu"]) == (0.7, 0.4)
    sample = sampler.sample(reading(13.0), {}, {})
    assert (sample["cpu"], sample["disk_read"], sample["ranks"]) == (0.0, 0, []), "all processes have ended"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (Counts(1, 0, 0.0, None), Counts(5, 4, 2.0, None), (4, 2.0, None)),
        (Counts(5, 4, 2.0, 0.5), Counts(5, 4, 2.0, 0.5), (0, 0.0, 0.0)),
        # A rank that was started again counts from zero.
        (Counts(5, 4, 2.0, 0.5), Counts(2, 1, 0.5, 0.1), (1, 0.5, 0.1)),
        # Code can write the counts: growth is never negative, and nobody waits for longer than the step.
        (Counts(5, 4, 2.0, 0.5), Counts(6, 5, 3.0, 9.0), (1, 1.0, 1.0)),
        (Counts(5, 4, 2.0, 0.5), Counts(6, 5, 1.0, 0.1), (1, 0.0, 0.0)),
    ],
)
def test_samples_contain_the_growth_of_counts(before, after, expected):
    sampler = Sampler(own_network=False, proc="/nowhere")
    sampler.sample(reading(10.0, process(2)), {2: 0}, {})
    sampler.sample(reading(11.0, process(2)), {2: 0}, {0: before})
    sample = sampler.sample(reading(12.0, process(2)), {2: 0}, {0: after})
    rank = sample["ranks"][0]
    assert (rank["steps"], rank["step_seconds"], rank["comm_seconds"]) == expected


def test_usage_comes_from_the_cgroup_if_it_is_visible(tmp_path):
    sampler = Sampler(own_network=False, cgroup=str(tmp_path))
    assert sampler.read().cgroup_cpu_seconds is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (tmp_path / "memory.current").write_text("123456\n")
    first = sampler.read()
    assert first.cgroup_cpu_seconds == 2.5
    sampler.sample(first, {}, {})
    (tmp_path / "cpu.stat").write_text("usage_usec 3500000\nuser_usec 1\n")
    sample = sampler.sample(sampler.read()._replace(at=first.at + 2), {}, {})
    assert (sample["cpu"], sample["memory"]) == (0.5, 123456)


def test_a_tmp_on_disk_does_not_count_as_memory(tmp_path):
    """In a Pod, /tmp may be on the machine's disk, whose files are not in memory."""
    assert sampling.files_in_memory(folders=("/", str(tmp_path))) == 0
    (tmp_path / "self").mkdir()
    mounts = tmp_path / "self" / "mounts"
    mounts.write_text("overlay / overlay rw 0 0\n/dev/sda1 /tmp ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n")
    state = os.statvfs("/dev/shm")  # its size is this machine's: only the kinds of the file systems are fake
    used = (state.f_blocks - state.f_bfree) * state.f_frsize
    assert sampling.files_in_memory(str(tmp_path)) == pytest.approx(used, abs=1 << 26)
    mounts.write_text("overlay / overlay rw 0 0\n/dev/sda1 /tmp ext4 rw 0 0\n")
    assert sampling.files_in_memory(str(tmp_path)) == 0
