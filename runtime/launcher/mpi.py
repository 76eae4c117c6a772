"""Starts the ranks through the image's `mpirun`, and keeps them as much ours as any others.

mpirun starts, where each rank is to be, only a stub (`mpi_stub.py`). The stub hands its environment to the launcher of
its node and waits; the launcher starts the rank with it, as its own child, with the whole contract, log and first
cause. When the rank has ended, the stub ends in the same way, so that mpirun knows. To reach other nodes, mpirun needs
no ssh: what it takes for ssh is the stub again, which asks the launcher of node 0, which asks that node's launcher.

The one rule: mpirun's end is an echo. What counts is how the ranks end; only where they never came is it the cause.
Its socket lies in the sandbox's own /tmp: code of the run may reach it, and can do there what it can do anyway.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Set

from .carried import as_file
from .processes import Exit, spawn
from .ranks import Rank, Ranks
from .report import ConnectionLost, Link, Message, cause
from .topology import Plan

START_SECONDS = 60.0
OWN_END_SECONDS = 1.0
"""A rank whose stub mpirun has ended may be about to end by itself, and then says more (MPI_Abort); so long it may."""
_SPARE_CONNECTIONS = 16
"""So many more than there can be stubs may be open at once: the run's code can reach the socket too."""
_LONGEST_COMMAND = 1 << 16
"""Far more than a daemon's. One that the run's code makes up must not outgrow the launchers' own lines on its way."""
_FOLDER = "/tmp/.trainyard-mpi"  # noqa: S108 - the sandbox's own
_SAME_NODE = "self,sm,tcp"


class Mpi:
    """MPI on one node. `tell` reaches the other launchers, `ready` is called once every rank of this node runs."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        ranks: Ranks,
        order: Mapping[str, Any],
        *,
        tell: Callable[[Message], None],
        ready: Callable[[], None],
    ) -> None:
        self._selector = selector
        self._ranks = ranks
        self._python: str = order["python"]
        self._environment: Dict[str, str] = dict(order["environment"])
        self._tell = tell
        self._ready = ready
        self._node = int(order["plan"]["node"])
        self._listener: Optional[socket.socket] = None
        self._path = ""
        self._plan: Optional[Plan] = None
        self._give_up_at = 0.0
        self._mpirun = 0
        self._mpirun_exit: Optional[Exit] = None
        # Of the ranks that run: their stubs, by process. Of the daemons: who waits for them, and what they are.
        self._stubs: Dict[int, Link] = {}
        self._placed: Set[int] = set()
        self._open = 0
        self._asked = 0
        self._forsaken: Dict[int, float] = {}
        self._asking: Dict[int, Link] = {}
        self._daemons: Dict[int, int] = {}

    def open(self, plan: Plan) -> None:
        """Begin a round: wait for stubs here; on node 0 start mpirun, which sends them."""
        self._plan = plan
        self._placed = set()
        self._stubs = {}
        self._forsaken = {}
        self._asking = {}
        self._mpirun_exit = None
        self._give_up_at = time.monotonic() + START_SECONDS
        self._ranks.clear()
        if self._listener is None:
            os.makedirs(_FOLDER, mode=0o700, exist_ok=True)
            # The same on every node: each has a /tmp of its own.
            self._path = "{}/{}".format(_FOLDER, plan.run_id)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(self._path)
            self._listener.listen(128)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if not plan.node:
            program = find_mpirun(self._python, self._environment.get("PATH", ""))
            self._mpirun = self._spawn(mpirun(plan, program, self._stub("slot")))

    @property
    def starting(self) -> bool:
        """Whether ranks of this node are still to come."""
        return self._plan is not None and len(self._placed) < self._plan.workers

    def keep_time(self, now: float) -> Optional[Message]:
        """The cause, where the ranks of this node do not come; ends those that mpirun wants ended."""
        for pid in [pid for pid, since in self._forsaken.items() if now >= since + OWN_END_SECONDS]:
            del self._forsaken[pid]
            self._ranks.end_one(pid)
        if not self.starting or self._ranks.some_ended:
            return None
        if self._mpirun_exit is not None:
            how = self._mpirun_exit.signal or "code {}".format(self._mpirun_exit.exit_code)
            sentence = "mpirun ended ({}) before it had started the ranks.".format(how)
        elif now >= self._give_up_at:
            sentence = "mpirun did not start the ranks of node {} within a minute.".format(self._node)
        else:
            return None
        return cause("platform_error", "node_not_started", self._node, message=sentence)

    def heard(self, message: Message) -> bool:
        """Take what another launcher said, if it is about MPI."""
        if message.get("type") != "mpi":
            return False
        number = int(message["id"])
        if "command" in message and message.get("node") == self._node:
            try:
                pid = self._spawn(["/bin/sh", "-c", str(message["command"])])
            except OSError:  # the code has left no process for it
                self._tell({"type": "mpi", "id": number, "ended": 1})
                return True
            self._daemons[pid] = number
        elif "ended" in message and number in self._asking:
            self._answer(self._asking.pop(number), {"exit_code": message["ended"], "signal": ""})
        return True

    def ended(self, gone: Exit) -> None:
        """A process of this node ended: perhaps mpirun, or a daemon."""
        if gone.pid == self._mpirun:
            self._mpirun_exit = gone
        elif gone.pid in self._daemons:
            code = 1 if gone.exit_code is None else gone.exit_code
            self._tell({"type": "mpi", "id": self._daemons.pop(gone.pid), "ended": code})

    def rank_ended(self, rank: Rank) -> None:
        """Let the rank's stub end as the rank did."""
        stub = self._stubs.pop(rank.pid, None)
        if stub is not None and rank.exit is not None:
            exit_code = 0 if rank.aborted_late else rank.exit.exit_code
            self._answer(stub, {"exit_code": exit_code, "signal": "" if rank.aborted_late else rank.exit.signal})

    # Stubs

    def _stub(self, task: str) -> List[str]:
        return [self._python, "-I", "-S", as_file("mpi_stub.py"), self._path, task]

    def _spawn(self, arguments: List[str]) -> int:
        environment = dict(self._environment)
        if self._plan is not None:
            environment.update(parameters(self._plan, " ".join(self._stub("remote"))))
        return spawn(arguments, environment, output=sys.stderr.fileno(), new_session=True)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            connection, _address = self._listener.accept()
        except OSError:
            return
        if self._plan is None or self._open >= _SPARE_CONNECTIONS + self._plan.workers + self._plan.nodes:
            connection.close()
            return
        self._open += 1
        connection.setblocking(False)
        link = Link(connection)
        self._selector.register(link, selectors.EVENT_READ, lambda: self._listen(link))

    def _listen(self, link: Link) -> None:
        try:
            messages = link.receive()
        except ConnectionLost:
            self._lose(link)
            return
        for message in messages:
            if "host" in message:
                self._send_daemon(link, str(message["host"]), str(message.get("command")))
            elif isinstance(message.get("environment"), dict):
                self._place(link, message["environment"])

    def _place(self, link: Link, environment: Dict[str, str]) -> None:
        """Start the rank that this stub stands for."""
        plan = self._plan
        try:
            local_rank = int(environment["OMPI_COMM_WORLD_LOCAL_RANK"])
            rank = int(environment["OMPI_COMM_WORLD_RANK"])
        except (KeyError, TypeError, ValueError):
            return
        if plan is None or local_rank in self._placed or not 0 <= local_rank < plan.workers:
            return
        if plan.rank(local_rank) != rank:
            sys.stderr.write("mpirun put rank {} on node {}, process {}\n".format(rank, plan.node, local_rank))
            return
        try:
            started = self._ranks.start_one(plan, local_rank, {str(key): str(environment[key]) for key in environment})
        except OSError:  # ranks that run already have left no process for it
            self._answer(link, {"exit_code": 1, "signal": ""})
            return
        self._placed.add(local_rank)
        self._stubs[started.pid] = link
        if not self.starting:
            self._ranks.seal()
            self._ready()

    def _send_daemon(self, link: Link, host: str, command: str) -> None:
        plan = self._plan
        members = {} if plan is None else {plan.run_id + "-" + str(home): home for home in plan.homes}
        if host not in members or len(command) > _LONGEST_COMMAND:
            self._answer(link, {"exit_code": 1, "signal": ""})
            return
        # Never used again: a daemon of an earlier round may still end.
        self._asked += 1
        number = self._asked
        self._asking[number] = link
        self._tell({"type": "mpi", "id": number, "node": members[host], "command": command})

    def _answer(self, link: Link, message: Message) -> None:
        try:
            link.send(message)
        except ConnectionLost:
            return

    def _lose(self, link: Link) -> None:
        """A stub is gone; where its rank lives, mpirun has ended it, and means the rank."""
        self._selector.unregister(link)
        self._open -= 1
        self._asking = {number: other for number, other in self._asking.items() if other is not link}
        for pid, stub in list(self._stubs.items()):
            if stub is link:
                del self._stubs[pid]
                self._forsaken[pid] = time.monotonic()
        link.close()


def find_mpirun(python: str, path: str) -> str:
    """The image's mpirun: beside its interpreter, or the first one of its PATH."""
    folders = [os.path.dirname(python), *path.split(":")]
    programs = [os.path.join(folder, "mpirun") for folder in folders if folder]
    return next((program for program in programs if os.access(program, os.X_OK)), programs[0])


def mpirun(plan: Plan, program: str, stub: List[str]) -> List[str]:
    """The command line. PURE. Ranks fill the nodes one after another, as they do everywhere else."""
    hosts = ",".join("{}-{}:{}".format(plan.run_id, home, plan.workers) for home in plan.homes)
    options = ["--allow-run-as-root", "--bind-to", "none", "--map-by", "slot", "--host", hosts]
    return [program, *options, "-np", str(plan.world_size), *stub]


def parameters(plan: Plan, agent: str) -> Dict[str, str]:
    """What MPI is told besides, for Open MPI 4 (ORTE) and 5 (PRRTE). PURE.

    Daemons stay attached, so that their end is known; none starts another.
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
        # All on one machine. Loopback itself is refused for other hosts: what else there is will do.
        values.update({"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": _SAME_NODE})
    elif plan.interface:
        values.update({"OMPI_MCA_btl_tcp_if_include": plan.interface, "PRTE_MCA_prte_if_include": plan.interface})
    return values
