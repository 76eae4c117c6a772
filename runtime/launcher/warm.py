"""Ranks that are there already: the launcher's side of the warm start (`zygote` is the other).

The one rule: a rank that is not ready at once is started cold. Over a socket of whole messages, which all waiting ranks
read, each takes one message, says its pid, and from then on is a rank like any other.
"""

from __future__ import annotations

import os
import select
import sys

from .bare import CMSG_SPACE, SCM_RIGHTS, SOL_SOCKET
from .plain import dumps, loads

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    import socket
    from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

MOST_BYTES = 1 << 17
READY_SECONDS = 1.0
"""From the launcher's start on: a rank that was forked is ready sooner than an interpreter starts."""
TAKEN_SECONDS = 2.0
_INT = 4
_MOST_DESCRIPTORS = 4
_SETTLED = "OMP|MKL|KMP|GOMP|OPENBLAS|NUMEXPR|TORCH|PYTORCH|TF|XLA|LD"
_EARLY = (
    r"environ(?:\[|\.setdefault\(|\.update\()\s{0,99}\{?\s{0,99}['\"](?:" + _SETTLED + ")_"
    # A name that is not written out may be any.
    r"|environ\[(?!['\"])[^]]*\]\s*=(?!=)|environ\.(?:setdefault|update)\(\s*\{?\s*(?!['\"{}\s])"
)


class Warm:
    """The waiting ranks of this node. `channel` is the supervisor's gift; None where there are none."""

    def __init__(self, channel: Optional[socket.socket]) -> None:
        self._channel = channel
        self._ready = 0

    def join(self) -> None:
        """Say that the sandbox is complete: the ranks may come in."""
        if self._channel is None:
            return
        try:
            self._channel.send(b"join")
        except OSError:
            self.close()

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: str,
        descriptors: Sequence[int],
        delay_seconds: float,
        import_folders: Sequence[str],
    ) -> Optional[int]:
        """Make one of them run the script; its pid, or None where it must be started cold.

        `arguments` are the script's, its path first; `descriptors` its output, the pipe for its notes, and perhaps the
        file of its steps. It begins when rank 0 serves its store, `delay_seconds` later at the latest.
        """
        if self._channel is None or self._wait("ready", READY_SECONDS) is None:
            self.close()
            return None
        told = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": folder,
            "head_start_seconds": delay_seconds,
            "import_folders": list(import_folders),
        }
        try:
            send(self._channel, told, descriptors)
        except OSError:
            self.close()
            return None
        answer = self._wait("taken", TAKEN_SECONDS)
        if answer is None:
            self.close()
            return None
        return int(answer["pid"])

    def close(self) -> None:
        """Nobody else is needed: whoever still waits goes."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _wait(self, kind: str, seconds: float) -> Optional[Dict[str, Any]]:
        if kind == "ready" and self._ready:
            self._ready -= 1
            return {}
        channel = self._channel
        while channel is not None and select.select([channel], [], [], seconds)[0]:
            try:
                data = channel.recv(MOST_BYTES)
            except OSError:
                return None
            if not data:
                return None
            message = loads(data)
            if message["type"] == kind:
                return dict(message)
            if message["type"] == "no":
                return None
            self._ready += 1
        return None


def unfit(sources: Sequence[str]) -> bool:
    """Whether a script settles, before it imports a framework, what the framework reads as it is loaded."""
    suspects = [source for source in sources if "environ" in source]
    if not suspects:
        return False
    # Imported here for speed alone: few scripts have that word.
    import re  # noqa: PLC0415

    return any(re.search(_EARLY, source) for source in suspects)


def import_folders(sources: Sequence[str], folder: str, workspace: str) -> List[str]:
    """Where the script's imports may find modules of its own before the image's."""
    found = {folder, workspace}
    if any("sys.path" in source for source in sources):
        for place in (folder, workspace):
            try:
                found.update(entry.path for entry in os.scandir(place) if entry.is_dir())
            except OSError:
                continue
    return sorted(found)


def send(channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """One message with descriptors. Raises OSError."""
    given = b"".join(descriptor.to_bytes(_INT, sys.byteorder) for descriptor in descriptors)
    ancillary = [(SOL_SOCKET, SCM_RIGHTS, given)]
    channel.sendmsg([dumps(message).encode()], ancillary)


def receive(channel: socket.socket, wanted: Optional[int]) -> Tuple[Dict[str, Any], List[int]]:
    """One message and its descriptors; nothing at the end. Raises OSError, ValueError for anything else."""
    data, ancillary, _flags, _address = channel.recvmsg(MOST_BYTES, CMSG_SPACE(_MOST_DESCRIPTORS * _INT))
    descriptors = []
    for level, kind, content in ancillary:
        if level == SOL_SOCKET and kind == SCM_RIGHTS:
            starts = range(0, len(content) - _INT + 1, _INT)
            descriptors += [int.from_bytes(content[at : at + _INT], sys.byteorder) for at in starts]
    if wanted is not None and len(descriptors) != wanted:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ValueError("descriptors are missing")
    return (loads(data) if data else {}), descriptors
