"""The plan of one node, which its supervisor receives when it starts. Needs no third-party packages."""

from __future__ import annotations

from runtime.launcher.node_limits import NodePlan
from runtime.launcher.topology import LaunchPlan


class SupervisorPlan(NodePlan, total=False):
    """The plan of one node, as JSON. Paths are those of the host.

    The fields of NodePlan are its limits. `launcher` is the launch plan, which the supervisor passes on. The `plan` in
    the launch plan has the fields of `topology.Plan`, such as nodes and addresses.
    """

    name: str
    """The run's name."""
    node: int
    nodes: int
    peers_are_here: bool
    """Whether the supervisors of the run's other nodes are processes of this machine; default true."""
    elastic: bool
    """Whether the run can continue without some of its nodes."""
    ranks: list[int]
    """The global ranks of this node."""
    cpus: float
    process_limit: int
    """Processes and threads that the node may have at once."""
    folder: str
    """The run's folder; see `runtime.backends.local.runs`."""
    change_file: str
    """The file that the supervisor writes to whenever the run's status or output changes. `Backend.changes` waits for
    these writes."""
    sandbox: list[str]
    """The beginning of the node's command line, which starts the sandbox; `command` follows it."""
    command: list[str]
    """The command that starts the launcher inside the sandbox."""
    cgroups: bool
    """Whether to create a control group for the node, where the kernel allows that."""
    is_extensible: bool
    """Whether `deadline.json` in the run's folder may move the deadline; default false. True only if customer code
    cannot write there."""
    shells: bool
    """Whether people may open shells in the node, through the socket of `shell_socket.path_of`; default false."""
    fork_server: str
    """The path of the socket of the fork server that forks the ranks; "" where they start cold."""
    nonce: str
    """A random string that distinguishes this submission from a later one of the same name."""
    listener: int | None
    """Descriptor of the socket where node 0's launcher listens for the others; None on every other node."""
    launcher: LaunchPlan
