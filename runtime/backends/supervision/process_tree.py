"""The process tree of one node: bubblewrap, and all processes in its sandbox.

All of them end with the supervisor: the kernel kills the sandbox's first process (`--die-with-parent`), and then all
others of its PID namespace. No third-party packages: the supervisor imports this.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from runtime.backends.supervision import cgroups, resource_limits
from runtime.backends.supervision.node_plan import SupervisorPlan
from runtime.backends.supervision.rank_fork import connect_fork_server
from runtime.launcher import seccomp
from runtime.launcher.processes import Exit, send_signal, spawn


class ProcessTree:
    """One node's processes.

    `exit`: how bubblewrap ended, None while it runs. `init_pid`: the pid on the host of the sandbox's first process,
    which is the launcher; 0 before it runs. `cgroups_file` lists the node's control groups while they exist.
    """

    def __init__(self, plan: SupervisorPlan, cgroups_file: Path) -> None:
        self._plan = plan
        self._cgroups_file = cgroups_file
        self._bubblewrap_pid = 0  # 0 before it runs
        self.group: cgroups.Group | None = None
        self.init_pid = 0
        self.exit: Exit | None = None

    def start(self, launch_plan_fd: int, *, output_fd: int, inherit_fds: Sequence[int]) -> int | None:
        """Start the launcher in its sandbox. Return the launcher's descriptor of the socket to forked ranks, or None.

        None: the ranks start cold. The launcher reads its launch plan from the socket `launch_plan_fd`, writes its
        output to the descriptor `output_fd`, and inherits the descriptors `inherit_fds`.
        """
        plan = self._plan
        if plan["cgroups"]:
            self._create_cgroup()
        fork_connection = None
        if plan["fork_server"]:
            fork_connection = connect_fork_server(plan["fork_server"], len(plan["ranks"]))
        info_fd, bubblewrap_info_fd = os.pipe()
        seccomp_fds = _seccomp_fds()
        bubblewrap, *options = plan["sandbox"]
        options += ["--info-fd", str(bubblewrap_info_fd)]
        for seccomp_fd in seccomp_fds:
            options += ["--seccomp", str(seccomp_fd)]
        arguments = [bubblewrap, *options, *plan["command"], "--socket", str(launch_plan_fd)]
        fork_fds = [] if fork_connection is None else [fork_connection.launcher_end.fileno()]
        inherited = [launch_plan_fd, bubblewrap_info_fd, *seccomp_fds, *fork_fds, *inherit_fds]
        # bubblewrap needs no variables, and its arguments set the launcher's.
        self._bubblewrap_pid = spawn(
            arguments, {}, output_fd=output_fd, inherit_fds=inherited, prepare=self._prepare_child
        )
        for descriptor in (bubblewrap_info_fd, *seccomp_fds):
            os.close(descriptor)
        if init_pid := read_init_pid(info_fd):  # else bubblewrap has failed, and the supervisor records its exit
            self.init_pid = init_pid
            # Before the launcher gets its plan, so before it starts ranks.
            resource_limits.limit_processes(init_pid, self._kernel_limits())
            resource_limits.raise_launcher_priority(init_pid)
        if fork_connection is not None:
            fork_connection.send_sandbox(
                self.init_pid, self._bubblewrap_pid, self._kernel_limits(), self._cgroup_folders()
            )
            fork_connection.launcher_end.close()
        return fork_fds[0] if fork_fds else None

    def _cgroup_folders(self) -> list[Path]:
        return [] if self.group is None else self.group.folders

    def _kernel_limits(self) -> dict[str, int]:
        """Return the limits of every process, by their names in the module `resource`."""
        plan = self._plan
        # The larger of both limits, since files in /dev/shm and /tmp are bounded by the memory and not by the disk.
        file_bytes = max(plan["disk_bytes"], plan["memory_bytes"])
        return resource_limits.kernel_limits(processes=plan["process_limit"], file_bytes=file_bytes)

    def _create_cgroup(self) -> None:
        """Create the node's control group; `group` stays None if the kernel refuses."""
        plan = self._plan
        # With the nonce, since an earlier run of this name may have left a group that could not be removed.
        name = f"trainyard-{plan['name']}-{plan['node']}-{plan['nonce'][:8]}"
        self.group = cgroups.create(
            name,
            memory_bytes=plan["memory_bytes"],
            processes=plan["process_limit"],
            cpus=plan["cpus"],
            # Written before the groups exist, so that a later clean-up always knows of them.
            record_folders=lambda folders: self._cgroups_file.write_text(
                json.dumps([str(folder) for folder in folders])
            ),
        )

    def _prepare_child(self) -> None:
        """Limit the process that calls this: the new child, before it executes bubblewrap."""
        resource_limits.apply_limits(self._kernel_limits())
        if self.group is not None:
            self.group.join()

    def note_exit(self, process_exit: Exit) -> None:
        """Note that a child of this process has ended; it may be bubblewrap."""
        if process_exit.pid == self._bubblewrap_pid:
            self.exit = process_exit

    def kill(self) -> None:
        """Kill bubblewrap and the sandbox's first process, with which the kernel ends all others.

        Does nothing after bubblewrap's end: the pids may then be those of other processes.
        """
        for pid in (self.init_pid, self._bubblewrap_pid):
            if pid and self.exit is None:
                send_signal(pid, signal.SIGKILL)

    def remove_cgroups(self) -> None:
        """Remove the node's control groups and their list. Call this when none of the node's processes runs any more.

        If a group cannot be removed, the list stays, since nothing else tells which groups are left.
        """
        if cgroups.remove(self._cgroup_folders()):
            self._cgroups_file.unlink(missing_ok=True)


def read_init_pid(info_fd: int) -> int:
    """Return the pid on the host of a sandbox's first process, which bubblewrap writes to its `--info-fd`.

    `info_fd` is the pipe's other end, which is closed. Returns 0 if bubblewrap has failed.
    """
    with os.fdopen(info_fd, "rb") as info_file, contextlib.suppress(ValueError, KeyError):
        return int(json.loads(info_file.read())["child-pid"])
    return 0


def _seccomp_fds() -> list[int]:
    """Return the descriptor of the seccomp filter for bubblewrap (a list of one); none if the kernel has no filters."""
    program = None if seccomp.unavailable_reason() else seccomp.sandbox_filter()
    if program is None:
        return []
    reader, writer = os.pipe()
    os.write(writer, program)  # does not block, since a pipe can hold far more bytes
    os.close(writer)
    return [reader]


def recorded_cgroups(folder: Path) -> list[Path]:
    """Return the control groups of all nodes of a run, as their supervisors recorded them in `folder`."""
    folders: list[Path] = []
    for cgroups_file in folder.glob("*.cgroups"):
        with contextlib.suppress(OSError, ValueError):  # the list is being written, or was just removed
            folders += map(Path, json.loads(cgroups_file.read_bytes()))
    return folders


def remove_recorded_cgroups(cgroups_file: Path) -> None:
    """Remove the control groups of a node whose supervisor was killed."""
    try:
        folders = [Path(folder) for folder in json.loads(cgroups_file.read_bytes())]
    except (OSError, ValueError):
        return  # no list, or an incomplete one: it is written first, so no group was created
    if cgroups.remove(folders):
        cgroups_file.unlink(missing_ok=True)
