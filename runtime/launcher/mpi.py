"""Start the ranks through the image's `mpirun`, as children of the launcher.

In place of each rank, mpirun starts a stub (`mpi_stub.py`). The stub sends its environment to the launcher of its node.
The launcher starts the rank as its own child, with the same environment contract, log and causes as any other rank.
When the rank ends, the stub ends in the same way.

The stub also replaces ssh. mpirun starts a daemon (`orted`, `prted`) on each other node. The stub passes the daemon's
command to node 0's launcher, which sends it to the launcher of that node.

mpirun ends because the ranks end. Its end is therefore a failure of the run only before all ranks are started. The
run's code can reach the stubs' socket, which is in the sandbox's /tmp. Through it, the code can only start processes of
its own, which it could do anyway.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
import time
from typing import Callable, Dict, List, Optional, Set

from .extract import extract_file
from .processes import Exit, spawn
from .protocol import ConnectionLost, Link, Message, new_cause
from .topology import LaunchPlan, Plan
from .worker_group import Rank, WorkerGroup

START_SECONDS = 60.0
"""How long mpirun may take to start its stubs on every node. It usually takes a few seconds."""
RANK_EXIT_SECONDS = 1.0
"""How long to wait after mpirun has ended a stub before its rank is ended. After MPI_Abort the rank ends by itself, and
its own exit code says more than a SIGTERM."""
_EXTRA_CONNECTIONS = 16
"""Connections that are accepted in addition to one per rank and node. The run's code can connect as well, and the limit
keeps it from using up the launcher's descriptors."""
_MAX_COMMAND_LENGTH = 1 << 16
"""Maximum characters of a daemon's command, which must fit into one line of `protocol`. Real commands are shorter."""
_SOCKET_FOLDER = "/tmp/.trainyard-mpi"  # noqa: S108 - the sandbox's own
"""The folder of the socket that the stubs connect to. Each node has its own /tmp."""
_SAME_MACHINE_TRANSPORTS = "self,sm,tcp"
"""Open MPI's transports where all nodes are on one machine: to itself, shared memory, TCP."""


class Mpi:
    """MPI on one node. `send` sends to the other launchers.

    `on_code_started` is called once the first rank of any node runs, and `on_all_started` once every rank of this node
    does.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        worker_group: WorkerGroup,
        launch_plan: LaunchPlan,
        *,
        send: Callable[[Message], None],
        on_code_started: Callable[[], None],
        on_all_started: Callable[[], None],
    ) -> None:
        self._selector = selector
        self._worker_group = worker_group
        self._python: str = launch_plan["python"]
        self._environment: Dict[str, str] = dict(launch_plan["environment"])
        self._send = send
        self._on_code_started = on_code_started
        self._on_all_started = on_all_started
        self._node = int(launch_plan["plan"]["node"])  # at submission; `Plan.node` is its number in the round
        self._listener: Optional[socket.socket] = None
        self._socket_path = ""
        self._plan: Optional[Plan] = None  # this round's; None before round 0
        self._give_up_at = 0.0  # until when all ranks of this node must have started (monotonic)
        self._mpirun_pid = 0  # on node 0
        self._mpirun_exit: Optional[Exit] = None  # on node 0, once mpirun has ended in this round
        self._stubs: Dict[int, Link] = {}  # the connection of each rank's stub, by the rank's pid
        self._started_local_ranks: Set[int] = set()  # in this round
        self._code_has_started = False  # on any node, in any round
        self._start_was_refused = False  # a rank could not be started, although others of this node run
        self._open_connections = 0
        self._last_daemon_id = 0
        # When mpirun ended a stub whose rank still runs (monotonic), by the rank's pid.
        self._ended_stubs: Dict[int, float] = {}
        # On node 0: the stub that waits for a daemon on another node, by the daemon's id.
        self._daemon_waiters: Dict[int, Link] = {}
        self._daemons: Dict[int, int] = {}  # the daemons that run on this node: {pid: id}

    def begin_round(self, plan: Plan) -> None:
        """Begin a round: wait for stubs, and on node 0 start mpirun, which starts them."""
        self._plan = plan
        self._started_local_ranks = set()
        self._start_was_refused = False
        self._stubs = {}
        self._ended_stubs = {}
        self._daemon_waiters = {}
        self._mpirun_exit = None
        self._give_up_at = time.monotonic() + START_SECONDS
        self._worker_group.clear()  # `start_rank`, which is called for each stub, only adds ranks
        if self._listener is None:
            os.makedirs(_SOCKET_FOLDER, mode=0o700, exist_ok=True)
            # mpirun runs one command line on all nodes, so the path is the same everywhere.
            self._socket_path = "{}/{}".format(_SOCKET_FOLDER, plan.run_id)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(self._socket_path)
            self._listener.listen(128)  # all stubs of a node connect at once
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if not plan.node:
            path = find_mpirun(self._python, self._environment.get("PATH", ""))
            self._mpirun_pid = self._spawn(mpirun_command(plan, path, self._stub_command("slot")))

    @property
    def is_starting(self) -> bool:
        """Whether this node still waits for its ranks."""
        return self._plan is not None and len(self._started_local_ranks) < self._plan.workers

    def handle_timers(self, now: float) -> Optional[Message]:
        """End ranks whose stubs mpirun has ended; return a cause if this node's ranks cannot all start, else None."""
        for pid in [pid for pid, since in self._ended_stubs.items() if now >= since + RANK_EXIT_SECONDS]:
            del self._ended_stubs[pid]
            self._worker_group.terminate_rank(pid)
        # If a rank has ended already, its failure is the cause, and mpirun only follows. The time limit still holds,
        # because the rank may have succeeded.
        if not self.is_starting or (self._worker_group.has_ended_ranks and now < self._give_up_at):
            return None
        if self._start_was_refused:
            text = "Node {} was refused another process while its ranks started.".format(self._node)
            return new_cause(kind="code_failed", code="too_many_processes", node=self._node, message=text)
        if self._mpirun_exit is not None:
            exit_text = self._mpirun_exit.signal or "code {}".format(self._mpirun_exit.exit_code)
            text = "mpirun ended ({}) before it had started the ranks.".format(exit_text)
        elif now >= self._give_up_at:
            text = "mpirun did not start the ranks of node {} within a minute.".format(self._node)
        else:
            return None
        if self._code_has_started:
            # The code can stop mpirun, which has worked for the rank that runs it.
            return new_cause(kind="code_failed", code="ranks_not_started", node=self._node, message=text)
        # By `starter`, `supervision.outcome` knows that code of another node may have stopped mpirun.
        return new_cause(
            kind="platform_error",
            code="node_not_started",
            node=self._node,
            message=text,
            data={"node": self._node, "starter": "mpirun"},
        )

    def handle_message(self, message: Message) -> bool:
        """Handle another launcher's message; return whether it was about MPI.

        `code_started` is sent once the first rank of a node runs, and node 0 passes it on to the others. Node 0 sends
        `id`, `node` and `command` to start a daemon. The node answers with `id` and `ended`, the daemon's exit code.
        """
        if message.get("type") != "mpi":
            return False
        if "code_started" in message:
            self._note_code_started()
            return True
        daemon_id = int(message["id"])
        if "command" in message and message.get("node") == self._node:
            try:
                pid = self._spawn(["/bin/sh", "-c", str(message["command"])])
            except OSError:  # the run's code has used up the process limit
                self._send({"type": "mpi", "id": daemon_id, "ended": 1})
                return True
            self._daemons[pid] = daemon_id
        elif "ended" in message and daemon_id in self._daemon_waiters:
            self._answer(self._daemon_waiters.pop(daemon_id), {"exit_code": message["ended"], "signal": ""})
        return True

    def note_exit(self, process_exit: Exit) -> None:
        """Note that a process of this node ended, perhaps mpirun or a daemon."""
        if process_exit.pid == self._mpirun_pid:
            self._mpirun_exit = process_exit
        elif process_exit.pid in self._daemons:
            exit_code = 1 if process_exit.exit_code is None else process_exit.exit_code  # None: ended by a signal
            self._send({"type": "mpi", "id": self._daemons.pop(process_exit.pid), "ended": exit_code})

    def end_stub(self, rank: Rank) -> None:
        """Make the rank's stub end as the rank did.

        A rank that aborted after its script had returned (`Rank.aborted_late`) counts as successful.
        """
        stub = self._stubs.pop(rank.pid, None)
        if stub is not None and rank.exit is not None:
            exit_code = 0 if rank.aborted_late else rank.exit.exit_code
            self._answer(stub, {"exit_code": exit_code, "signal": "" if rank.aborted_late else rank.exit.signal})

    # Stubs

    def _stub_command(self, task: str) -> List[str]:
        """Return the stub's command line; `task` is `slot` for a rank, `remote` for a daemon on another node."""
        return [self._python, "-I", "-S", extract_file("mpi_stub.py"), self._socket_path, task]

    def _spawn(self, arguments: List[str]) -> int:
        """Start mpirun or a daemon of it, which prints to the launcher's log; return the pid. Raises OSError."""
        environment = dict(self._environment)
        if self._plan is not None:
            environment.update(mpirun_environment(self._plan, " ".join(self._stub_command("remote"))))
        return spawn(arguments, environment, output_fd=sys.stderr.fileno(), new_session=True)

    def _accept(self) -> None:
        """Accept the connection of a stub, unless there are too many."""
        if self._listener is None:
            return
        try:
            connection, _address = self._listener.accept()
        except OSError:
            return  # the stub has ended already
        if self._plan is None or self._open_connections >= _EXTRA_CONNECTIONS + self._plan.workers + self._plan.nodes:
            connection.close()
            return
        self._open_connections += 1
        connection.setblocking(False)
        link = Link(connection)
        self._selector.register(link, selectors.EVENT_READ, lambda: self._read_stub(link))

    def _read_stub(self, link: Link) -> None:
        """Read a request to start a rank, or a daemon on another node."""
        try:
            messages = link.receive()
        except ConnectionLost:
            self._remove_stub(link)
            return
        for message in messages:
            if "host" in message:
                self._request_daemon(link, str(message["host"]), str(message.get("command")))
            elif isinstance(message.get("environment"), dict):
                self._start_rank(link, message["environment"])

    def _start_rank(self, link: Link, environment: Dict[str, str]) -> None:
        """Start the rank that this stub stands for.

        Invalid requests are ignored: the run's own code may have sent them.
        """
        plan = self._plan
        try:
            local_rank = int(environment["OMPI_COMM_WORLD_LOCAL_RANK"])
            rank = int(environment["OMPI_COMM_WORLD_RANK"])
        except (KeyError, TypeError, ValueError):
            return
        if plan is None or local_rank in self._started_local_ranks or not 0 <= local_rank < plan.workers:
            return
        # Outputs and logs were opened for the ranks of `plan`, so another placement cannot be used. The stub
        # gets no answer, and `handle_timers` reports that the node was not started.
        if plan.rank(local_rank) != rank:
            sys.stderr.write("mpirun put rank {} on node {}, process {}\n".format(rank, plan.node, local_rank))
            return
        try:
            variables = {str(name): str(value) for name, value in environment.items()}
            started_rank = self._worker_group.start_rank(plan, local_rank, variables)
        except OSError as error:
            # If ranks of this node run already, their code has used up the process limit: not the platform's fault.
            self._start_was_refused = error.errno == errno.EAGAIN and bool(self._started_local_ranks)
            self._answer(link, {"exit_code": 1, "signal": ""})
            return
        self._started_local_ranks.add(local_rank)
        self._stubs[started_rank.pid] = link
        self._note_code_started()
        if not self.is_starting:
            self._worker_group.finish_starting()
            self._on_all_started()

    def _note_code_started(self) -> None:
        """Note that a rank of any node runs, and tell the other nodes. The time of all of them is paid from now on."""
        if not self._code_has_started:
            self._code_has_started = True
            self._send({"type": "mpi", "code_started": True})
            self._on_code_started()

    def _request_daemon(self, link: Link, host: str, command: str) -> None:
        """On node 0, have the launcher of `host` run the daemon's command."""
        plan = self._plan
        # The nodes of this round, by their numbers at submission.
        members = {} if plan is None else {plan.host(node): node for node in plan.original_nodes}
        if host not in members or len(command) > _MAX_COMMAND_LENGTH:
            self._answer(link, {"exit_code": 1, "signal": ""})
            return
        # Ids are never reused, because a daemon of an earlier round may still report its end.
        self._last_daemon_id += 1
        daemon_id = self._last_daemon_id
        self._daemon_waiters[daemon_id] = link
        self._send({"type": "mpi", "id": daemon_id, "node": members[host], "command": command})

    def _answer(self, link: Link, message: Message) -> None:
        try:
            link.send(message)
        except ConnectionLost:
            return  # the stub has ended already; `_read_stub` handles it

    def _remove_stub(self, link: Link) -> None:
        """Forget a stub that has ended. If its rank still runs, mpirun ended the stub in order to end the rank."""
        self._selector.unregister(link)
        self._open_connections -= 1
        self._daemon_waiters = {daemon_id: stub for daemon_id, stub in self._daemon_waiters.items() if stub is not link}
        for pid, stub in list(self._stubs.items()):
            if stub is link:
                del self._stubs[pid]
                self._ended_stubs[pid] = time.monotonic()
        link.close()


def find_mpirun(python: str, search_path: str) -> str:
    """Return the path of mpirun: beside the image's interpreter, else the first in `search_path`.

    If there is none, starting the returned path fails, and the error names it.
    """
    folders = [os.path.dirname(python), *search_path.split(":")]
    candidates = [os.path.join(folder, "mpirun") for folder in folders if folder]
    return next((path for path in candidates if os.access(path, os.X_OK)), candidates[0])


def mpirun_command(plan: Plan, path: str, stub: List[str]) -> List[str]:
    """Return mpirun's command line. Pure.

    `path` is mpirun's, and `stub` the command line of each rank's stub. Ranks fill the nodes one after another and are
    not bound to cores, as without MPI. The run's user may be root.
    """
    hosts = ",".join("{}:{}".format(plan.host(node), plan.workers) for node in plan.original_nodes)
    options = ["--allow-run-as-root", "--bind-to", "none", "--map-by", "slot", "--host", hosts]
    return [path, *options, "-np", str(plan.world_size), *stub]


def mpirun_environment(plan: Plan, agent: str) -> Dict[str, str]:
    """Return the environment of mpirun, for Open MPI 4 (ORTE) and 5 (PRRTE). Pure.

    `agent` is the command that replaces ssh. Other variables make node 0 start all daemons and allow more ranks than
    cores on a node. Daemons stay attached, so that launchers notice their end.
    """
    values = {
        "OMPI_MCA_plm_rsh_agent": agent,
        "PRTE_MCA_plm_ssh_agent": agent,
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        "OMPI_MCA_orte_leave_session_attached": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    if plan.interface == "lo":
        # All nodes are on one machine. Open MPI refuses loopback between hosts, so the interface is not set. `ob1` is
        # the part of Open MPI that uses these transports.
        values.update({"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": _SAME_MACHINE_TRANSPORTS})
    elif plan.interface:
        values.update({"OMPI_MCA_btl_tcp_if_include": plan.interface, "PRTE_MCA_prte_if_include": plan.interface})
    return values
