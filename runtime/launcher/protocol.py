"""The launcher's protocol: JSON lines over a socket, to its supervisor and to the launchers of the other nodes.

Messages describe the run and never decide about money: the supervisor measures times and enforces limits itself.
Customer code has the same user, so messages can be trusted only because that code cannot reach the sockets. Ranks do
not inherit them, and `make_undumpable` hides `/proc/<launcher>/fd`.

Every line is one JSON object of at most 1 MiB with a `type`. `rank` is always a rank's global rank at the run's
submission (`worker_group.Rank.rank_id`), so that `rank-<rank>.log` stays one process's log. In a later round of an
elastic run, the code may see another RANK. Times (`at`) are Unix seconds. Readers skip unknown types and fields.

Launcher to supervisor:

    heartbeat                                 at least every second
    starting                                  the first rank is about to start
    running  pids {pid: rank}, round          ranks have started, or started again in a new round; the first round is 0.
                                              With MPI also once the first rank of any node has started
    rank_ended  rank, exit_code, signal,      a rank's process has ended. `aborted_late`: it aborted after its script
                aborted_late, round           had returned, and counts as successful
    cause    cause {kind, code, at, node, rank?, exit_code?, signal?, message?, data?, echo?, heard?}; see `new_cause`.
                                              For a rank that raised an exception, `data` has exception, message, file,
                                              line and function. `echo`: the failure may be the effect of a lost peer.
                                              `heard`: reported by another node.
    members  nodes [number], round, at        from node 0 only: the nodes that take part, by their numbers at submission
    sample   (fields: `telemetry.sampling`)   resource usage of this node
    progress at                               the last sign of progress on this node; at most once a second
    stacks   rank, text                       a rank's stacks when the run was found hung
    ended                                     last message of a node that ended by itself; also the answer to `abort`

Supervisor to launcher, after the launch plan (`topology.LaunchPlan`):

    end                                       send SIGTERM to every rank; later failures are no causes
    abort    cause                            end the whole run at once: this node exceeded a limit and is about to be
                                              killed. Without this message, the other nodes would take it for lost. The
                                              answer is `ended`, once the launcher has sent `abort` to them
    output                                    ranks have written output; at most once a second
    hub_address  address                      in a pod: node 0's current address, until the nodes have met
    cpu_use  is_working, seconds              while the launcher reports no progress, at most once a second: whether the
                                              node uses CPU time, and how much since the last message

Launcher to launcher (node 0 is the hub; the others are connected only to it):

    challenge  nonce                          first message of the hub
    hello    node, nonce, address, proof      answer of a node, with its own address. The proof is an HMAC of these
                                              fields and the challenge's nonce with the run's token
    welcome  proof                            the hub's answer: HMAC of both nonces with the token. Without a valid
                                              proof, a node closes the connection and looks for the hub again
    heartbeat                                 at least every second
    start    round, rendezvous_port,          from the hub: start the ranks; `addresses` are those of the hellos
             addresses
    done                                      to the hub: every rank of this node has succeeded
    abort    cause?                           to all: the run has failed; end the ranks
    round    round, members, soft             from the hub: a new round of the nodes `members` begins. Hard: end the
                                              ranks, then send `ranks_ended`. Soft (Horovod): leave them running, they
                                              reconnect
    ranks_ended  round                        to the hub: no rank of the previous round runs on this node
    reconnected  round                        from the hub: the ranks of a soft round have reconnected
    restart_round  round                      to the hub: a rank ended in a soft round; begin a hard one instead
    restart_refused  round                    from the hub: there is no such round, since others have finished
    progress round, and the fields of         to the hub: how long this node has shown no sign of progress
             `telemetry.hang_detector.NodeProgress`
    inspect  round                            from the hub: report what the ranks are doing
    rank_states  states {rank: state}, round  to the hub, in answer; see `telemetry.hang_detector.RankState`
    capture_stacks  round                     from the hub: the run hangs; capture stacks for the supervisor
    stacks_captured  round                    to the hub: the stacks of this node were captured
    mpi      (fields: `mpi`)                  start an MPI daemon, or report its end; the code has started
"""

from __future__ import annotations

import ctypes
import json
import socket
import time
from typing import Any, Dict, List, Optional

Message = Dict[str, Any]

MAX_LINE_BYTES = 1 << 20
"""Maximum length of a message. The longest ones, with stacks or samples of hundreds of ranks, are shorter."""
_PR_SET_DUMPABLE = 4  # of prctl(2)
_READ_BYTES = 1 << 16
"""Maximum bytes that one call reads: more than almost every message has."""


class ConnectionLost(Exception):
    """The other end is closed."""


class Link:
    """One end of a connection that carries JSON lines. Reading and writing block as the socket's time-out says."""

    def __init__(self, connection: socket.socket, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.socket = connection
        self.max_line_bytes = max_line_bytes
        self._buffer = b""

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message. Raises ConnectionLost."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self) -> List[Message]:
        """Return the messages that have arrived. Raises ConnectionLost.

        Invalid lines are left out; an incomplete line waits for its end.
        """
        try:
            data = self.socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not data:
            raise ConnectionLost("closed")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > self.max_line_bytes:
            raise ConnectionLost("a line without an end")
        return [message for message in map(_parse, lines) if message is not None]

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def _parse(line: bytes) -> Optional[Message]:
    """Return the message in a line; None if the line is not a JSON object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: nested too deep
        return None
    return message if isinstance(message, dict) else None


def new_cause(kind: str, code: str, node: int, **fields: Any) -> Message:
    """Return a cause of the run's end. `kind` is an Outcome of `runtime.specs`, `code` a FailureCode, both as text.

    `fields` are further fields of the message; `at` defaults to now.
    """
    return {"kind": kind, "code": code, "at": time.time(), "node": node, **fields}


def make_undumpable() -> None:
    """Make this process non-dumpable: others of its user then cannot open its descriptors, memory or environment."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
