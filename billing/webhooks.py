"""The payment provider's way in: verify the raw body, store the event, answer 200. A task applies it."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from billing import gateway, payments
from billing.errors import BadSignature
from billing.models import StripeEvent
from billing.tasks import apply_event
from console.accounts.hints import hint


@csrf_exempt
@require_POST
def stripe_webhook(request: HttpRequest) -> HttpResponse:
    """400 for what the provider didn't sign; 200 once the event is on record."""
    try:
        event = gateway.verify(request.body, request.headers.get("Stripe-Signature", ""))
    except BadSignature as error:
        return JsonResponse({"code": error.code, "message": str(error.message)}, status=400)
    stored = payments.receive(event)
    if stored.state == StripeEvent.States.RECEIVED:
        hint(apply_event, stored.pk)
    return HttpResponse(status=200)


urlpatterns = [path("webhooks/stripe/", stripe_webhook, name="stripe_webhook")]
