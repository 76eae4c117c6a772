"""Requests to the console's notebooks API with the access token of a JupyterHub user."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest
from tornado.web import HTTPError

TIMEOUT_SECONDS = 30
"""How long a request may take; a purchase takes less than a second."""

# The decimals of each currency's minor unit, as the console counts them. Currencies in neither set have two.
ZERO_DECIMALS = frozenset(
    ("BIF", "CLP", "DJF", "GNF", "JPY", "KMF", "KRW", "MGA", "PYG", "RWF", "VND", "VUV", "XAF", "XOF", "XPF")
)
THREE_DECIMALS = frozenset(["BHD", "JOD", "KWD", "OMR", "TND"])
SHOWN_STATUSES = {400, 402, 403, 404, 409, 429}
"""The HTTP statuses of the console that the hub passes on to its user. Any other status becomes 502."""
UNREACHABLE = "The console cannot be reached. Try again later."


class Refused(HTTPError):
    """The console refused a request, or cannot be reached. JupyterHub shows `jupyterhub_message` to the user."""

    def __init__(self, console_status: int, message: str) -> None:
        # A 401 is not passed on: it is about the user's token for the console, and the user is logged in to the hub.
        # HTTPError formats its message with %, so percent signs are doubled.
        super().__init__(console_status if console_status in SHOWN_STATUSES else 502, message.replace("%", "%%"))
        self.console_status = console_status
        self.jupyterhub_message = message


class NotebooksClient:
    """Sends requests for one user, a JupyterHub `User`. `organization` is a short name; empty: the user's default."""

    def __init__(self, *, console_url: str, user: Any, authenticator: Any, organization: str) -> None:
        self._url = f"{console_url.rstrip('/')}/api/v1/notebooks/"
        self._user, self._authenticator, self._organization = user, authenticator, organization

    async def call(
        self, method: str, path: str = "", body: dict[str, Any] | None = None, idempotency_key: str = ""
    ) -> Any:
        """Return the response's JSON. Raises Refused.

        If the token has expired, refresh it, store the new one and send the request again.
        """
        try:
            response = await self._send(method, path, body, idempotency_key)
            if response.code == 401:
                refreshed = await self._authenticator.refresh_user(self._user)
                if isinstance(refreshed, dict):  # otherwise there is no new token
                    await self._user.save_auth_state(refreshed["auth_state"])
                    response = await self._send(method, path, body, idempotency_key)
            data = json.loads(response.body)
        # HTTPClientError: time-outs and closed connections. ValueError: no JSON, so a proxy answered for the console.
        except (OSError, HTTPClientError, ValueError) as error:
            raise Refused(502, UNREACHABLE) from error
        if response.code >= 400:
            raise Refused(response.code, _error_message(data) or UNREACHABLE)
        return data

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, idempotency_key: str) -> Any:
        auth_state = await self._user.get_auth_state() or {}
        token = auth_state.get("access_token") or ""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        if self._organization:
            headers["Trainyard-Organization"] = self._organization
        if idempotency_key:
            headers["Idempotency-Key"] = idempotency_key
        request = HTTPRequest(
            self._url + path,
            method=method,
            headers=headers,
            body=None if method == "GET" else json.dumps(body or {}),
            request_timeout=TIMEOUT_SECONDS,
            follow_redirects=False,  # the token must not be sent to any other address
        )
        return await AsyncHTTPClient().fetch(request, raise_error=False)


def _error_message(data: dict[str, Any]) -> str:
    """Return the message in an error response of the console. If fields are at fault, return each one's message."""
    fields = data.get("fields") or {}
    return " ".join(f"{name}: {message}" for name, message in fields.items()) or str(data.get("message", ""))


def money(amount_minor: int, currency: str) -> str:
    """Return an amount such as `12.50 USD`."""
    decimals = 2
    if currency in ZERO_DECIMALS:
        decimals = 0
    elif currency in THREE_DECIMALS:
        decimals = 3
    return f"{Decimal(amount_minor).scaleb(-decimals):,.{decimals}f} {currency}"
