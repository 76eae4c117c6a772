"""Serve the payments sandbox until it is stopped."""

from __future__ import annotations

import signal
import threading
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from billing import gateway, sandbox


class Command(BaseCommand):
    """`manage.py payments_sandbox`."""

    help = "Serve the payments sandbox on loopback: payment pages and signed webhooks without Stripe keys."
    requires_system_checks = []  # `manage.py up` and `manage.py prepare` run them

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Serve until SIGTERM or SIGINT."""
        if not settings.PAYMENTS_SANDBOX:
            raise CommandError("Stripe keys are set: the sandbox does not run beside them. Unset STRIPE_SECRET_KEY.")
        store = sandbox.Store(settings.VAR_DIR / "sandbox" / "journal.jsonl")
        provider = sandbox.Provider(store, base_url=settings.SANDBOX_URL)
        sender = sandbox.Delivery(
            provider, url=f"{settings.TRAINYARD_URL}/webhooks/stripe/", secret=gateway.sandbox_secret()
        )
        server = sandbox.serve(provider=provider, port=settings.SANDBOX_PORT, api_key=gateway.sandbox_key())
        delivery = threading.Thread(target=sender.deliver)
        delivery.start()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            # shutdown() waits for the serving loop, which runs in this thread: call it from another thread.
            signal.signal(signal_number, lambda *_: threading.Thread(target=server.shutdown).start())
        self.stdout.write(f"The payments sandbox listens at {settings.SANDBOX_URL}.")
        server.serve_forever()
        server.server_close()
        sender.stop()
        delivery.join()
