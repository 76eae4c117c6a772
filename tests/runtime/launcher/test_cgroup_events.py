"""Kills, refusals, limits and usage that the launcher reads from cgroups of both versions."""

import pytest

from runtime.launcher import cgroup_events


@pytest.mark.parametrize("version", [1, 2])
def test_kills_and_refusals_are_read_from_cgroups(tmp_path, version):
    memory, pids = (tmp_path / "memory", tmp_path / "pids") if version == 1 else (tmp_path, tmp_path)
    for folder in (memory, pids):
        folder.mkdir(exist_ok=True)
    root = str(tmp_path)
    read = lambda: (
        cgroup_events.oom_kills(root),
        cgroup_events.process_refusals(root),
        cgroup_events.process_limit(root),
    )
    assert read() == (0, 0, None)
    # Beside each counter are fields with similar names, which must not be read.
    events = memory / ("memory.oom_control" if version == 1 else "memory.events")
    events.write_text("oom 7\noom_kill 3\noom_group_kill 1\n")
    (pids / "pids.events").write_text("max 5\nmax.imposed 7\n")
    (pids / "pids.max").write_text("512\n")
    assert read() == (3, 5, 512)
    events.write_text("oom_kill many\n")  # not a number
    (pids / "pids.max").write_text("max\n")  # no limit
    assert read() == (0, 5, None)


V1 = {
    "memory/memory.limit_in_bytes": "1073741824\n",
    "memory/memory.usage_in_bytes": "500000\n",
    "memory/memory.stat": "cache 400000\ntotal_inactive_file 300000\n",
    "cpuacct/cpuacct.usage": "2500000000\n",
    "cpu/cpu.cfs_quota_us": "50000\n",
}
V2 = {
    "memory.current": "500000\n",
    "memory.stat": "anon 1\ninactive_file 300000\n",
    "cpu.max": "50000 100000\n",
    "cpu.stat": "usage_usec 2500000\n",
}
UNLIMITED = {**V1, "memory/memory.limit_in_bytes": "9223372036854771712\n", "cpu/cpu.cfs_quota_us": "-1\n"}


@pytest.mark.parametrize(
    ("files", "used"), [(V1, (200000, 2.5)), (V2, (200000, 2.5)), (UNLIMITED, (None, None)), ({}, (None, None))]
)
def test_usage_is_read_from_cgroups_v1_and_v2(tmp_path, files, used):
    """`used` is memory without inactive files, and CPU seconds. With v1, a group without limits is the whole
    machine's, so its usage is not the node's."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (cgroup_events.memory_bytes(str(tmp_path)), cgroup_events.cpu_seconds(str(tmp_path))) == used
