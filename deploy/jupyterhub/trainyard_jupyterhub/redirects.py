"""Sends a browser from the address of a server in the hub to the notebook's own address.

A notebook has a host name of its own, and the console decides who reaches it. The hub's proxy therefore gets an address
in the hub's process that redirects to the console. Nothing here is secret: the console asks everybody for a log-in.
"""

from __future__ import annotations

from typing import Any

import jupyterhub
from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler


class Redirects:
    """The targets by the prefix of a server's address, such as `/user/ada/`, and the HTTP server that knows them."""

    def __init__(self) -> None:
        self.targets: dict[str, str] = {}
        self._servers: dict[tuple[str, int], HTTPServer] = {}

    def listen(self, ip: str, port: int) -> None:
        """Listen, if nothing of ours does yet."""
        if (ip, port) not in self._servers:
            server = Application([(r"/.*", _Handler, {"redirects": self})]).listen(port, ip)
            self._servers[ip, port] = server

    def target(self, path: str) -> str:
        """Return where a path leads; empty if there is no notebook."""
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
"""Those of this process: JupyterHub is one process with all its spawners."""
