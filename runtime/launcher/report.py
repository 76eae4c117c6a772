"""How the launcher speaks: JSON lines over a socket, to its supervisor and to the other nodes' launchers.

The one rule: a line is a hint about the run and never about money; times and limits are the supervisor's own. The
customer's code shares our user id, so what a socket says is believed only where that code cannot reach it: ranks do
not inherit the sockets, and `shield` keeps them out of `/proc/<launcher>/fd`.

Every line is one JSON object of at most 1 MiB with a `type`. Ranks are named by their *seat*, the global rank of the
run as it was submitted (so that `rank-<rank>.log` stays one process's log); the code of a later round may see another
RANK. Times (`at`) are Unix seconds. A reader skips types and fields it does not know.

Launcher to supervisor:

    beat                                      at least once a second, while the launcher lives
    running  pids {pid: rank}, round          ranks (re)started; the round is 0 at first and rises when nodes were lost
    rank_ended  rank, exit_code, signal, aborted_late, round
    cause    cause {kind, code, at, node, rank?, exit_code?, signal?, message?, data?}; see `cause`
    members  nodes [number], round, at        node 0 only: who takes part from now on, by the numbers at submission
    sample   (fields: `sampling`)             what this node used
    progress at                               the last sign of progress on this node; at most one a second
    stacks   rank, text                       where a rank stood when the run was found hung
    ended                                     the last word of a node that came to its end

Supervisor to launcher, after the order (see `__main__`):

    end                                       SIGTERM to every rank; what ends from here on is no cause
    abort                                     end at once, everywhere: the code of this node went over a limit. The node
                                              is about to be killed, and must not pass for one that was lost. Answered
                                              by `ended` as soon as the other nodes have been told
    output                                    ranks wrote output; at most once a second
    working                                   the node uses CPU time, and the launcher has not told of any progress for
                                              some seconds; at most once a second

Launcher to launcher (node 0 is the hub, the others know only it):

    hello    token, node                      a node's first line
    beat
    start    round, rendezvous_port           from the hub: start the ranks
    done                                      to the hub: every rank of this node has succeeded
    abort                                     to all: something failed; fall
    round    round, members, soft             from the hub: a node was lost, these go on. Hard: end the ranks, then
                                              say `fallen`. Soft (Horovod): leave them, they find each other again
    fallen   round                            to the hub: no rank of the round before is left here
    settled  round                            from the hub: the ranks of a soft round have found each other
    restart  round                            to the hub: a rank ended in a soft round; make it a hard one
    pulse    quiet, silent, begun, round      to the hub: for how long this node has shown no sign; see `progress.Pulse`
    look     round                            from the hub: where do your ranks stand?
    stands   stands {rank: stand}, round      to the hub, in answer; see `progress.Stand`
    hang     round                            from the hub: the run has hung; take stacks, they are for the supervisor
    stacked  round                            to the hub: that is done
    mpi      (fields: `mpi`)                  asks to start, and tells the end of, an MPI daemon
"""

from __future__ import annotations

import time

from .bare import hide
from .plain import dumps, loads

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    import socket
    from typing import Any, Dict, List, Optional, Sequence

if TYPE_CHECKING:
    Message = Dict[str, Any]
else:
    Message = dict

LONGEST_LINE = 1 << 20
_PIECE = 1 << 16
# A peer that has lost its connection may abort by itself, and SIGTERM is what we send: neither is a first cause
# beside a rank that died by another signal.
_ECHO_SIGNALS = ("", "SIGABRT", "SIGTERM")
_ECHO_SECONDS = 1.0
# The supervisor knows why the kernel killed a rank, and says so.
_KINDS_OF_A_RANK = ("code_failed", "out_of_memory")


class ConnectionLost(Exception):
    """The other side is gone."""


class Link:
    """One end of a JSON-lines connection. Reading never blocks longer than the socket's own time-out."""

    def __init__(self, connection: socket.socket, longest_line: int = LONGEST_LINE) -> None:
        self.socket = connection
        self.longest_line = longest_line
        self._buffer = b""

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Write one message. Raises ConnectionLost."""
        try:
            self.socket.sendall(dumps(message).encode() + b"\n")
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self) -> List[Message]:
        """What has come so far, whole lines only; lines that are no JSON object are left out. Raises ConnectionLost."""
        try:
            data = self.socket.recv(_PIECE)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not data:
            raise ConnectionLost("closed")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > self.longest_line:
            raise ConnectionLost("a line without an end")
        return [message for message in map(_parse, lines) if message is not None]

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


def _parse(line: bytes) -> Optional[Message]:
    try:
        message = loads(line)
    except (ValueError, RecursionError):  # the latter is the public module's word for what is nested too deep
        return None
    return message if isinstance(message, dict) else None


def cause(kind: str, code: str, node: int, **more: Any) -> Message:
    """A reason for a run's end, as of now unless `at` is given: an Outcome's value, a FailureCode's, and whose."""
    return {"kind": kind, "code": code, "at": time.time(), "node": node, **more}


def first_cause(causes: Sequence[Message]) -> Optional[Message]:
    """Of everything that went wrong, what went wrong first; the rest are its echoes. PURE.

    A cause has `kind` and `at` (Unix seconds), and `signal` where a signal ended the rank. Clocks and reaping are a
    little apart, so a rank killed by a signal, and after it a node that was lost, outranks a rank that failed up to a
    second sooner: a peer's "connection closed" can be reaped before the death that caused it.
    """
    if not causes:
        return None
    ordered = sorted(causes, key=lambda one: float(one["at"]))
    first = ordered[0]
    if first["kind"] != "code_failed":
        return first
    near = [one for one in ordered if one["at"] - first["at"] <= _ECHO_SECONDS]
    for one in near:
        if one["kind"] in _KINDS_OF_A_RANK and (one.get("signal") or "") not in _ECHO_SIGNALS:
            return one
    return next((one for one in near if one["kind"] == "node_lost"), first)


def shield() -> None:
    """Keep other processes of the same user out of this one."""
    hide()
