"""Run a shell on a pseudo-terminal, and connect the terminal with a socket: descriptor 1. See `shells`.

The argument, if there is one, is a token. The socket must then deliver the same token first, and gets READY in return.

The terminal's output is sent to the socket unchanged. The socket delivers frames. A frame is one byte with its kind,
the length of its content in two bytes (big-endian), and the content. The kinds are:

    i   input for the terminal
    s   the terminal's size: rows and columns, two bytes each

The shell has the environment of the node's first rank. When the socket is closed, the terminal hangs up.
"""

import fcntl
import hmac
import os
import pty
import select
import struct
import sys
import termios
import time

TYPE_CHECKING = False  # type checkers take it for True
if TYPE_CHECKING:
    from typing import List, NoReturn, Tuple

HEADER = struct.Struct(">cH")
"""The beginning of a frame: its kind, and the length of its content."""
SIZE = struct.Struct(">HH")
"""The content of a frame with the terminal's size: rows and columns."""
INPUT, RESIZE = b"i", b"s"
READY = b"\n"
"""The first byte of a connection that reaches the node through Kubernetes or Slurm: it shows the console that the
connection is complete. Everything after it comes from the shell."""
_TOKEN_SECONDS = 10.0
"""How long the token may take to arrive. The console sends it as soon as it is connected."""
_SHELLS = ("/bin/bash", "/bin/sh")
_READ_BYTES = 32768
"""Maximum bytes that one read returns. A frame has at most 65538 bytes, so input needs three reads at most."""
_CHECK_MS = 500
"""Interval of checks whether the shell has ended. The terminal's end does not show it, since a process that the shell
left behind may keep the terminal open."""


def main() -> None:
    """Connect a shell and the socket until one of them ends."""
    connection_fd = os.dup(1)  # in the process of the shell, descriptor 1 becomes the terminal
    if len(sys.argv) > 1:
        if not _receives(connection_fd, sys.argv[1].encode()):
            return
        os.write(connection_fd, READY)
    pid, terminal_fd = pty.fork()
    if not pid:
        _become_shell(connection_fd)
    for descriptor in (connection_fd, terminal_fd):
        os.set_blocking(descriptor, False)
    pump(connection_fd, terminal_fd, pid)


def _receives(connection_fd: int, token: bytes) -> bool:
    """Read as many bytes as the token has; return whether they arrive in time and are the token."""
    give_up_at = time.monotonic() + _TOKEN_SECONDS
    received = b""
    try:
        while len(received) < len(token):
            seconds = max(0.0, give_up_at - time.monotonic())
            if not select.select([connection_fd], [], [], seconds)[0]:
                return False
            data = os.read(connection_fd, len(token) - len(received))
            if not data:
                return False
            received += data
    except OSError:
        return False
    return hmac.compare_digest(received, token)


def _become_shell(output_fd: int) -> "NoReturn":
    """Execute the image's shell. If there is none, write that to `output_fd` and exit."""
    try:
        path = next((shell for shell in _SHELLS if os.access(shell, os.X_OK)), _SHELLS[-1])
        environment = {**os.environ, "TERM": "xterm-256color", "SHELL": path}
        if path.endswith("bash"):
            # Images do not know the user of a pod, whom bash would call "I have no name!".
            environment.setdefault("PS1", r"${USER:-\u}@\h:\w\$ ")
        os.execve(path, [path], environment)  # noqa: S606 - starting a shell is the purpose
    except OSError as error:
        os.write(output_fd, "This image has no shell that can be started: {}\r\n".format(error).encode())
    finally:
        os._exit(127)


def pump(connection_fd: int, terminal_fd: int, pid: int) -> None:
    """Pass bytes in both directions until the shell (`pid`) has ended, or the socket is closed.

    Each direction buffers the bytes of one read, and reads again only when these are written.
    """
    frames = Frames()
    to_terminal, to_connection = b"", b""  # the buffers, by where the bytes go
    has_ended = False  # the shell has ended
    while True:
        reads_connection, reads_terminal = not to_terminal, not to_connection
        poll = select.poll()
        poll.register(connection_fd, _poll_mask(reads_connection, to_connection))
        # poll(2) returns at once for a terminal that hung up, even with an empty mask. So register it only for use.
        if reads_terminal or (to_terminal and not has_ended):
            poll.register(terminal_fd, _poll_mask(reads_terminal, to_terminal))
        # After the shell's end, a terminal without output shows that nothing is left to send.
        ready = dict(poll.poll(0 if has_ended and reads_terminal else _CHECK_MS))
        connection_events, terminal_events = ready.get(connection_fd, 0), ready.get(terminal_fd, 0)
        if has_ended and reads_terminal and not terminal_events:
            return  # everything that the shell wrote is sent
        if to_terminal and connection_events & (select.POLLHUP | select.POLLERR):
            return  # the socket is closed, and no read shows it while input waits for the terminal
        try:
            if to_connection and connection_events & select.POLLOUT:
                to_connection = to_connection[os.write(connection_fd, to_connection) :]
            if to_terminal and terminal_events & select.POLLOUT:
                to_terminal = to_terminal[os.write(terminal_fd, to_terminal) :]
            if reads_terminal and terminal_events & (select.POLLIN | select.POLLHUP):
                to_connection = os.read(terminal_fd, _READ_BYTES)
            if reads_connection and connection_events & (select.POLLIN | select.POLLHUP):
                data = os.read(connection_fd, _READ_BYTES)
                if not data:
                    return
                to_terminal = _handle_frames(frames.add(data), terminal_fd)
        except BlockingIOError:
            continue
        except OSError:  # the terminal is closed by its last process (EIO), or the socket by the console
            return
        has_ended = has_ended or os.waitpid(pid, os.WNOHANG)[0] == pid


def _poll_mask(reads: bool, output: bytes) -> int:
    """Return the events to wait for: input if `reads`, and room to write if there is output."""
    return (select.POLLIN if reads else 0) | (select.POLLOUT if output else 0)


def _handle_frames(frames: "List[Tuple[bytes, bytes]]", terminal_fd: int) -> bytes:
    """Set the terminal's size as the frames ask; return the input in them."""
    for kind, content in frames:
        if kind == RESIZE and len(content) == SIZE.size:
            rows, columns = SIZE.unpack(content)
            fcntl.ioctl(terminal_fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return b"".join(content for kind, content in frames if kind == INPUT)


class Frames:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._data = b""

    def add(self, data: bytes) -> "List[Tuple[bytes, bytes]]":
        """Add bytes; return the frames that are complete now, as pairs of kind and content."""
        self._data += data
        frames = []
        while len(self._data) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._data)
            end = HEADER.size + length
            if len(self._data) < end:
                break
            frames.append((kind, self._data[HEADER.size : end]))
            self._data = self._data[end:]
        return frames


if __name__ == "__main__":
    main()
