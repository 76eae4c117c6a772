"""The shells of one node. The launcher starts one for each connection to a socket that it inherits.

From outside the node, only the console can open a shell. The launcher of a sandbox listens on a Unix socket whose path
is outside the sandbox. The launcher of a pod listens on a port of loopback, and connections must send a token. Ranks do
not inherit the listening descriptor. A shell is a process of the node like any other, with the filter, limits and user
of the run's code. It is not a rank: its end is not a failure, its output is not a sign of progress, and it ends with
the launcher.

In a pod, customer code can connect to that port too. The launcher therefore never reads from a connection. Only the
process of `shell` does, which customer code may kill or replace.
"""

from __future__ import annotations

import socket
from selectors import EVENT_READ, BaseSelector

from .extract import extract_file
from .processes import spawn
from .worker_group import WorkerGroup


class Shells:
    """Starts shells. `listener_fd` is the listening socket, `python` the interpreter of the image.

    If `token` is not empty, connections must send it first.
    """

    def __init__(
        self, listener_fd: int, selector: BaseSelector, worker_group: WorkerGroup, *, python: str, token: str
    ) -> None:
        self._listener = socket.socket(fileno=listener_fd)
        self._listener.setblocking(False)
        self._worker_group = worker_group
        self._python = python
        self._token = token
        selector.register(self._listener, EVENT_READ, self.start_next)

    def start_next(self) -> None:
        """Start a shell for the next connection; close the connection if no shell can be started."""
        try:
            connection, _address = self._listener.accept()
        except OSError:  # the console has closed it already
            return
        environment = self._worker_group.first_environment
        with connection:
            if environment is None:  # no rank has started yet
                return
            try:
                spawn(
                    # Other processes of the run can read the token in this command line. It gives them nothing, since
                    # they can execute a shell themselves.
                    [self._python, "-I", extract_file("shell.py"), *([self._token] if self._token else [])],
                    environment,
                    output_fd=connection.fileno(),
                    folder=self._worker_group.folder,
                    new_session=True,
                )
            except OSError:  # the run's own processes leave no room for another
                return
