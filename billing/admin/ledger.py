"""Read-only admin pages of accounts, transactions, holds, quotes and receipts, and the form that writes off a debt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from django import forms
from django.contrib import admin, messages
from django.forms import ModelForm
from django.http import HttpRequest
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin

from billing import models, receivables
from billing.admin.amounts import AmountForm, ShowsAmounts, input_value
from billing.amounts import money, to_major
from billing.errors import WriteOffRefused
from console.accounts.models import User
from console.core.readonly import LargeTableAdmin, ReadOnlyAdmin, ReadOnlyInline


@admin.register(models.Account)
class AccountAdmin(ShowsAmounts, ReadOnlyAdmin):
    """Accounts with their balances."""

    list_display = ("organization", "kind", "currency", "posted_minor", "held_minor")
    list_filter = ("kind", "currency")
    list_select_related = ("organization",)
    search_fields = ("organization__name",)
    readonly_fields = ("write_off_link",)

    @admin.display(description=_("Write off"))
    def write_off_link(self, account: models.Account) -> str:
        """Return a link to the write-off form with the owed amount, or a sentence if nothing is owed."""
        if account.kind != models.Account.Kinds.RECEIVABLE or account.posted_minor >= 0:
            return str(_("Nothing is owed on this account."))
        owed = -account.posted_minor
        amount = input_value(to_major(owed, account.currency), account.currency)
        url = f"{reverse('admin:billing_writeoff_add')}?account={account.pk}&amount={amount}"
        label = _("Write off up to %(owed)s") % {"owed": money(owed, account.currency)}
        return format_html('<a href="{}">{}</a>', url, label)


def _newest_write_off() -> int:
    """Return the highest id of a write-off, 0 if there is none.

    With it, `receivables.write_off` refuses a form if the debt was written off after its page was made.
    """
    # `first` by the model's ordering, the highest id first.
    return models.WriteOff.objects.values_list("pk", flat=True).first() or 0


class WriteOffForm(AmountForm):
    """The form of a write-off. Submitting it twice writes off once."""

    newest_seen = forms.IntegerField(widget=forms.HiddenInput, initial=_newest_write_off)

    class Meta:
        model = models.WriteOff
        fields = ("account", "reason")
        help_texts = {
            "account": _("Only accounts that owe money are listed."),
            "reason": _("It is kept with the write-off and in the customer's audit log."),
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "account" in self.fields:  # not when an existing write-off is shown, read-only
            # A debt is a negative balance.
            debts = models.Account.objects.filter(kind=models.Account.Kinds.RECEIVABLE, posted_minor__lt=0)
            self.fields["account"].queryset = debts.select_related("organization")  # type: ignore[attr-defined]  # a choice of rows

    def currency(self, data: dict[str, Any]) -> str:
        """Return the currency of the debt."""
        return data["account"].currency if "account" in data else ""

    def clean(self) -> dict[str, Any]:
        """Limit the amount to the debt. The service checks again with the wallet locked."""
        data = super().clean()
        account, amount = data.get("account"), data.get("amount_minor")
        if account and amount and amount > -account.posted_minor:
            owed = money(-account.posted_minor, account.currency)
            raise forms.ValidationError(
                {"amount": _("The amount must be at most %(owed)s, the amount owed.") % {"owed": owed}}
            )
        return data


@admin.register(models.WriteOff)
class WriteOffAdmin(ShowsAmounts, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Write-offs, which can be added but not changed."""

    form = WriteOffForm
    list_display = ("account", "amount_minor", "reason", "written_by", "created_at")
    list_select_related = ("account__organization", "written_by")
    search_fields = ("account__organization__name", "reason")

    def get_fields(self, _request: HttpRequest, obj: models.WriteOff | None = None) -> Sequence[Any]:
        """Show the amount as an input, and the hidden field, only when adding."""
        return (
            self._with_formatted_amounts(self.list_display) if obj else ("account", "amount", "reason", "newest_seen")
        )

    def has_change_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never allowed."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never allowed."""
        return False

    def save_model(self, request: HttpRequest, obj: models.WriteOff, form: ModelForm[Any], _change: Any) -> None:
        """Write the debt off through the service."""
        try:
            row = receivables.write_off(
                account=obj.account,
                amount_minor=obj.amount_minor,
                reason=obj.reason,
                user=cast("User", request.user),
                newest_seen=form.cleaned_data["newest_seen"],
            )
        except WriteOffRefused as error:  # the debt changed since the form was checked
            messages.error(request, str(error.message))
            return
        obj.pk, obj.created_at = row.pk, row.created_at

    def log_addition(self, request: HttpRequest, obj: models.WriteOff, message: Any) -> Any:
        """Log the row that the service created, if it did not refuse."""
        return super().log_addition(request, obj, message) if obj.pk else None

    def response_add(self, request: HttpRequest, obj: models.WriteOff, post_url_continue: str | None = None) -> Any:
        """Show the success message, unless the service refused and `save_model` showed its error."""
        return super().response_add(request, obj, post_url_continue) if obj.pk else redirect("..")  # the list


class EntryInline(ShowsAmounts, ReadOnlyInline):
    """The entries of a transaction."""

    model = models.Entry
    fields = ("account", "amount_minor")


@admin.register(models.Transaction)
class TransactionAdmin(ShowsAmounts, LargeTableAdmin):
    """Transactions of the ledger."""

    list_display = ("reference", "kind", "description", "created_at")
    search_fields = ("reference", "kind", "description")
    inlines = (EntryInline,)


class HoldExtensionInline(ShowsAmounts, ReadOnlyInline):
    """The extensions of a hold."""

    model = models.HoldExtension
    fields = ("quote", "amount_minor", "placed_by")


@admin.register(models.Hold)
class HoldAdmin(ShowsAmounts, LargeTableAdmin):
    """Holds, open and ended."""

    list_display = ("reference", "account", "amount_minor", "metered_minor", "charged_minor", "state", "created_at")
    list_filter = ("state",)
    list_select_related = ("account__organization",)
    search_fields = ("reference",)
    inlines = (HoldExtensionInline,)


@admin.register(models.Receipt)
class ReceiptAdmin(ShowsAmounts, LargeTableAdmin):
    """Receipts."""

    list_display = ("title", "organization", "total_minor", "ceiling_minor", "created_at")
    list_select_related = ("organization",)
    search_fields = ("title", "organization__name")


@admin.register(models.Quote)
class QuoteAdmin(ShowsAmounts, LargeTableAdmin):
    """Quotes."""

    list_display = ("id", "organization", "mode", "p50_minor", "p90_minor", "ceiling_minor", "created_at", "expires_at")
    list_filter = ("mode",)
    list_select_related = ("organization",)
