"""Stripe's webhook: verify the raw body, store the event, answer 200. A task applies the event later."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from billing import events, gateway
from billing.errors import BadSignature
from billing.tasks import request_apply_events


@csrf_exempt
@require_POST
def stripe_webhook(request: HttpRequest) -> HttpResponse:
    """Answer 200 once the event is stored, and 400 for a body that Stripe did not sign."""
    body = request.body
    try:
        event = gateway.verify(body, request.headers.get("Stripe-Signature", ""))
    except BadSignature as error:
        return JsonResponse({"code": error.code, "message": str(error.message)}, status=400)
    events.store(event)
    request_apply_events()
    return HttpResponse(status=200)


urlpatterns = [path("webhooks/stripe/", stripe_webhook, name="stripe_webhook")]
