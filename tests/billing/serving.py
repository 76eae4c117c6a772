"""Servers of a test's own on free ports of loopback (the sandbox, and where its webhooks go), and who pays there."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

import httpx

from billing import gateway, sandbox
from tests.provider import GOOD

PATIENCE = 20


class Console:
    """Where webhooks go: answers as `answers` says, and queues each body and signature."""

    def __init__(self):
        self.answers: list[int] = []
        self.received: Queue[tuple[int, bytes, str]] = Queue()
        console = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = console.answers.pop(0) if console.answers else 200
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                console.received.put((status, body, self.headers["Stripe-Signature"]))

            def log_message(self, *_arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/webhooks/stripe/"

    def event(self, kind):
        """Return the next accepted event of a type, with its signature verified."""
        while True:
            status, body, signature = self.received.get(timeout=PATIENCE)
            if status == 200 and (event := gateway.verify(body, signature))["type"] == kind:
                return event


@contextmanager
def serving(server):
    """A server in a thread."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()


@contextmanager
def running(path, webhook_url):
    """The sandbox, serving and delivering; its state outlives it. `provider.account.base_url` is its address."""
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


def page(customer, reference="top-up-1", **changes):
    fields = {"amount_minor": 5000, "currency": "USD", "title": "Wallet of <Acme & Sons>"} | changes
    return gateway.create_checkout(
        reference=reference, customer_id=customer, return_url="http://127.0.0.1:8000/wallet/", **fields
    )


def pay(checkout, card=GOOD, **form):
    return httpx.post(checkout.url, data={"card": card} | form)
