"""Control groups, on trees of plain files that look like the kernel's, and on the kernel's own."""

import os
import signal

import pytest

from runtime.backends.supervision import cgroups

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")

LIMITS = {"memory_bytes": 300 << 20, "processes": 64, "cpus": 1.5}
"""What was bought. The CPU quota is 2,000 µs more in each period of 100,000 µs: the launcher's share."""


def make_proc(root, mounts, groups):
    """A `/proc` whose mountinfo has these (kind, options, folder below root) and whose cgroup has these lines."""
    proc = root / "proc" / "self"
    proc.mkdir(parents=True)
    lines = [f"30 20 0:1 / {root / folder} rw - {kind} cgroup rw,{options}" for kind, options, folder in mounts]
    (proc / "mountinfo").write_text("\n".join(["20 1 8:1 / / rw - ext4 /dev/a rw", *lines]) + "\n")
    (proc / "cgroup").write_text("\n".join(groups) + "\n")
    return proc.parent


def make_v2_proc(root, *, enabled_controllers):
    """A `/proc` with version 2, of a process in the group of a systemd service."""
    folder = root / "cg" / "system.slice" / "trainyard.service"
    folder.mkdir(parents=True)
    (folder / "cgroup.controllers").write_text("cpu io memory pids")
    (folder / "cgroup.subtree_control").write_text(enabled_controllers)
    return make_proc(root, [("cgroup2", "nsdelegate", "cg")], ["0::/system.slice/trainyard.service"])


def test_a_v2_group_has_one_folder_with_all_limits(tmp_path):
    proc = make_v2_proc(tmp_path, enabled_controllers="cpu memory pids")
    group = cgroups.create("run-0", **LIMITS, proc=proc)
    folder = tmp_path / "cg" / "system.slice" / "trainyard.service" / "run-0"
    assert group.folders == [folder]
    assert not (folder / "memory.kmem.tcp.limit_in_bytes").exists(), "`memory.max` includes the memory of sockets"
    assert (folder / "memory.max").read_text() == str(300 << 20)
    assert (folder / "pids.max").read_text() == "64"
    assert (folder / "cpu.max").read_text() == "152000 100000"
    (folder / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    (folder / "pids.events").write_text("max 7\n")
    (folder / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    assert (group.oom_kills(), group.process_refusals(), group.cpu_seconds()) == (3, 7, 1.5)


def test_v2_controllers_are_enabled_for_child_groups_unless_they_are_not_delegated(tmp_path):
    proc = make_v2_proc(tmp_path, enabled_controllers="")
    service = tmp_path / "cg" / "system.slice" / "trainyard.service"
    assert cgroups.create("run-0", **LIMITS, proc=proc) is not None
    assert (service / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    (service / "cgroup.subtree_control").write_text("")
    (service / "cgroup.controllers").write_text("pids")
    assert cgroups.create("run-1", **LIMITS, proc=proc) is None
    assert "Delegate=yes" in cgroups.unavailable_reason(proc)


@pytest.mark.parametrize(("controllers", "reason"), [(("memory", "pids", "cpu"), ""), (("memory", "pids"), "'cpu'")])
def test_v1_without_the_cpu_controller_is_reported(tmp_path, controllers, reason):
    for name in controllers:
        (tmp_path / name / "console").mkdir(parents=True)
    groups = [f"{number}:{name}:/console" for number, name in enumerate(controllers, 1)]
    proc = make_proc(tmp_path, [("cgroup", name, name) for name in controllers], groups)
    assert cgroups.create("run-0", **LIMITS, proc=proc) is not None
    assert cgroups.unavailable_reason(proc) == ""
    why = cgroups.no_cpu_limit_reason(proc)
    assert reason in why
    assert bool(why) is bool(reason)


def test_a_v1_group_has_a_folder_for_each_controller(tmp_path):
    for controller, console_group in (("memory", "console"), ("pids", ""), ("cpu,cpuacct", "")):
        (tmp_path / controller / console_group).mkdir(parents=True)
    mounts = [("cgroup", name, name) for name in ("memory", "pids", "cpu,cpuacct")]
    proc = make_proc(tmp_path, mounts, ["3:memory:/console", "2:pids:/", "1:cpu,cpuacct:/"])
    group = cgroups.create("run-0", **LIMITS, proc=proc)
    assert group.folders == sorted(
        [tmp_path / "memory" / "console" / "run-0", tmp_path / "pids" / "run-0", tmp_path / "cpu,cpuacct" / "run-0"]
    )
    assert (tmp_path / "memory" / "console" / "run-0" / "memory.limit_in_bytes").read_text() == str(300 << 20)
    (tmp_path / "memory" / "console" / "run-0" / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    assert group.oom_kills() == 2
    assert group.cpu_seconds() is None
    (tmp_path / "cpu,cpuacct" / "run-0" / "cpuacct.usage").write_text("2500000000\n")
    (tmp_path / "pids" / "run-0" / "pids.current").write_text("12\n")
    assert (group.cpu_seconds(), group.count_tasks()) == (2.5, 12)


def test_a_cgroup_tree_mounted_in_part_is_located(tmp_path):
    # In a container, the mount has only the part of the tree below the container's own group.
    (tmp_path / "cg" / "below").mkdir(parents=True)
    proc = make_proc(tmp_path, [("cgroup2", "x", "cg")], ["0::/docker/abc/below"])
    info = proc / "self" / "mountinfo"
    info.write_text(info.read_text().replace(f"/ {tmp_path}", f"/docker/abc {tmp_path}"))
    for name in ("cgroup.controllers", "cgroup.subtree_control"):
        (tmp_path / "cg" / "below" / name).write_text("cpu memory pids")
    assert cgroups.find_parents(proc)[0]["memory"] == tmp_path / "cg" / "below"


def test_removing_a_group_kills_its_processes(tmp_path):
    if cgroups.unavailable_reason():
        pytest.fail("the tests need control groups: run them as root")
    group = cgroups.create(f"trainyard-test-{os.getpid()}", **LIMITS)
    child = os.fork()
    if not child:
        group.join()
        signal.pause()
    while not any((folder / "cgroup.procs").read_text().split() for folder in group.folders):
        pass
    # The killed child is not reaped yet, which does not keep the kernel from removing its group.
    assert cgroups.remove(group.folders)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not any(folder.exists() for folder in group.folders)
    assert cgroups.remove(group.folders), "a group that does not exist counts as removed"
