"""Start the payments sandbox and a receiver of its webhooks on free local ports, and pay at the sandbox's pages."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

import httpx

from billing import gateway, sandbox
from tests.http_server import serving
from tests.provider import GOOD

PATIENCE = 20
"""Seconds until a test that waits for a webhook or a thread gives up."""
browser = httpx.Client(headers={"Connection": "close"})
"""A customer's browser. `httpx.get` would read the machine's certificates each time: 40 ms of CPU. Each request has
its own connection, so none is left open to a server that a test has stopped."""


class WebhookReceiver:
    """Receives the sandbox's webhooks.

    Responds with the next of `statuses`, or 200 if none is left, and queues (status, body, signature).
    """

    def __init__(self):
        self.statuses: list[int] = []
        self.received: Queue[tuple[int, bytes, str]] = Queue()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = receiver.statuses.pop(0) if receiver.statuses else 200
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                receiver.received.put((status, body, self.headers["Stripe-Signature"]))

            def log_message(self, *_arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/webhooks/stripe/"

    def next_event(self, kind):
        """Return the next accepted event of a type, with its signature verified."""
        while True:
            status, body, signature = self.received.get(timeout=PATIENCE)
            if status == 200 and (event := gateway.verify(body, signature))["type"] == kind:
                return event


@contextmanager
def running(path, webhook_url):
    """Serve a sandbox and deliver its webhooks. Yields the provider, whose `account.base_url` is the sandbox's address.

    The state stays in the file at `path`, so that a second call continues it.
    """
    provider = sandbox.Provider(sandbox.Store(path), base_url="")
    sender = sandbox.Delivery(provider, url=webhook_url, secret=gateway.sandbox_secret())
    server = sandbox.serve(provider=provider, port=0, api_key=gateway.sandbox_key())
    provider.account.base_url = f"http://127.0.0.1:{server.server_address[1]}"
    delivery = threading.Thread(target=sender.deliver)
    delivery.start()
    try:
        with serving(server):
            yield provider
    finally:
        sender.stop()
        delivery.join(PATIENCE)
        assert not delivery.is_alive()


def create_checkout(customer, reference="top-up-1", **changes):
    """Create a payment page for a top-up; return the gateway's checkout."""
    # Characters of HTML, which the page must escape.
    fields = {"amount_minor": 5000, "currency": "USD", "title": "Wallet of <Acme & Sons>"} | changes
    return gateway.create_checkout(
        reference=reference, customer_id=customer, return_url="http://127.0.0.1:8000/wallet/", **fields
    )


def pay(checkout, card=GOOD, **form):
    """Submit the form of a payment page; return the response."""
    return browser.post(checkout.url, data={"card": card} | form)
