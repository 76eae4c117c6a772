"""The launcher's side of a warm start: pass scripts to ranks that a fork server (`forkserver`) has already forked.

If no forked rank is ready in time, the launcher starts the rank cold. All forked ranks read from one socket that keeps
message boundaries, so each message of the launcher reaches one of them:

    join                  from the launcher, once, before there are ranks: the sandbox is complete, so the process that
                          reads this can fork the ranks in it
    ready                 from each forked rank
    (a script)            from the launcher, with its descriptors: see `WarmRanks.start`
    accepted, refused     from the rank that received the script, with its pid or the reason

From then on the forked rank is a rank like any other.
"""

from __future__ import annotations

import array
import json
import os
import re
import select
import socket
import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ..topology import find_imports
from ..variables import READ_AT_IMPORT

MAX_MESSAGE_BYTES = 1 << 17
"""Maximum bytes of one message. If arguments and environment are longer, the forked rank cannot parse the message and
does not accept it, so the rank is started cold."""
READY_SECONDS = 1.0
"""How long to wait for a forked rank. A cold start takes about as long, so waiting longer would not be worth it."""
ACCEPT_SECONDS = 2.0
"""How long a ready rank may take to accept a script. It only lists the folders from which the script imports, but these
may be on slow storage."""
_INT_BYTES = array.array("i").itemsize
_MAX_DESCRIPTORS = 4
"""Maximum number of descriptors in one message: output, reports, step counts and a spare one."""
# A script that sets a variable which is read at an import: os.environ["OMP_..."], .setdefault("OMP_..." or
# .update({"OMP_...". Repetitions are limited, since a search for any number of spaces could take very long.
_SETS_ENVIRONMENT = re.compile(
    r"environ(?:\[|\.setdefault\(|\.update\()\s{0,99}\{?\s{0,99}['\"](?:" + "|".join(READ_AT_IMPORT) + ")_"
    # Or a variable with a computed name, which may be one of READ_AT_IMPORT.
    r"|environ\[(?!['\"])[^]]{0,999}\]\s{0,99}=(?!=)"
    r"|environ\.(?:setdefault|update)\(\s{0,99}\{?\s{0,99}(?!['\"{}\s])"
)
# A source with one of these words may import modules that none of its import statements names.
_DYNAMIC_IMPORTS = ("importlib", "__import__", "runpy", "sys.path")


class WarmRanks:
    """The forked ranks of this node. `channel` is the socket from which they read; None if there are no such ranks."""

    def __init__(self, channel: Optional[socket.socket]) -> None:
        self._channel = channel
        self._unused_ready_messages = 0  # `ready` messages that arrived while `_wait` waited for `accepted`

    def enter_sandbox(self) -> None:
        """Let the ranks enter the sandbox, which is complete once this launcher runs in it."""
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
        """Have one forked rank run the script and return its pid; None if the rank must be started cold.

        `arguments` are the script's path and its arguments. `folder` is its working directory. `descriptors` are the
        rank's output, the pipe for its reports, and perhaps its step counts. `import_folders`: see the function of that
        name. The rank begins once rank 0 serves its store, or after `delay_seconds`. After the first None the socket is
        closed, so that all further ranks of this node start cold without waiting.
        """
        if self._channel is None or self._wait("ready", READY_SECONDS) is None:
            self.close()
            return None
        message = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": folder,
            "head_start_seconds": delay_seconds,
            "import_folders": list(import_folders),
        }
        try:
            send(self._channel, message, descriptors)
        except OSError:
            self.close()
            return None
        answer = self._wait("accepted", ACCEPT_SECONDS)
        if answer is None:
            self.close()  # a rank that accepts only now cannot answer any more, and ends
            return None
        return int(answer["pid"])

    def close(self) -> None:
        """Close the socket. Forked ranks that have no script then end."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _wait(self, kind: str, seconds: float) -> Optional[Dict[str, Any]]:
        """Return the next message of this kind; None if it is late, if the rank refuses, or if no rank is left."""
        if kind == "ready" and self._unused_ready_messages:
            self._unused_ready_messages -= 1
            return {}
        channel = self._channel
        while channel is not None and select.select([channel], [], [], seconds)[0]:
            try:
                data = channel.recv(MAX_MESSAGE_BYTES)
            except OSError:
                return None
            if not data:
                return None
            message = json.loads(data)
            if message["type"] == kind:
                return dict(message)
            if message["type"] == "refused":
                return None
            self._unused_ready_messages += 1  # another rank became ready meanwhile
        return None


def is_warm_start_useful(sources: Sequence[str], folder: str) -> bool:
    """Whether to start the script warm. `sources` are those of the script and of the modules beside it, in `folder`."""
    return not _sets_framework_environment(sources) and not _imports_only_stdlib(sources, folder)


def _sets_framework_environment(sources: Sequence[str]) -> bool:
    """Whether the script sets variables that a framework reads while it is imported.

    In a forked rank, the framework has been imported before.
    """
    return any("environ" in source and _SETS_ENVIRONMENT.search(source) for source in sources)


def _imports_only_stdlib(sources: Sequence[str], folder: str) -> bool:
    """Whether the script imports no framework. Then a cold start is faster: a warm rank unloads a framework on exit."""
    stdlib = getattr(sys, "stdlib_module_names", None)  # Python 3.10 and later
    if stdlib is None or any(text in source for source in sources for text in _DYNAMIC_IMPORTS):
        return False
    imported = {name for source in sources for name in find_imports(source)}
    return all(name in stdlib or os.path.isfile(os.path.join(folder, name + ".py")) for name in imported)


def import_folders(sources: Sequence[str], folder: str, workspace: str) -> List[str]:
    """Return the folders where the script's imports may find modules of its own before those of the image."""
    folders = {folder, workspace}
    # A script that changes `sys.path` is assumed to add subfolders of these two.
    if any("sys.path" in source for source in sources):
        for parent in (folder, workspace):
            try:
                folders.update(entry.path for entry in os.scandir(parent) if entry.is_dir())
            except OSError:
                continue
    return sorted(folders)


def python_path(environment: Mapping[str, str]) -> List[str]:
    """Return the folders that PYTHONPATH names."""
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def send(channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Send one message with descriptors. Raises OSError."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    channel.sendmsg([json.dumps(message).encode()], ancillary)


def receive(channel: socket.socket, descriptor_count: Optional[int]) -> Tuple[Dict[str, Any], List[int]]:
    """Receive one message and its descriptors; ({}, []) if the other end is closed.

    Raises OSError. Raises ValueError if the message is not JSON, or does not have `descriptor_count` descriptors (None:
    any number is accepted).
    """
    space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _INT_BYTES)
    data, ancillary, _flags, _address = channel.recvmsg(MAX_MESSAGE_BYTES, space)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % _INT_BYTES])
    if descriptor_count is not None and len(descriptors) != descriptor_count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ValueError("a message came without its descriptors")
    return (json.loads(data) if data else {}), list(descriptors)
