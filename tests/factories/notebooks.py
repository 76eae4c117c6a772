"""Notebooks of a customer on the fake cluster, and browsers of members at a served console."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx
from django.db import connection
from websockets.asyncio.client import connect
from websockets.typing import Origin

from console.accounts.models import Membership
from jobs import notebooks
from jobs.models import Attempt
from tests.factories.accounts import logged_in
from tests.factories.jobs import Customer

FAST_CHECKS = "jupyter_server_config.py"
"""Name of a settings file of JupyterLab, for a folder in JUPYTER_CONFIG_PATH. With FAST_CHECKS_SOURCE it checks twice a
second whether it is idle, not once a minute."""
FAST_CHECKS_SOURCE = """
from tornado import ioloop

class FastCallback(ioloop.PeriodicCallback):
    def __init__(self, callback, callback_time, jitter=0):
        super().__init__(callback, min(callback_time, 500), jitter)

ioloop.PeriodicCallback = FastCallback
"""


def notebook_form(customer: Customer, **changes: Any) -> dict[str, Any]:
    """Return the body of a request for a notebook's quote."""
    chosen = {"workspace": customer.workspace.name, "image": "pytorch", "node_spec": "nano", "max_seconds": 7200}
    return chosen | changes


def sell_notebook(customer: Customer, **changes: Any) -> Attempt:
    """Buy a notebook, and start its run. No JupyterLab listens in it."""
    quote = notebooks.quote_notebook(membership=customer.membership, data=notebook_form(customer, **changes))
    return customer.run(notebooks.place_notebook(membership=customer.membership, quote=quote).job)


class Browser:
    """A browser of a member with a session of the console at `url`. It has no session of the notebook until `enter`."""

    def __init__(self, url: str, membership: Membership, job: int) -> None:
        self.session = logged_in(membership.user)
        self.http = httpx.Client(base_url=url, timeout=60)
        self.http.cookies.set("sessionid", self.session.cookies["sessionid"].value)
        self.port = urlsplit(url).port
        self.job = job
        self.cookie = ""

    @property
    def host(self) -> str:
        """Return the notebook's host name, with the port of the console."""
        return f"n{self.job}.localhost:{self.port}"

    def ticket(self) -> str:
        """Return the address with a ticket to which the console redirects; empty if it refuses."""
        answer = self.http.get(f"/notebooks/{self.job}/open/")
        return answer.headers["location"] if answer.status_code == HTTPStatus.FOUND else ""

    def enter(self, address: str = "") -> httpx.Response:
        """Open a ticket's address, and keep the cookie of the notebook's session."""
        url = urlsplit(address or self.ticket())
        answer = self.ask(f"{url.path}?{url.query}")
        self.cookie = answer.headers.get("set-cookie", "").partition(";")[0]
        return answer

    def log_out(self) -> None:
        """End the session of the console, and close this thread's database connection."""
        self.session.logout()
        connection.close()

    def ask(self, path: str = "/lab", method: str = "GET", **headers: Any) -> httpx.Response:
        """Send a request to the notebook's host with its cookie, and with the console's, as an attacker might."""
        cookies = filter(None, (f"sessionid={self.http.cookies['sessionid']}", self.cookie))
        sent = {"Host": self.host, "Cookie": "; ".join(cookies)} | headers
        return httpx.request(method, f"http://127.0.0.1:{self.port}{path}", headers=sent, timeout=60)

    def websocket(self, *, origin: str = "", path: str = "/api/kernels/1/channels") -> connect:
        """Return a connection of a websocket of the notebook's host."""
        address = f"ws://{self.host}{path}"
        headers = {"Cookie": self.cookie}
        return connect(
            address, origin=Origin(origin or f"http://{self.host}"), additional_headers=headers, host="127.0.0.1",
            port=self.port, proxy=None,
        )  # fmt: skip
