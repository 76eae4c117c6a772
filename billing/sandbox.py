"""A Stripe of our own on loopback, for use without keys: payment pages, events, signed webhooks.

Speaks the part of Stripe's HTTP API that `gateway` uses, to the same `stripe` client. It proves our code, not Stripe.
The one rule: it moves play money only, so it refuses to start beside live keys and listens on loopback alone.

Its state is one JSON file, written whole by rename, so that a restart forgets nothing; an event counts as delivered
when the console answered 200, and is sent again until then.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import http.client
import json
import secrets
import threading
import time
import urllib.request
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import parse_qs, urlsplit

from billing.wording import money

RETRY_SECONDS = (0.2, 1, 2, 5, 10, 30, 60)
"""Waits between tries of a webhook; the last is repeated."""
MAX_BODY = 65536
SESSION_SECONDS = 24 * 3600
DECLINED = {
    "4000000000000002": "Your card was declined.",
    "4000000000009995": "Your card has insufficient funds.",
}
CARD = "4242424242424242"


class Sandbox:
    """The provider's side: sessions, events and their delivery. Thread-safe."""

    def __init__(self, *, path: Path, base_url: str, webhook_url: str, secret: str) -> None:
        self.base_url = base_url
        self._path = path
        self._webhook_url = webhook_url
        self._secret = secret
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._stopped = False
        self._state: dict[str, Any] = {"sessions": {}, "events": [], "keys": {}, "undelivered": []}
        if path.exists():
            self._state = json.loads(path.read_text())

    def create_session(self, form: dict[str, str], key: str) -> dict[str, Any]:
        """Make a payment page; an idempotency key replays its first answer."""
        with self._lock:
            if key and key in self._state["keys"]:
                return dict(self._state["sessions"][self._state["keys"][key]])
            amount = int(form["line_items[0][price_data][unit_amount]"]) * int(form["line_items[0][quantity]"])
            session_id = f"cs_test_{secrets.token_urlsafe(24)}"
            session = {
                "id": session_id,
                "object": "checkout.session",
                "amount_total": amount,
                "currency": form["line_items[0][price_data][currency]"],
                "client_reference_id": form.get("client_reference_id"),
                "customer_email": form.get("customer_email"),
                "title": form["line_items[0][price_data][product_data][name]"],
                "success_url": form["success_url"],
                "cancel_url": form["cancel_url"],
                "created": int(time.time()),
                "expires_at": int(time.time()) + SESSION_SECONDS,
                "livemode": False,
                "mode": "payment",
                "payment_status": "unpaid",
                "status": "open",
                "url": f"{self.base_url}/pay/{session_id}",
            }
            self._state["sessions"][session_id] = session
            if key:
                self._state["keys"][key] = session_id
            self._save()
            return dict(session)

    def session(self, session_id: str) -> dict[str, Any] | None:
        """A session as it is now; one that is past its time expires here, with its event."""
        with self._lock:
            session = self._state["sessions"].get(session_id)
            if session and session["status"] == "open" and session["expires_at"] < time.time():
                session["status"] = "expired"
                self._emit("checkout.session.expired", session)
            return dict(session) if session else None

    def pay(self, session_id: str, card: str) -> str:
        """Pay a session with a test card. Gives why it was declined, or an empty string. Paying twice pays once."""
        digits = "".join(character for character in card if character.isdigit())
        if digits in DECLINED:
            return DECLINED[digits]
        if digits != CARD:
            return "This sandbox takes test cards only: use 4242 4242 4242 4242."
        with self._lock:
            session = self._state["sessions"][session_id]
            if session["status"] == "open":
                session["status"] = "complete"
                session["payment_status"] = "paid"
                self._emit("checkout.session.completed", session)
            return "" if session["payment_status"] == "paid" else "This payment page has expired. Start again."

    def events(self, since: int) -> list[dict[str, Any]]:
        """Events made since a Unix time, newest first."""
        with self._lock:
            return [event for event in reversed(self._state["events"]) if event["created"] >= since]

    def deliver(self) -> None:
        """Send webhooks until `stop`: each again, with longer waits, until it is answered with 200.

        Runs in a thread.
        """
        tries = 0
        while True:
            with self._lock:
                # Cleared before the look: a stop or an event that comes after it sets it again, and is not slept over.
                self._wake.clear()
                if self._stopped:
                    return
                waiting = list(self._state["undelivered"])
            delivered = [event_id for event_id in waiting if self._send(event_id)]
            with self._lock:
                left = [event_id for event_id in self._state["undelivered"] if event_id not in delivered]
                self._state["undelivered"] = left
                self._save()
            tries = 0 if delivered or not waiting else tries + 1
            still_waiting = len(waiting) > len(delivered)
            self._wake.wait(RETRY_SECONDS[min(tries, len(RETRY_SECONDS) - 1)] if still_waiting else None)

    def stop(self) -> None:
        """End `deliver`."""
        with self._lock:
            self._stopped = True
            self._wake.set()

    def _emit(self, kind: str, session: dict[str, Any]) -> None:
        event = {
            "id": f"evt_{secrets.token_urlsafe(18)}",
            "object": "event",
            "type": kind,
            "created": int(time.time()),
            "livemode": False,
            "data": {"object": dict(session)},
        }
        self._state["events"].append(event)
        self._state["undelivered"].append(event["id"])
        self._save()
        self._wake.set()

    def _send(self, event_id: str) -> bool:
        with self._lock:
            event = next(event for event in self._state["events"] if event["id"] == event_id)
        body = json.dumps(event).encode()
        stamp = int(time.time())
        signature = hmac.new(self._secret.encode(), b"%d.%s" % (stamp, body), hashlib.sha256).hexdigest()
        request = urllib.request.Request(  # noqa: S310  # the URL is our own console's, from settings
            self._webhook_url,
            data=body,
            headers={"Content-Type": "application/json", "Stripe-Signature": f"t={stamp},v1={signature}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310  # as above
                return bool(answer.status == HTTPStatus.OK)
        except (URLError, OSError, http.client.HTTPException):
            return False

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(self._state))
        fresh.rename(self._path)


class Handler(BaseHTTPRequestHandler):
    """Stripe's routes, and the payment page."""

    sandbox: Sandbox
    api_key: str
    pay_page: str
    protocol_version = "HTTP/1.1"
    server_version = "TrainyardSandbox"
    sys_version = ""

    def do_GET(self) -> None:  # the name http.server calls
        """Read a session, the events, or the payment page."""
        url = urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        match parts:
            case ["pay", session_id]:
                self._show_page(session_id)
            case ["v1", *_rest] if not self._authorized():
                self._error(HTTPStatus.UNAUTHORIZED, "Invalid API key.")
            case ["v1", "checkout", "sessions", session_id] if session := self.sandbox.session(session_id):
                self._json(session)
            case ["v1", "events"]:
                since = int(parse_qs(url.query).get("created[gte]", ["0"])[0])
                self._json(
                    {"object": "list", "url": "/v1/events", "has_more": False, "data": self.sandbox.events(since)}
                )
            case _:
                self._error(HTTPStatus.NOT_FOUND, "No such object.")

    def do_POST(self) -> None:  # the name http.server calls
        """Make a session, or pay one."""
        parts = urlsplit(self.path).path.strip("/").split("/")
        form = self._form()
        match parts:
            case ["pay", session_id] if session := self.sandbox.session(session_id):
                refused = self.sandbox.pay(session_id, form.get("card", ""))
                if refused:
                    self._show_page(session_id, refused)
                else:
                    self._redirect(session["success_url"])
            case ["v1", "checkout", "sessions"] if self._authorized():
                try:
                    self._json(self.sandbox.create_session(form, self.headers.get("Idempotency-Key", "")))
                except (KeyError, ValueError) as error:
                    self._error(HTTPStatus.BAD_REQUEST, f"Missing or invalid parameter: {error}")
            case ["v1", *_rest] if not self._authorized():
                self._error(HTTPStatus.UNAUTHORIZED, "Invalid API key.")
            case _:
                self._error(HTTPStatus.NOT_FOUND, "No such object.")

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  # the base class's name
        """Nothing is logged: card fields pass through here."""

    def _authorized(self) -> bool:
        given = self.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return secrets.compare_digest(given, f"Bearer {self.api_key}".encode())

    def _form(self) -> dict[str, str]:
        length = min(int(self.headers.get("Content-Length") or 0), MAX_BODY)
        fields = parse_qs(self.rfile.read(length).decode(errors="replace"))
        return {name: values[0] for name, values in fields.items()}

    def _show_page(self, session_id: str, refused: str = "") -> None:
        session = self.sandbox.session(session_id)
        if session is None:
            self._error(HTTPStatus.NOT_FOUND, "No such payment page.")
            return
        values = {
            "title": session["title"],
            "amount": money(session["amount_total"], session["currency"].upper()),
            "cancel_url": session["cancel_url"],
            "refused": refused,
            "status": session["status"],
        }
        page = self.pay_page
        for name, value in values.items():
            page = page.replace("{{ " + name + " }}", html.escape(str(value)))
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.encode())

    def _redirect(self, url: str) -> None:
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", url)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, data: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(status, "application/json", json.dumps(data).encode())

    def _error(self, status: HTTPStatus, message: str) -> None:
        self._json({"error": {"type": "invalid_request_error", "message": message}}, status)

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)


def server(*, sandbox: Sandbox, port: int, api_key: str, pay_page: str) -> ThreadingHTTPServer:
    """The HTTP server, bound to loopback and not yet serving."""
    attributes = {"sandbox": sandbox, "api_key": api_key, "pay_page": pay_page}
    return ThreadingHTTPServer(("127.0.0.1", port), type("SandboxHandler", (Handler,), attributes))
