"""The sandbox's HTTP server: Stripe's routes under /v1, the payment page and the bank's challenge page.

It binds to loopback. The API requires this installation's sandbox key and refuses live keys. Browsers open the pages
and have no key, so the random id in a page's URL protects it.
"""

from __future__ import annotations

import hashlib
import html
import json
import secrets
from base64 import b64encode
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from billing.amounts import money
from billing.sandbox import cards, checkout
from billing.sandbox.account import Refused
from billing.sandbox.provider import Provider

MAX_BODY_BYTES = 65536
"""Largest part of a request's body that is read; requests of our client have a few hundred bytes."""
PAGES = Path(__file__).parent
"""Folder of the HTML templates."""


def _content_security_policy() -> str:
    """Return the policy of each response with a body. It allows only the pages' inline style sheet, by its hash."""
    style = (PAGES / "base.html").read_text().partition("<style>")[2].partition("</style>")[0]
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; frame-ancestors 'none'"


CONTENT_SECURITY_POLICY = _content_security_policy()


class Handler(BaseHTTPRequestHandler):
    """The handler of one connection. `serve` makes a subclass with the provider and the API key."""

    provider: Provider
    api_key: str
    protocol_version = "HTTP/1.1"
    server_version = "TrainyardSandbox"
    sys_version = ""  # the header `Server` then does not name Python's version

    def do_GET(self) -> None:  # named by http.server
        """Serve the API or a page."""
        self._answer("GET")

    def do_POST(self) -> None:  # named by http.server
        """Serve the API or a page's form."""
        self._answer("POST")

    def do_DELETE(self) -> None:  # named by http.server
        """Serve the API."""
        self._answer("DELETE")

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  # the base class's name
        """Log nothing, because requests contain card numbers."""

    def _answer(self, method: str) -> None:
        """Answer a request: under /v1/ with the API, otherwise with a page or the result of its form."""
        url = urlsplit(self.path)
        encoded = self._body() if method == "POST" else url.query
        if url.path.startswith("/v1/"):
            self._api(method, url.path, encoded)
            return
        try:
            match [method, *url.path.strip("/").split("/")]:
                case ["GET", "pay", session_id]:
                    self._show_payment(session_id)
                case ["POST", "pay", session_id]:
                    result = self.provider.submit(session_id, dict(parse_qsl(encoded)))
                    self._answer_form(result, lambda: self._show_payment(session_id, result.error))
                case ["GET", "challenge", intent_id]:
                    self._show_challenge(intent_id)
                case ["POST", "challenge", intent_id]:
                    is_agreed = dict(parse_qsl(encoded)).get("answer") == "agree"
                    result = self.provider.answer_challenge(intent_id, is_agreed=is_agreed)
                    self._answer_form(result, lambda: self._show_challenge(intent_id))
                case _:
                    self._json(HTTPStatus.NOT_FOUND, Refused("There is no such page.").answer)
        except Refused as error:
            self._json(error.status, error.answer)

    def _api(self, method: str, path: str, encoded: str) -> None:
        """Check the API key, then let the provider handle the request. `encoded` is its query or body."""
        # As bytes, because `compare_digest` refuses strings that are not ASCII.
        credentials = self.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not secrets.compare_digest(credentials, f"Bearer {self.api_key}".encode()):
            is_live = b"_live_" in credentials
            message = "The sandbox takes no live key: no real money moves here." if is_live else "Invalid API key."
            self._json(HTTPStatus.UNAUTHORIZED, Refused(message).answer)
            return
        response = self.provider.handle(method, path, encoded, self.headers.get("Idempotency-Key", ""))
        headers = {"Idempotent-Replayed": "true"} if response.is_replay else {}
        self._json(response.status, response.body, **headers)

    def _body(self) -> str:
        """Return the request's body, at most `MAX_BODY_BYTES` of it."""
        length = self.headers.get("Content-Length", "")
        size = min(int(length), MAX_BODY_BYTES) if length.isdecimal() else 0
        return self.rfile.read(size).decode(errors="replace")

    def _show_payment(self, session_id: str, error: str = "") -> None:
        """Send the page of a session that takes a payment or saves a card. Raises Refused (404)."""
        session = self.provider.session(session_id)
        amount = money(session["amount_total"], session["currency"].upper()) if session["amount_total"] else ""
        redirect_buttons = "".join(
            f'<button class="other" type="submit" name="method" value="{name}" formnovalidate>'
            f"{cards.REDIRECT_METHODS[name]}</button>"
            for name in checkout.redirect_methods(session)
        )
        values = {
            "heading": amount or "Save a card",
            "title": session["_title"] or "For automatic top-ups. Nothing is paid now.",
            "button": f"Pay {amount}" if amount else "Save the card",
            "cancel_url": session["cancel_url"] or "",
            "error": error or self.provider.last_refusal(session),
            "status": session["status"],
        }
        self._page("pay.html", values, other_methods=redirect_buttons)

    def _show_challenge(self, intent_id: str) -> None:
        """Send the page on which the bank asks the payer to confirm. Raises Refused (404)."""
        intent, session = self.provider.pending_challenge(intent_id)
        amount = money(intent["amount"], intent["currency"].upper()) if "amount" in intent else ""
        heading = amount or "Save a card"
        self._page("challenge.html", {"heading": heading, "title": session["_title"], "button": f"Confirm {heading}"})

    def _page(self, name: str, values: dict[str, str], **markup: str) -> None:
        """Send a page of the template `name`. `values` are escaped, `markup` is HTML of ours."""
        page = (PAGES / "base.html").read_text().replace("{{ body }}", (PAGES / name).read_text())
        for field, value in values.items():
            page = page.replace("{{ " + field + " }}", html.escape(str(value)))
        for field, value in markup.items():
            page = page.replace("{{ " + field + " }}", value)
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.encode())

    def _answer_form(self, result: checkout.FormResult, show_again: Callable[[], None]) -> None:
        """Redirect to the next page of a form's result, or show the same page again with the error."""
        if not result.next_url:
            show_again()
            return
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", result.next_url)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, status: int, body: dict[str, Any], **headers: str) -> None:
        self._send(status, "application/json", json.dumps(body).encode(), **headers)

    def _send(self, status: int, content_type: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        headers |= {
            "Content-Type": content_type,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": CONTENT_SECURITY_POLICY,
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def serve(*, provider: Provider, port: int, api_key: str) -> ThreadingHTTPServer:
    """Return the HTTP server, bound to loopback but not yet serving. Raises ValueError for a live key."""
    if "_live_" in api_key:
        raise ValueError("The sandbox does not run with a live key.")
    attributes = {"provider": provider, "api_key": api_key}
    return ThreadingHTTPServer(("127.0.0.1", port), type("SandboxHandler", (Handler,), attributes))
