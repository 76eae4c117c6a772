"""The local backend: every node of a run is a supervised, sandboxed process tree on this machine.

All state is on disk (`local.runs` lists the files). So any number of processes may use one root at the same time, and
each may die at any moment.
"""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from runtime.backends import admission, host, launch_plan, sandbox
from runtime.backends.local.inotify import FolderWatch
from runtime.backends.local.runs import Run, reservation_of
from runtime.backends.local.warm_pool.client import WarmPool, network_gap
from runtime.backends.local.warm_pool.protocol import ForkServer, StartRequest
from runtime.backends.supervision import cgroups, shell_socket, submission
from runtime.backends.supervision.folder_backend import FolderBackend, check_folder_name, translate_errors
from runtime.backends.supervision.node_plan import SupervisorPlan
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RunNotFound, RunUnreadable
from runtime.files import FileLock
from runtime.images import recipes
from runtime.launcher import seccomp
from runtime.launcher.notebook import SOCKET
from runtime.specs import Capacity, Controller, Image, NodeCapacity, Resources, RunPhase, RunSpec

_HEARTBEAT_SECONDS = 0.5
"""How long `changes` waits for a change before it yields an empty set. The protocol demands one at least every second.
"""
_LAUNCHER = Path(__file__).resolve().parents[2] / "launcher"
"""The launcher's folder, which every sandbox mounts."""


class LocalBackend(FolderBackend):
    """Starts runs on this machine. `root` holds the runs, `images_root` the built-in images (`runtime.images.venvs`).

    `cpus` and `memory_mib` limit all runs together. They default to the machine's cores and to `memory_fraction` of its
    memory. `disk_mib` is the disk limit of a run whose spec has none.

    `network`: `private` gives each run a network namespace of its own where the kernel allows it; with `host`, runs
    share the machine's network. `cgroups`: use control groups where the kernel allows it. `warm_seconds`: how long the
    warm pool keeps running after the last submission; 0: every start is cold.
    """

    extends_runs = True
    has_notebooks = True
    parallel_submissions = 1  # a submission holds the lock of `root`, so a second submission would only wait

    def __init__(
        self,
        *,
        root: Path,
        images_root: Path,
        cpus: float | None = None,
        memory_mib: int | None = None,
        memory_fraction: float = 0.9,
        disk_mib: int = 50 * 1024,
        network: str = "private",
        cgroups: bool = True,
        warm_seconds: float = 0,
    ) -> None:
        super().__init__(root, images_root)
        self._disk_mib = disk_mib
        self._network = network
        self._cgroups = cgroups
        self._warm_seconds = warm_seconds
        self._gpus = host.gpus()
        self._total = Resources(
            cpus=host.cpus() if cpus is None else cpus,
            memory_mib=int(host.memory_mib() * memory_fraction) if memory_mib is None else memory_mib,
            gpus=len(self._gpus),
            gpu_type=self._gpus[0].model if self._gpus else "",
        )
        self._disk = host.Disk(self._root, self._disk_mib)
        self._pool = WarmPool(self._root, idle_seconds=warm_seconds)
        # Compiled here because the sandbox, in which the launcher runs, cannot write the bytecode. Images with the
        # console's version of Python load this bytecode.
        compileall.compile_dir(_LAUNCHER, quiet=2)

    # The protocol

    def submit(self, spec: RunSpec) -> None:
        """See `Backend.submit`. Accepts built-in images only."""
        admission.check_name(spec.name)
        run = self._find(spec.name)
        if run.exists():  # checked again under the lock; this check only saves the work of the next lines
            return
        spec = admission.admit(spec, self._images_root)
        bubblewrap = sandbox.find_bubblewrap()
        has_trash = False
        try:
            with FileLock(self._root / ".lock"):
                if run.exists():
                    return
                # An interrupted submission of this name may have left a folder.
                has_trash = run.destroy()
                gpus = self._choose_gpus(spec)
                try:
                    self._start(run, spec, gpus, bubblewrap)
                except BaseException as error:  # includes SystemExit: no failed submission may keep its capacity
                    has_trash = run.destroy()
                    if isinstance(error, OSError):
                        raise BackendUnavailable(f"The run could not be started on this machine: {error}.") from error
                    raise
        finally:
            # Removing files may take long, so the lock is released first.
            if has_trash:
                self._trash.empty()

    def stop(self, name: str, grace_seconds: int) -> None:
        """See `Backend.stop`."""
        run = self._find(name)
        with contextlib.suppress(RunNotFound):  # the protocol: an unknown run needs no stop
            if not _has_ended(run):
                run.request_stop(grace_seconds)

    def extend(self, name: str, deadline_seconds: int) -> None:
        """See `Backend.extend`. The supervisors read the new deadline within a second or so."""
        with translate_errors(name):
            self._find(name).request_deadline(deadline_seconds)

    def kill(self, name: str) -> None:
        """See `Backend.kill`."""
        with self._without_submissions():
            self._find(name).kill()

    def delete(self, name: str) -> None:
        """See `Backend.delete`.

        Ending the run and removing its files may take long, so neither happens under the lock, unless the records of
        its supervisors cannot be read.
        """
        run = self._find(name)
        with translate_errors(name):
            run.end()
            with contextlib.suppress(RunNotFound), self._without_submissions():
                if not _has_ended(run):  # supervisors whose records cannot be read
                    run.kill()
            with FileLock(self._root / ".lock"):
                run.destroy()  # quick, since `end` has left no supervisor to wait for
            self._trash.empty()

    @contextlib.contextmanager
    def _without_submissions(self) -> Iterator[None]:
        """Let no process submit a run during the block. If the lock cannot be opened, no process can submit anyway."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(FileLock(self._root / ".lock"))
            yield

    def capacity(self) -> Capacity:
        """See `Backend.capacity`: one machine."""
        free, _gpus = self._free_resources()
        return Capacity((NodeCapacity(socket.gethostname(), self._total, free),))

    def is_reachable(self) -> bool:
        """See `Backend.is_reachable`: always, since it is this machine."""
        return True

    def changes(self, stop_after_seconds: float | None = None) -> Iterator[set[str]]:
        """See `Backend.changes`. Watches `.changes`, which has one file per run. Customer code cannot write there."""
        stop_at = None if stop_after_seconds is None else time.monotonic() + stop_after_seconds
        with contextlib.closing(FolderWatch(self._root / ".changes")) as watch:
            while stop_at is None or time.monotonic() < stop_at:
                yield watch.wait(_HEARTBEAT_SECONDS)

    def isolation_gaps(self) -> list[str]:
        """See `Backend.isolation_gaps`."""
        gaps = []
        # Each reason is an English sentence, or "" where the isolation works.
        reason = network_gap() if self._network == "private" else "The settings ask for that."
        if reason:
            gaps.append(f"Runs share this machine's network and can reach what listens on its loopback. {reason}")
        reason = cgroups.unavailable_reason() if self._cgroups else "The settings ask for that."
        if reason:
            gaps.append(
                "The console measures memory and processes of runs four times a second, since the kernel does not "
                f"limit them, and their CPU time is not limited. {reason}"
            )
        elif reason := cgroups.no_cpu_limit_reason():
            gaps.append(f"The CPU time of runs is not limited. {reason}")
        if reason := seccomp.unavailable_reason():
            gaps.append(f"Runs may make every system call, including those that reach other runs. {reason}")
        return gaps

    def shell_socket(self, name: str, node: int) -> Path | None:
        """See `Backend.shell_socket`."""
        path = shell_socket.path_of(self._find(name).folder, node)
        return path if path.is_socket() else None

    def notebook_socket(self, name: str) -> Path:
        """See `Backend.notebook_socket`."""
        return self._find(name).folder / "run" / SOCKET

    def stop_prepared_processes(self) -> None:
        """See `Backend.stop_prepared_processes`."""
        self._pool.stop()

    # Capacity

    def _free_resources(self) -> tuple[Resources, list[int]]:
        """Return the free resources and the device numbers of the free GPUs.

        Nothing is free while the disk is full, or while it cannot be read how much a run takes.
        """
        if self._disk.is_full():
            return Resources(0, 0), []
        cpus, memory_mib = self._total.cpus, self._total.memory_mib
        free_gpus = {gpu.device_number for gpu in self._gpus}
        for path in (self._root / ".active").iterdir():
            run = self._find(path.name)
            try:
                if _has_ended(run):
                    continue
                reservation = run.reservation()
            except RunNotFound:  # a submission that was interrupted or is not complete yet
                continue
            if reservation is None:  # the run may take all of the machine
                return Resources(0, 0), []
            cpus -= reservation["cpus"]
            memory_mib -= reservation["memory_mib"]
            free_gpus.difference_update(reservation["gpus"])
        gpu_type = self._total.gpu_type if free_gpus else ""
        # Rounded, since 0.1 + 0.2 is not exactly 0.3. At least 0, since live runs may use more than the total after an
        # administrator has lowered the total.
        free = Resources(max(0.0, round(cpus, 6)), max(0, memory_mib), len(free_gpus), gpu_type)
        return free, sorted(free_gpus)

    def _choose_gpus(self, spec: RunSpec) -> list[list[int]]:
        """Check that the run fits now, and return the device numbers of each node's GPUs.

        The caller holds the root's lock, so that the capacity stays free until `_start` records the run. Raises
        InvalidSpec, NoCapacity.
        """
        free, free_gpus = self._free_resources()
        capacity = Capacity((NodeCapacity(socket.gethostname(), self._total, free),))
        if (fitting_nodes := capacity.nodes_ever(spec.resources)) < spec.nodes:
            raise InvalidSpec(
                f"{spec.nodes} nodes of this kind can never run here: the cluster has room for {fitting_nodes}.",
                field="nodes",
            )
        if (fitting_nodes := capacity.nodes_now(spec.resources)) < spec.nodes:
            raise NoCapacity(f"{spec.nodes} nodes are needed, and {fitting_nodes} of this kind are free now.")
        gpus_per_node = spec.resources.gpus
        return [free_gpus[node * gpus_per_node : (node + 1) * gpus_per_node] for node in range(spec.nodes)]

    # Starting

    def _start(self, run: Run, spec: RunSpec, gpus: list[list[int]], bubblewrap: str) -> None:
        """Create the run's folder, start its supervisors and record it. `gpus`: each node's device numbers."""
        run.create_folders(reservation_of(json.loads(spec.to_json()), gpus))
        for folder in self._checkpoint_and_output_folders(run, spec):
            folder.mkdir(exist_ok=True, mode=0o700)
        token = secrets.token_hex(32)  # the run's launchers recognize each other by it
        # mpirun starts the ranks of MPI runs, so they cannot be forked in advance.
        fork_server = self._fork_server(spec.image) if spec.controller is not Controller.MPI else None
        with contextlib.ExitStack() as stack:
            locks: list[int] = []
            plans: list[SupervisorPlan] = []
            for node in range(spec.nodes):
                plan = self._supervisor_plan(run, spec, node, gpus[node], bubblewrap=bubblewrap)
                plan["fork_server"] = str(self._pool.socket_path(fork_server)) if fork_server else ""
                plan["launcher"]["token"] = token
                plans.append(plan)
                # Supervisors inherit the locks, so the kernel releases each one when its supervisor dies.
                locks.append(run.hold_lock(node))
                stack.callback(os.close, locks[-1])
            ports = launch_plan.ports_needed(spec)
            request: StartRequest = {
                "folder": str(run.folder),
                "nonce": secrets.token_hex(16),  # identifies this submission
                "network": self._network,
                "worker_ports": ports["worker_ports"],
                "spare_ports": ports["spare_ports"],  # for later rounds of an elastic run
                "locks": locks,
                "nodes": plans,
            }
            # Gets the output of node 0's supervisor. In a cold start the starter becomes this supervisor, so its output
            # is there too.
            log = run.folder / "logs" / "supervisor-0.log"
            # The supervisors start at the end of the block, and only if it has recorded the run under this nonce.
            with self._pool.starting(request, fork_server, log) as nonce:
                run.record_submission(spec, nonce=nonce, gpus=gpus)

    def _supervisor_plan(
        self, run: Run, spec: RunSpec, node: int, gpus: list[int], *, bubblewrap: str
    ) -> SupervisorPlan:
        """Return the plan of a node. The caller adds `fork_server` and the token. `gpus` are device numbers."""
        node_sandbox = self._node_sandbox(run, spec, node, gpus)
        plan = submission.node_plan(
            spec,
            node,
            node_sandbox,
            self._environment(node_sandbox),
            bubblewrap=bubblewrap,
            disk_mib=self._disk_mib,
            cgroups=self._cgroups,
        )
        plan["folder"] = str(run.folder)
        plan["change_file"] = str(run.change_file)
        plan["shells"] = True
        plan["is_extensible"] = True
        return plan

    def _fork_server(self, image: Image) -> ForkServer | None:
        """Return the fork server of an image's current build; None where every start is cold."""
        if not self._warm_seconds:
            return None
        folder = self._images_root / image.builtin
        return {
            # Each build of the image writes a new `ready.json`, so the file's time identifies the build.
            "name": self._pool.fork_server_name(image.builtin, (folder / "ready.json").stat().st_mtime_ns),
            "python": str(folder / "bin" / "python"),
            "modules": recipes.preloads(image.builtin),
            # No GPU is visible, so that no import initializes one: each run gets its own GPUs later.
            "environment": sandbox.base_environment(folder, gpus=[]),
        }

    def _node_sandbox(self, run: Run, spec: RunSpec, node: int, gpus: list[int]) -> sandbox.Sandbox:
        """Return a node's sandbox, and write its files for /etc. `gpus` are device numbers."""
        checkpoints, outputs = self._checkpoint_and_output_folders(run, spec)
        hostname = f"{spec.name}-{node}"
        etc = run.folder / "etc" / str(node)
        sandbox.write_etc(etc, hostname)
        image = self._images_root / spec.image.builtin
        return sandbox.Sandbox(
            hostname=hostname,
            run_folder=run.folder / "run",
            checkpoint_folder=checkpoints,
            output_folder=outputs,
            etc_folder=etc,
            image=image,
            interpreter_prefixes=sandbox.interpreter_prefixes(image),
            launcher=_LAUNCHER,
            mounts=spec.mounts,
            datasets_target=spec.datasets_target,
            models_target=spec.models_target,
            memory_bytes=spec.resources.memory_mib << 20,
            gpus=tuple(gpus),
            packages=Path(spec.packages) if spec.packages else None,
        )

    def _environment(self, node_sandbox: sandbox.Sandbox) -> dict[str, str]:
        return sandbox.base_environment(
            node_sandbox.image,
            [gpu.uuid for gpu in self._gpus if gpu.device_number in node_sandbox.gpus],
            has_packages=node_sandbox.packages is not None,
        )

    def _find(self, name: str) -> Run:
        """Return the run of this name, which may not exist. Raises RunNotFound for a name that is no run's folder."""
        check_folder_name(name)
        return Run(self._root, name)


def _has_ended(run: Run) -> bool:
    """Return whether a run has ended. One whose files cannot be read may still run. Raises RunNotFound."""
    try:
        return run.status().phase is RunPhase.ENDED
    except RunUnreadable:
        return False
