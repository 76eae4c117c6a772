"""Money in, and the provider's events. The one rule: to be read; *apply again* calls the service."""

from __future__ import annotations

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from billing import models, payments
from console.accounts.readonly import ReadOnlyAdmin


@admin.register(models.TopUp)
class TopUpAdmin(ReadOnlyAdmin):
    """Money paid in."""

    list_display = ("id", "account", "amount_minor", "currency", "state", "created_at", "paid_at")
    list_filter = ("state",)
    list_select_related = ("account__organization",)


@admin.register(models.StripeEvent)
class StripeEventAdmin(ReadOnlyAdmin):
    """Webhooks as they came, and what became of them."""

    list_display = ("event_id", "type", "state", "reason", "received_at", "applied_at")
    list_filter = ("state", "type")
    search_fields = ("event_id",)
    actions = ("apply_again",)

    @admin.action(description=_("Apply again (safe: money moves once)"))
    def apply_again(self, request: HttpRequest, events: QuerySet[models.StripeEvent]) -> None:
        """Apply received and quarantined events."""
        for event in events:
            payments.apply_event(event_pk=event.pk)
        messages.success(request, _("Done: see the state of each."))
