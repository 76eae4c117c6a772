"""Connect stdin and stdout with the socket of a node's shells. Slurm runs this program on the node, as a job step.

`runtime.backends.slurm.shells` starts it with `srun`. It runs as the console's user, outside the sandbox, so it only
copies bytes and does not interpret them. Needs only the standard library and modules of `runtime` that need no more.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

from runtime.launcher.shell import READY

_CHUNK_BYTES = 32768
"""How many bytes one read takes: far more than people type, and enough for a screen of output."""


def main(path: Path) -> None:
    """Relay one connection until either side ends. Raises OSError if nothing listens at `path`."""
    with socket.socket(socket.AF_UNIX) as connection:
        folder_fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        # By this short path, since the address of a Unix socket has at most 107 bytes.
        connection.connect(f"/proc/self/fd/{folder_fd}/{path.name}")
        _write_all(READY)  # the console waits for this before it uses the connection
        threading.Thread(target=_copy_input, args=(connection,), daemon=True).start()
        while data := connection.recv(_CHUNK_BYTES):
            _write_all(data)


def _copy_input(connection: socket.socket) -> None:
    """Copy stdin to the connection. At its end, close both directions, which ends `main` too."""
    try:
        while data := os.read(0, _CHUNK_BYTES):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the shell has ended, which `main` finds by itself
        return


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def start() -> None:
    """Run `main` with the command line's argument and end this process."""
    try:
        main(Path(sys.argv[1]))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        os._exit(1)
    os._exit(0)  # without waiting for the thread, which may still read stdin
