"""One node of a run in a pod, from the lookup of node 0's address to the last record.

Node 0's launcher is the hub: the launchers of all other nodes connect to it.
`pod.main` documents the plan, the environment and the record.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from ..dns import NameLookup
from ..extract import extract_file
from ..node import Node
from ..processes import Exit, reap
from ..protocol import Message
from ..record import Record, Verdict, open_file
from ..shell_access import port_of, token_of
from ..signed_record import MAX_RECORD_BYTES, STOP_FILE, read_stop, sign_record
from ..topology import LaunchPlan
from .deadline import DeadlineThread
from .identity import PodIdentity
from .limits import PodLimits, PodPlan
from .log_mux import LogMux
from .output import PodOutput
from .process_tree import PodTree
from .signals import STOP_SIGNALS, Signals

# Flags for files that the run's code may have replaced by a link or a pipe.
_UNTRUSTED_FILE_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FLUSH_SECONDS = 5.0
"""How long the last output may take to be written to stdout. It must fit into the 15 s by which the pod's grace period
is longer than the run's (`POD_MARGIN_SECONDS` of the Kubernetes backend)."""
_FINISH_SECONDS = 20.0
"""How long ending a node may take before the deadline thread ends this process: about the sum of the limits for
killing, reading and writing."""
_RECORD_TRIES = 3
"""Tries to write the last record to the run's folder. Few are enough, because the kubelet gets a copy."""


class PodNode(Node):
    """The supervision of one pod's node."""

    _plan: PodPlan
    _limits: PodLimits
    _tree: PodTree
    _output: PodOutput
    # Longer intervals than on local disks, since many nodes share the storage.
    _heartbeat_seconds = 5.0
    _metrics_seconds = 1.0

    def __init__(self, pod: PodIdentity, plan: PodPlan) -> None:
        self._pod = pod
        # The run's folder with records and logs. The code's own folder is `run_dir` of the plan, RUN_DIR.
        self._folder = Path(plan.get("folder") or "/trainyard/run-root")
        # The fields of `topology.Plan`. `_start_with_hub` adds `addresses`, which are not known yet.
        self._plan_fields: Dict[str, Any] = {**plan["plan"], "node": pod.node}
        record = Record(
            self._folder,
            change_file=None,  # the console watches it by inotify, which does not see writes of other machines
            node=pod.node,
            address=pod.address,
            first_fields={"run": plan["run"]},
            encode=lambda data: sign_record(data, pod.record_key),
        )
        super().__init__(
            plan,
            self._plan_fields,
            record=record,
            limits=PodLimits(plan, record),
            tree=PodTree(),
            output=PodOutput(selectors.DefaultSelector(), self._folder / "logs"),
            metrics_path=os.path.join(self._plan_fields["run_dir"], "metrics.jsonl"),
        )
        self._signals = Signals()
        self._selector.register(self._signals, selectors.EVENT_READ, self._signals)
        self._deadline = DeadlineThread(self._tree.kill, self._exit_stalled)
        self._hub_lookup: Optional[NameLookup] = None  # on nodes other than 0, until the ranks run
        self._ended_before_start = False  # the node ended before its launcher was started
        self._stop_request = b""  # the last request in STOP_FILE
        self._exit_code: Optional[int] = None  # the exit code, once the last record is written

    @property
    def _has_ended(self) -> bool:
        return self._ended_before_start or super()._has_ended

    def run(self) -> int:
        """Run the node to its end; return the exit code of this process."""
        self._create_folders()
        self._record.create()
        self._limits.measure_folders()
        if self._node:
            self._hub_lookup = NameLookup(self._plan["names"][0])
            self._selector.register(self._hub_lookup, selectors.EVENT_READ, self._hub_lookup)
        else:
            self._start_or_fail(self._pod.address)
        self._run_loop()
        return self._finish()

    def _create_folders(self) -> None:
        """Create the folders that the code and this process write to. Note failures in the record."""
        for path in (
            str(self._folder / "logs"),
            str(self._folder / "nodes"),
            self._plan_fields["checkpoint_dir"],
            os.path.join(self._plan_fields["run_dir"], "tensorboard"),
        ):
            try:
                os.makedirs(path, exist_ok=True)
            except OSError as error:
                self._record.add_detail("The folder {} could not be created: {}.".format(path, error.strerror))

    # Starting

    def _start_or_fail(self, hub_address: str) -> None:
        """Start the launcher with this address of node 0. If that fails, record why."""
        try:
            self._start_with_hub(hub_address)
        except OSError as error:
            message = "Node {} could not be started: {}.".format(self._node, error)
            self._fail(Verdict(kind="platform_error", code="node_not_started", message=message))

    def _start_with_hub(self, hub_address: str) -> None:
        """Start the launcher with this address of node 0. Raises OSError.

        The pod plan is what the console gave this pod. The launch plan, which the launcher reads, is made from it. The
        field `plan` of both has the fields of `topology.Plan`.
        """
        pod_plan, plan_fields = self._plan, self._plan_fields
        # Only these two addresses are known now. The others send theirs when they join the hub.
        plan_fields["addresses"] = [hub_address, *[""] * (int(plan_fields["nodes"]) - 1)]
        plan_fields["addresses"][self._node] = self._pod.address
        if pod_plan.get("builtin_script"):
            plan_fields["script"] = extract_file("{}.py".format(pod_plan["builtin_script"]))
        launch_plan: LaunchPlan = {
            "plan": plan_fields,
            "token": self._pod.token,
            "control_port": pod_plan["control_port"],
            "python": pod_plan.get("python") or sys.executable,
            "environment": self._environment,
            "variables": pod_plan.get("variables", {}),
            "secrets": self._pod.secrets,
            "devices": [str(gpu) for gpu in range(int(pod_plan.get("gpus", 0)))],
            "owns_pid_namespace": self._tree.is_first_process,
            "umask": 0o002,  # a pod's storage is shared by its group
        }
        workers = int(plan_fields["workers"])
        first_rank = self._node * workers
        listener = None if self._node else self._open_hub(int(pod_plan["control_port"]))
        self._start(range(first_rank, first_rank + workers), listener, launch_plan)

    def _start_launcher(self, launch_plan_fd: int, output_fd: int, inherit_fds: Sequence[int]) -> Message:
        """Start the launcher; return the remaining fields of its launch plan.

        `start_seconds` is how long the nodes may still take to meet.
        """
        listener = self._listen_for_shells()
        if listener is None:
            self._tree.start(launch_plan_fd, self._environment, output_fd=output_fd, inherit_fds=inherit_fds)
            return {"start_seconds": self._limits.begin_start_wait()}
        with listener:  # only the launcher keeps it open, so nobody can connect after the launcher's end
            inherited = [*inherit_fds, listener.fileno()]
            self._tree.start(launch_plan_fd, self._environment, output_fd=output_fd, inherit_fds=inherited)
            token = token_of(self._pod.record_key, run_name=self._plan["run"], node=self._node)
            return {
                "start_seconds": self._limits.begin_start_wait(),
                "shells": listener.fileno(),
                "shell_token": token,
            }

    def _listen_for_shells(self) -> Optional[socket.socket]:
        """Return the listening socket for shells; None where it cannot be created, since a run needs no shells."""
        try:
            return socket.create_server(("127.0.0.1", port_of(self._node)))
        except OSError:
            return None

    @property
    def _environment(self) -> Dict[str, str]:
        """The environment of the launcher and of the processes that it starts."""
        environment = {**self._pod.environment, **self._plan.get("environment", {})}
        packages = self._plan.get("packages", "")
        if packages:
            # The packages' folders come before the image's own.
            for name, folder in (("PATH", os.path.join(packages, "bin")), ("PYTHONPATH", packages)):
                environment[name] = os.pathsep.join(filter(None, (folder, environment.get(name, ""))))
        return environment

    def _open_hub(self, port: int) -> int:
        """Return the descriptor of a socket that listens on this port. Raises OSError."""
        family = socket.AF_INET6 if ":" in self._pod.address else socket.AF_INET
        # All launchers of a run may connect at once.
        return socket.create_server((self._pod.address, port), family=family, backlog=128).detach()

    # Events

    def _handle_own_event(self, source: Any) -> None:
        if isinstance(source, LogMux):
            source.flush()
        elif isinstance(source, NameLookup):
            self._read_hub_address(source)
        else:
            # Signals: a child has ended, or the run is asked to end. A request from inside the pod does not count.
            signals = self._signals.read()
            for process_exit in reap():
                self._tree.note_exit(process_exit)
            if any(
                received_signal.number in STOP_SIGNALS and received_signal.is_from_outside
                for received_signal in signals
            ):
                self._limits.kill_by(time.monotonic() + float(self._plan["grace_seconds"]))
                self._end(Verdict(kind="stopped", code="stopped", message="The run was stopped on request."))

    def _read_hub_address(self, lookup: NameLookup) -> None:
        """Start the launcher with the hub's address, or send it the new address if it runs already.

        The lookup goes on until the nodes have met, because a name server may first answer with the address of an
        earlier pod of the same name.
        """
        try:
            address = lookup.read()
        except OSError as error:
            self._stop_lookup()
            if not self._tree.has_launcher:
                message = "Node {} could not be started: {}.".format(self._node, error)
                self._fail(Verdict(kind="platform_error", code="node_not_started", message=message))
            return
        if address is None:
            return
        if self._tree.has_launcher:
            self._send({"type": "hub_address", "address": address})
        else:
            self._start_or_fail(address)

    def _check(self, now: float) -> None:
        super()._check(now)
        if self._record.phase == "stopping":
            self._read_stop_request()

    def _read_stop_request(self) -> None:
        """Handle a request in the run's folder to end sooner.

        The kubelet cannot pass on such a request, because it sends SIGTERM only once.
        """
        try:
            descriptor = os.open(self._folder / "nodes" / STOP_FILE, _UNTRUSTED_FILE_FLAGS)
        except OSError:
            return  # there is no request
        try:
            request = os.read(descriptor, MAX_RECORD_BYTES)
        except OSError:
            return  # customer code may have put a folder in its place
        finally:
            os.close(descriptor)
        if request == self._stop_request:
            return  # handled already: a request counts from when it was first read
        self._stop_request = request
        grace_seconds = read_stop(request, self._pod.record_key, run_name=self._plan["run"])
        if grace_seconds is not None:
            self._limits.kill_by(time.monotonic() + grace_seconds)

    def _stop_lookup(self) -> None:
        if self._hub_lookup is not None:
            self._selector.unregister(self._hub_lookup)
            self._hub_lookup.close()
            self._hub_lookup = None

    def _note_running(self, message: Message) -> None:
        self._stop_lookup()
        if not self._record.has_started:
            self._deadline.start()  # not earlier, since forking the launcher is unsafe in a process with threads
        super()._note_running(message)

    def _handle_timers(self) -> None:
        # The deadline thread acts if this thread then blocks.
        self._deadline.kill_at = self._limits.kill_at
        super()._handle_timers()

    # Ending

    def _kill(self) -> None:
        self._deadline.kill_at = None
        self._deadline.exit_at = time.monotonic() + _FINISH_SECONDS
        super()._kill()
        self._ended_before_start = not self._tree.has_launcher

    def _finish(self) -> int:
        """After the launcher's end, end all processes, read the rest of the pipes, and write the last record."""
        self._deadline.exit_at = time.monotonic() + _FINISH_SECONDS
        self._stop_lookup()
        self._tree.end_all()
        finished_at = time.time()
        self._add_final_data()
        self._exit_code = self._write_last_record(finished_at)
        self._output.log_mux.finish(_FLUSH_SECONDS)
        self._record.finish(_RECORD_TRIES)
        return self._exit_code

    def _explain_exit(self, launcher_exit: Exit) -> None:
        self._record.add_cause(self._limits.explain_exit(launcher_exit))
        self._record.add_detail("\n".join(self._output.launcher_lines))

    def _check_after_end(self) -> None:
        self._limits.check_after_end()

    def _write_last_record(self, finished_at: float) -> int:
        """Write the last record to the termination log; return the exit code of this process."""
        exit_code = None if self._tree.exit is None else self._tree.exit.exit_code
        self._record.data.update(phase="ended", finished_at=finished_at, exit_code=exit_code)
        # If this fails, the backend reads the record in the run's folder, which `Record.finish` writes.
        with contextlib.suppress(OSError):
            descriptor = open_file(Path(self._pod.termination_path), os.O_TRUNC)
            try:
                os.write(descriptor, sign_record(self._record.data, self._pod.record_key, MAX_RECORD_BYTES))
            finally:
                os.close(descriptor)
        return 0 if exit_code == 0 and not self._record.causes else 1

    def _exit_stalled(self) -> None:
        """On the deadline thread, if a write blocks the main one: write the last record and end this process."""
        if self._exit_code is None:
            if self._tree.exit is None and not self._record.causes:
                self._record.add_cause(self._limits.time_limit_verdict())
            self._record.add_detail("The storage of the run did not respond.")
            self._exit_code = self._write_last_record(time.time())
        os._exit(self._exit_code)
