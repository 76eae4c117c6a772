"""Money in and back, and the provider's events. The one rule: to be read; refunds and *apply again* call services."""

from __future__ import annotations

from typing import Any, cast
from uuid import uuid4

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin

from billing import events, models, reversals
from billing.admin.credit import SENT_BEFORE
from billing.errors import RefundRefused
from billing.wording import money
from console.accounts.models import User
from console.accounts.readonly import ReadOnlyAdmin, ReadOnlyInline


class RefundInline(ReadOnlyInline):
    """What of a top-up went back."""

    model = models.Refund
    fields = ("amount_minor", "reason", "state", "failure", "requested_by", "created_at", "ended_at")


class DisputeInline(ReadOnlyInline):
    """What a bank took back."""

    model = models.Dispute
    fields = ("dispute_id", "amount_minor", "withdrawn_minor", "reason", "state", "evidence_due_at")


class MovementInline(ReadOnlyInline):
    """What a dispute moved."""

    model = models.DisputeMovement
    fields = ("moved_at", "amount_minor", "balance_transaction", "reference")


@admin.register(models.TopUp)
class TopUpAdmin(ReadOnlyAdmin):
    """Money paid in."""

    list_display = ("id", "account", "amount_minor", "currency", "origin", "state", "failure", "created_at", "paid_at")
    list_filter = ("state", "origin")
    list_select_related = ("account__organization",)
    search_fields = ("id", "payment_intent", "session_id", "account__organization__name")
    inlines = (RefundInline, DisputeInline)
    readonly_fields = ("pay_back",)

    @admin.display(description=_("Pay back"))
    def pay_back(self, top_up: models.TopUp) -> str:
        """The way to a refund of what is left of it."""
        left = reversals.refundable_minor(top_up)
        if not left:
            return str(_("Nothing is left to pay back."))
        address = f"{reverse('admin:billing_refund_add')}?top_up={top_up.pk}&amount_minor={left}"
        words = _("Refund up to %(left)s") % {"left": money(left, top_up.currency)}
        return format_html('<a href="{}">{}</a>', address, words)


class RefundForm(forms.ModelForm):  # type: ignore[type-arg]  # at run time Django's class takes no argument
    """A refund to make: the same form, sent twice, is the same refund."""

    key = forms.UUIDField(widget=forms.HiddenInput, initial=uuid4)

    class Meta:
        model = models.Refund
        fields = ("top_up", "amount_minor", "reason")

    def clean(self) -> dict[str, Any]:
        """At most what is left; the service looks again, with the row locked."""
        data = super().clean() or {}
        top_up, amount = data.get("top_up"), data.get("amount_minor")
        known = models.Refund.objects.filter(pk=data["key"]).first() if "key" in data else None
        if known:
            if (known.top_up, known.amount_minor, known.reason) != (top_up, amount, data.get("reason")):
                raise forms.ValidationError(SENT_BEFORE)
            return data
        if top_up and amount and amount > (left := reversals.refundable_minor(top_up)):
            most = money(left, top_up.currency)
            raise forms.ValidationError(
                {"amount_minor": _("At most %(left)s of this top-up can be paid back.") % {"left": most}}
            )
        return data


@admin.register(models.Refund)
class RefundAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Payments to give back: added here, told to the provider, and then only to be read."""

    form = RefundForm
    list_display = ("top_up", "amount_minor", "reason", "state", "failure", "requested_by", "created_at", "ended_at")
    list_filter = ("state",)
    search_fields = ("refund_id", "top_up__id", "top_up__account__organization__name")
    autocomplete_fields = ("top_up",)
    show_full_result_count = False

    def get_fields(self, _request: HttpRequest, obj: models.Refund | None = None) -> tuple[str, ...]:
        """The form's key is of what is not made yet."""
        return RefundForm.Meta.fields if obj else (*RefundForm.Meta.fields, "key")

    def has_change_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never."""
        return False

    def save_model(self, request: HttpRequest, obj: models.Refund, form: ModelForm[Any], _change: Any) -> None:
        """Refund through the service."""
        try:
            made = reversals.refund(
                top_up=obj.top_up,
                amount_minor=obj.amount_minor,
                reason=obj.reason,
                user=cast("User", request.user),
                key=form.cleaned_data["key"],
            )
        except RefundRefused as error:
            obj.pk = None  # another refund was faster
            messages.error(request, str(error.message))
            return
        obj.pk = made.pk
        if made.state == models.Refund.States.CREATED:
            messages.warning(request, _("The payment provider did not answer. It is asked again every minute."))
        elif made.state == models.Refund.States.FAILED:
            messages.error(request, _("The payment provider refused: %(why)s") % {"why": made.failure})

    def log_addition(self, request: HttpRequest, obj: models.Refund, message: Any) -> Any:
        """Log what was made."""
        return super().log_addition(request, obj, message) if obj.pk else None

    def response_add(self, request: HttpRequest, obj: models.Refund, post_url_continue: str | None = None) -> Any:
        """Say "added" of what was made."""
        return super().response_add(request, obj, post_url_continue) if obj.pk else redirect("..")


@admin.register(models.Dispute)
class DisputeAdmin(ReadOnlyAdmin):
    """Disputes. They are answered at the provider's own pages."""

    list_display = (
        "dispute_id", "top_up", "amount_minor", "withdrawn_minor", "reason", "state", "evidence_due_at", "opened_at",
    )  # fmt: skip
    inlines = (MovementInline,)
    list_filter = ("state",)
    search_fields = ("dispute_id", "top_up__account__organization__name")


@admin.register(models.AutoTopUp)
class AutoTopUpAdmin(ReadOnlyAdmin):
    """Customers' standing orders."""

    list_display = ("account", "is_on", "threshold_minor", "amount_minor", "method_label", "failures", "last_failure")
    list_filter = ("is_on",)
    list_select_related = ("account__organization",)


@admin.register(models.StripeEvent)
class StripeEventAdmin(ReadOnlyAdmin):
    """Webhooks as they came, and what became of them."""

    list_display = ("type", "state", "reason", "tries", "retry_at", "received_at", "event_id")
    list_filter = ("state", "type")
    search_fields = ("event_id",)
    actions = ("apply_again",)

    @admin.action(description=_("Apply again (safe: money moves once)"))
    def apply_again(self, request: HttpRequest, chosen: QuerySet[models.StripeEvent]) -> None:
        """Apply received, parked and quarantined events, and tell what became of them."""
        pks = list(chosen.values_list("pk", flat=True))
        for pk in pks:
            events.apply(event_pk=pk, again=True)
        counts: dict[str, int] = {}
        for event in models.StripeEvent.objects.filter(pk__in=pks):
            counts[event.get_state_display()] = counts.get(event.get_state_display(), 0) + 1
        told = ", ".join(f"{count} × {state}" for state, count in sorted(counts.items()))
        messages.success(request, _("Now: %(told)s.") % {"told": told})
