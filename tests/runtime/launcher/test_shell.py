"""The program that connects a shell's terminal with the console."""

import os
import pty
import select
import socket
import tty
from contextlib import suppress
from types import SimpleNamespace

from runtime.launcher import shell
from runtime.launcher.shell import HEADER, INPUT


def test_no_busy_loop_waits_for_a_console_that_does_not_read_the_last_output(monkeypatch):
    console, connection = socket.socketpair()
    connection.setblocking(False)
    filler = 0
    with suppress(BlockingIOError):  # until nothing more can be sent
        while True:
            filler += connection.send(b"-" * 4096)
    console.sendall(HEADER.pack(INPUT, 5) + b"input")  # the shell ends without reading it
    pid, terminal = pty.fork()
    if not pid:
        tty.setraw(0)
        os.write(1, b"output")
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    received = b""
    polls = []

    class Poll:
        """Records each `poll` of the program. The console reads after the first ten."""

        def __init__(self):
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, milliseconds):
            nonlocal received
            if len(polls) >= 10:
                with suppress(BlockingIOError):
                    received += console.recv(1 << 20, socket.MSG_DONTWAIT)
            ready = self._poll.poll(milliseconds)
            polls.append((milliseconds, ready))
            return ready

    events = {name: getattr(select, name) for name in ("POLLIN", "POLLOUT", "POLLHUP", "POLLERR")}
    monkeypatch.setattr(shell, "select", SimpleNamespace(poll=Poll, **events))
    monkeypatch.setattr(shell, "_CHECK_MS", 1)
    with console, connection:
        shell.pump(connection.fileno(), terminal, pid)
        connection.close()
        while data := console.recv(1 << 20):
            received += data
    os.close(terminal)
    assert polls[1:10] == [(1, [])] * 9, "each waits for its whole time, since the shell has ended"
    assert received[filler:] == b"output"
