"""Serve the payments sandbox until it is stopped."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from billing import gateway, sandbox


class Command(BaseCommand):
    """`manage.py payments_sandbox`."""

    help = "Serve the payments sandbox on loopback: payment pages and signed webhooks without Stripe keys."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Serve until SIGTERM or SIGINT."""
        if not settings.PAYMENTS_SANDBOX:
            raise CommandError("Stripe keys are set: the sandbox does not run beside them. Unset STRIPE_SECRET_KEY.")
        provider = sandbox.Sandbox(
            path=settings.VAR_DIR / "sandbox" / "state.json",
            base_url=settings.SANDBOX_URL,
            webhook_url=f"{settings.TRAINYARD_URL}/webhooks/stripe/",
            secret=gateway.sandbox_secret(),
        )
        page = Path(sandbox.__file__).with_name("sandbox_page.html").read_text()
        server = sandbox.server(
            sandbox=provider, port=settings.SANDBOX_PORT, api_key=gateway.sandbox_key(), pay_page=page
        )
        delivery = threading.Thread(target=provider.deliver)
        delivery.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            # shutdown() waits for the serving loop, which this very thread runs: ask from another one.
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
        self.stdout.write(f"The payments sandbox listens at {settings.SANDBOX_URL}.")
        server.serve_forever()
        server.server_close()
        provider.stop()
        delivery.join()
