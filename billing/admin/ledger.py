"""The ledger, holds, quotes and receipts. The one rule: to be read; a debt is written off by the service."""

from __future__ import annotations

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
from billing.errors import WriteOffRefused
from billing.wording import money
from console.accounts.models import User
from console.accounts.readonly import ReadOnlyAdmin, ReadOnlyInline


@admin.register(models.Account)
class AccountAdmin(ReadOnlyAdmin):
    """Balances."""

    list_display = ("organization", "kind", "currency", "posted_minor", "held_minor")
    list_filter = ("kind", "currency")
    search_fields = ("organization__name",)
    readonly_fields = ("give_up",)

    @admin.display(description=_("Write off"))
    def give_up(self, account: models.Account) -> str:
        """The way to a write-off of what is owed."""
        if account.kind != models.Account.Kinds.RECEIVABLE or account.posted_minor >= 0:
            return str(_("Nothing is owed here."))
        owed = -account.posted_minor
        address = f"{reverse('admin:billing_writeoff_add')}?account={account.pk}&amount_minor={owed}"
        words = _("Write off up to %(owed)s") % {"owed": money(owed, account.currency)}
        return format_html('<a href="{}">{}</a>', address, words)


class WriteOffForm(forms.ModelForm):  # type: ignore[type-arg]  # at run time Django's class takes no argument
    """A debt to give up."""

    class Meta:
        model = models.WriteOff
        fields = ("account", "amount_minor", "reason")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "account" in self.fields:
            debts = models.Account.objects.filter(kind=models.Account.Kinds.RECEIVABLE, posted_minor__lt=0)
            self.fields["account"].queryset = debts.select_related("organization")  # type: ignore[attr-defined]  # a choice of rows

    def clean(self) -> dict[str, Any]:
        """At most what is owed; the service looks again, with the wallet locked."""
        data = super().clean() or {}
        account, amount = data.get("account"), data.get("amount_minor")
        if account and amount and amount > -account.posted_minor:
            owed = money(-account.posted_minor, account.currency)
            raise forms.ValidationError(
                {"amount_minor": _("At most %(owed)s is owed and can be written off.") % {"owed": owed}}
            )
        return data


@admin.register(models.WriteOff)
class WriteOffAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Debts that were given up: added here, and then only to be read."""

    form = WriteOffForm
    list_display = ("account", "amount_minor", "reason", "written_by", "created_at")
    list_select_related = ("account__organization", "written_by")
    search_fields = ("account__organization__name", "reason")

    def has_change_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never."""
        return False

    def save_model(self, request: HttpRequest, obj: models.WriteOff, _form: ModelForm[Any], _change: Any) -> None:
        """Write off through the service."""
        try:
            made = receivables.write_off(
                account=obj.account, amount_minor=obj.amount_minor, reason=obj.reason, user=cast("User", request.user)
            )
        except WriteOffRefused as error:  # the debt was paid, or written off, a moment ago
            messages.error(request, str(error.message))
            return
        obj.pk, obj.created_at = made.pk, made.created_at

    def log_addition(self, request: HttpRequest, obj: models.WriteOff, message: Any) -> Any:
        """Log what was made."""
        return super().log_addition(request, obj, message) if obj.pk else None

    def response_add(self, request: HttpRequest, obj: models.WriteOff, post_url_continue: str | None = None) -> Any:
        """Say "added" of what was made."""
        return super().response_add(request, obj, post_url_continue) if obj.pk else redirect("..")


class EntryInline(ReadOnlyInline):
    """The entries of a transaction."""

    model = models.Entry
    fields = ("account", "amount_minor")


@admin.register(models.Transaction)
class TransactionAdmin(ReadOnlyAdmin):
    """The ledger."""

    list_display = ("reference", "kind", "description", "created_at")
    list_filter = ("kind",)
    search_fields = ("reference", "description")
    inlines = (EntryInline,)


@admin.register(models.Hold)
class HoldAdmin(ReadOnlyAdmin):
    """What is or was set aside."""

    list_display = ("reference", "account", "amount_minor", "metered_minor", "charged_minor", "state", "created_at")
    list_filter = ("state",)
    list_select_related = ("account__organization",)
    search_fields = ("reference",)


@admin.register(models.Receipt)
class ReceiptAdmin(ReadOnlyAdmin):
    """What purchases came to."""

    list_display = ("title", "organization", "total_minor", "ceiling_minor", "currency", "created_at")
    search_fields = ("title", "organization__name")


@admin.register(models.Quote)
class QuoteAdmin(ReadOnlyAdmin):
    """Offers made."""

    list_display = ("id", "organization", "mode", "p50_minor", "p90_minor", "ceiling_minor", "created_at", "expires_at")
    list_filter = ("mode",)
