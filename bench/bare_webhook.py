"""The baseline of `bench.money`: the smallest correct webhook in Django.

A view without middleware, with the same check of the signature, and one SQL insert into the same table.
"""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")

import django
from django.conf import settings

django.setup()  # before the middleware is removed, because allauth requires its own middleware to be listed
settings.MIDDLEWARE = []
settings.ROOT_URLCONF = "bench.bare_webhook"
settings.DATABASES["default"]["CONN_HEALTH_CHECKS"] = False  # so that the insert is the only statement

from console.serving.application import Application  # noqa: E402 - the settings above must come first
from console.serving.handler import Handler  # noqa: E402 - as above

application = Application(Handler())

from django.db import connection  # noqa: E402 - as above
from django.http import HttpRequest, HttpResponse  # noqa: E402 - as above
from django.urls import path  # noqa: E402 - as above

from billing import gateway  # noqa: E402 - as above
from billing.errors import BadSignature  # noqa: E402 - as above

INSERT = """
INSERT INTO billing_stripeevent (event_id, type, payload, state, reason, received_at, tries)
VALUES (%s, %s, %s, 'received', '', now(), 0) ON CONFLICT (event_id) DO NOTHING
"""


def webhook(request: HttpRequest) -> HttpResponse:
    """Verify and store an event."""
    body = request.body
    try:
        event = gateway.verify(body, request.headers.get("Stripe-Signature", ""))
    except BadSignature:
        return HttpResponse(status=400)
    with connection.cursor() as cursor:
        cursor.execute(INSERT, (event["id"], event["type"], body.decode()))
    # The console's CommonMiddleware sets this header; without it the server would send the body in chunks.
    return HttpResponse(status=200, headers={"Content-Length": "0"})


urlpatterns = [path("webhooks/stripe/", webhook)]
