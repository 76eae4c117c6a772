"""Redirect a browser from a server's address in the hub to the notebook's own address.

JupyterHub's proxy expects a server behind each user's address. A notebook has a host name of its own instead, and the
console decides who reaches it. So the proxy gets the address of an HTTP server in the hub's process, which redirects to
the notebook. The redirects are no secret: the console asks everybody for a log-in.
"""

from __future__ import annotations

from typing import Any

import jupyterhub
from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler


class Redirects:
    """Serves redirects. `targets` has notebooks' addresses, by the prefix of a server's path, such as `/user/ada/`."""

    def __init__(self) -> None:
        self.targets: dict[str, str] = {}
        self._servers: dict[tuple[str, int], HTTPServer] = {}

    def listen(self, ip: str, port: int) -> None:
        """Listen on this address, unless this object already does."""
        if (ip, port) not in self._servers:
            server = Application([(r"/.*", _Handler, {"redirects": self})]).listen(port, ip)
            self._servers[ip, port] = server

    def target(self, path: str) -> str:
        """Return the notebook's address for a path in the hub; empty if there is no notebook."""
        matching = [prefix for prefix in self.targets if path.startswith(prefix)]
        return self.targets[max(matching, key=len)] if matching else ""


class _Handler(RequestHandler):
    def initialize(self, redirects: Redirects) -> None:
        self._redirects = redirects

    def set_default_headers(self) -> None:
        self.set_header("X-JupyterHub-Version", jupyterhub.__version__)  # the hub asks each server for its version
        self.set_header("Cache-Control", "no-store")

    def get(self, *_path: Any) -> None:
        target = self._redirects.target(self.request.path)
        if target:
            self.redirect(target, status=302)
        else:
            self.set_status(404)
            self.finish("This notebook has ended. Start it again from the hub.")


REDIRECTS = Redirects()
"""The redirects of this process. JupyterHub runs all spawners in one process."""
