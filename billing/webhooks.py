"""The payment provider's way in: verify the raw body, store the event, answer 200. A task applies it.

The one rule: what is answered with 200 is on record. Telling the workers is no part of the answer: a bell is rung, and
one hint goes out for all the events of a moment. A hint that is lost is made up for by the sweep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from billing import events, gateway
from billing.errors import BadSignature
from billing.tasks import apply_events
from console.accounts.hints import send

PATH = "/webhooks/stripe/"
GAP_SECONDS = 0.02
"""Between two hints: what is stored meanwhile goes with the next."""


class Bell:
    """Hints to the workers, from a thread of each process, so that no webhook waits for the broker."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def ring(self) -> None:
        """Let the workers know soon. Costs nothing while a hint is on its way."""
        self._rung.set()
        if self._thread is None or not self._thread.is_alive():  # first of all, and in a process that was forked
            with self._lock:
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._tell, daemon=True, name="webhook-bell")
                    self._thread.start()

    def _tell(self) -> None:
        gap = threading.Event()
        while True:
            self._rung.wait()
            self._rung.clear()
            send(apply_events)
            gap.wait(GAP_SECONDS)


bell = Bell()


@csrf_exempt
@require_POST
def stripe_webhook(request: HttpRequest) -> HttpResponse:
    """400 for what the provider didn't sign; 200 once the event is on record."""
    body = request.body
    try:
        event = gateway.verify(body, request.headers.get("Stripe-Signature", ""))
    except BadSignature as error:
        return JsonResponse({"code": error.code, "message": str(error.message)}, status=400)
    if events.store(event, body.decode()) is not None:
        bell.ring()
    return HttpResponse(status=200, headers={"Content-Length": "0"})


class WebhookMiddleware:
    """Answers webhooks before any other middleware: they have no session, language, organization or page."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """A webhook's answer, or what the others make of the request."""
        return stripe_webhook(request) if request.path_info == PATH else self.get_response(request)


urlpatterns = [path(PATH.lstrip("/"), stripe_webhook, name="stripe_webhook")]
