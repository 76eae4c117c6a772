"""The ledger, holds, quotes and receipts. The one rule: all of it is there to be read."""

from __future__ import annotations

from django.contrib import admin

from billing import models
from console.accounts.readonly import ReadOnlyAdmin, ReadOnlyInline


@admin.register(models.Account)
class AccountAdmin(ReadOnlyAdmin):
    """Balances."""

    list_display = ("organization", "kind", "currency", "posted_minor", "held_minor")
    list_filter = ("kind", "currency")
    search_fields = ("organization__name",)


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
