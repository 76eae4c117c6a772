"""Read-only admin pages of payments and payment events, the form of a refund, and the action *Process again*."""

from __future__ import annotations

from collections.abc import Sequence
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

from billing import events, models, refunds
from billing.admin.amounts import AmountForm, ShowsAmounts, input_value
from billing.admin.credit import ALREADY_SUBMITTED
from billing.amounts import money, to_major
from billing.errors import RefundRefused
from console.accounts.models import User
from console.core.readonly import ReadOnlyAdmin, ReadOnlyInline


class RefundInline(ShowsAmounts, ReadOnlyInline):
    """The refunds of a top-up."""

    model = models.Refund
    fields = ("amount_minor", "reason", "state", "failure", "requested_by", "created_at", "ended_at")


class DisputeInline(ShowsAmounts, ReadOnlyInline):
    """The disputes of a top-up."""

    model = models.Dispute
    fields = ("dispute_id", "amount_minor", "withdrawn_minor", "reason", "state", "evidence_due_at")


class MovementInline(ShowsAmounts, ReadOnlyInline):
    """The withdrawals and returns of money by a dispute."""

    model = models.DisputeMovement
    fields = ("moved_at", "amount_minor", "balance_transaction", "reference")


@admin.register(models.TopUp)
class TopUpAdmin(ShowsAmounts, ReadOnlyAdmin):
    """Top-ups."""

    list_display = ("id", "account", "amount_minor", "origin", "state", "failure", "created_at", "paid_at")
    list_filter = ("state", "origin")
    list_select_related = ("account__organization",)
    search_fields = ("id", "payment_intent", "session_id", "account__organization__name")
    inlines = (RefundInline, DisputeInline)
    readonly_fields = ("refund_link",)

    @admin.display(description=_("Refund"))
    def refund_link(self, top_up: models.TopUp) -> str:
        """Return a link to the refund form with the refundable amount, or a sentence if nothing can be refunded."""
        refundable = refunds.refundable_minor(top_up)
        if not refundable:
            return str(_("Nothing is left to refund."))
        amount = input_value(to_major(refundable, top_up.currency), top_up.currency)
        url = f"{reverse('admin:billing_refund_add')}?top_up={top_up.pk}&amount={amount}"
        label = _("Refund up to %(left)s") % {"left": money(refundable, top_up.currency)}
        return format_html('<a href="{}">{}</a>', url, label)


class RefundForm(AmountForm):
    """The form of a refund. Submitting it twice makes one refund."""

    key = forms.UUIDField(widget=forms.HiddenInput, initial=uuid4)

    class Meta:
        model = models.Refund
        fields = ("top_up", "reason")

    def currency(self, data: dict[str, Any]) -> str:
        """Return the currency of the payment."""
        return data["top_up"].currency if "top_up" in data else ""

    def clean(self) -> dict[str, Any]:
        """Limit the amount to the refundable part. The service checks it again with the row locked.

        If a form with this key was submitted before, the same values pass: the service returns the existing refund.
        """
        data = super().clean()
        top_up, amount = data.get("top_up"), data.get("amount_minor")
        existing = models.Refund.objects.filter(pk=data["key"]).first() if "key" in data else None
        if existing:
            if (existing.top_up, existing.amount_minor, existing.reason) != (top_up, amount, data.get("reason")):
                raise forms.ValidationError(ALREADY_SUBMITTED)
            return data
        if top_up and amount and amount > (refundable := refunds.refundable_minor(top_up)):
            maximum = money(refundable, top_up.currency)
            raise forms.ValidationError(
                {"amount": _("The amount must be at most %(left)s, the rest of this top-up.") % {"left": maximum}}
            )
        return data


@admin.register(models.Refund)
class RefundAdmin(ShowsAmounts, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Refunds, which can be added but not changed."""

    form = RefundForm
    list_display = ("top_up", "amount_minor", "reason", "state", "failure", "requested_by", "created_at", "ended_at")
    list_filter = ("state",)
    search_fields = ("refund_id", "top_up__id", "top_up__account__organization__name")
    autocomplete_fields = ("top_up",)
    show_full_result_count = False  # saves a count of the whole table on a filtered list

    def get_fields(self, _request: HttpRequest, obj: models.Refund | None = None) -> Sequence[Any]:
        """Show the amount and the idempotency key only when adding."""
        return self._with_formatted_amounts(self.list_display) if obj else ("top_up", "amount", "reason", "key")

    def has_change_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never allowed."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never allowed."""
        return False

    def save_model(self, request: HttpRequest, obj: models.Refund, form: ModelForm[Any], _change: Any) -> None:
        """Make the refund through the service."""
        try:
            refund = refunds.refund(
                top_up=obj.top_up,
                amount_minor=obj.amount_minor,
                reason=obj.reason,
                user=cast("User", request.user),
                key=form.cleaned_data["key"],
            )
        except RefundRefused as error:
            # The refundable amount has changed since the form was checked. Without a pk, `log_addition` and
            # `response_add` know that no refund was created.
            obj.pk = None
            messages.error(request, str(error.message))
            return
        obj.pk = refund.pk
        if refund.state == models.Refund.States.CREATED:
            messages.warning(request, _("The payment provider did not answer. The refund is retried every minute."))
        elif refund.state == models.Refund.States.FAILED:
            messages.error(request, _("The payment provider refused: %(why)s") % {"why": refund.failure})

    def log_addition(self, request: HttpRequest, obj: models.Refund, message: Any) -> Any:
        """Log the row that the service created, if it did not refuse."""
        return super().log_addition(request, obj, message) if obj.pk else None

    def response_add(self, request: HttpRequest, obj: models.Refund, post_url_continue: str | None = None) -> Any:
        """Show the success message, unless the service refused and `save_model` showed its error."""
        return super().response_add(request, obj, post_url_continue) if obj.pk else redirect("..")  # the list


@admin.register(models.Dispute)
class DisputeAdmin(ShowsAmounts, ReadOnlyAdmin):
    """Disputes. Evidence is submitted in the provider's dashboard."""

    list_display = (
        "dispute_id", "top_up", "amount_minor", "withdrawn_minor", "reason", "state", "evidence_due_at", "opened_at",
    )  # fmt: skip
    inlines = (MovementInline,)
    list_filter = ("state",)
    search_fields = ("dispute_id", "top_up__account__organization__name")


@admin.register(models.AutoTopUp)
class AutoTopUpAdmin(ShowsAmounts, ReadOnlyAdmin):
    """Automatic top-ups."""

    list_display = ("account", "is_on", "threshold_minor", "amount_minor", "method_label", "failures", "last_failure")
    list_filter = ("is_on",)
    list_select_related = ("account__organization",)


@admin.register(models.StripeEvent)
class StripeEventAdmin(ReadOnlyAdmin):
    """Webhook events and their results."""

    list_display = ("type", "state", "reason", "tries", "retry_at", "received_at", "event_id")
    list_filter = ("state", "type")
    search_fields = ("event_id",)
    actions = ("apply_again",)

    @admin.action(description=_("Process again (safe: money moves only once)"), permissions=("act",))
    def apply_again(self, request: HttpRequest, selected: QuerySet[models.StripeEvent]) -> None:
        """Apply the selected events again and report their states. `ReadOnlyAdmin.has_act_permission` says who may."""
        pks = list(selected.values_list("pk", flat=True))
        for pk in pks:
            events.apply(event_pk=pk, include_quarantined=True)
        counts: dict[str, int] = {}
        for event in models.StripeEvent.objects.filter(pk__in=pks):
            counts[event.get_state_display()] = counts.get(event.get_state_display(), 0) + 1
        states = ", ".join(f"{count} × {state}" for state, count in sorted(counts.items()))
        messages.success(request, _("Current state: %(states)s.") % {"states": states})
