import pytest

from runtime.launcher import cgroup_events


@pytest.mark.parametrize("name", ["memory.events", "memory/memory.oom_control"])
def test_oom_kills_are_read_from_cgroups_v1_and_v2(tmp_path, name):
    assert cgroup_events.oom_kills(str(tmp_path)) == 0
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("oom 7\noom_kill 3\noom_group_kill 1\n")
    assert cgroup_events.oom_kills(str(tmp_path)) == 3
    path.write_text("oom_kill many\n")
    assert cgroup_events.oom_kills(str(tmp_path)) == 0


@pytest.mark.parametrize("folder", ["", "pids"])
def test_refused_processes_are_read_from_cgroups_v1_and_v2(tmp_path, folder):
    assert (cgroup_events.process_refusals(str(tmp_path)), cgroup_events.process_limit(str(tmp_path))) == (0, None)
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "pids.events").write_text("max 5\nmax.imposed 7\n")
    (tmp_path / folder / "pids.max").write_text("512\n")
    assert (cgroup_events.process_refusals(str(tmp_path)), cgroup_events.process_limit(str(tmp_path))) == (5, 512)
    (tmp_path / folder / "pids.max").write_text("max\n")
    assert cgroup_events.process_limit(str(tmp_path)) is None


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
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (cgroup_events.memory_bytes(str(tmp_path)), cgroup_events.cpu_seconds(str(tmp_path))) == used
