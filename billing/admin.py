"""Administrators' work on money: price books, node specs, credit grants; everything else is there to be read.

The one rule: nothing here edits the ledger; what moves money calls a service.
"""

from __future__ import annotations

from typing import Any, cast

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin, TabularInline

from billing import models, payments, pricebooks
from billing.errors import BookRefused
from billing.ledger import wallet_account
from billing.selectors import default_currency
from console.accounts.models import User
from console.accounts.readonly import ReadOnlyAdmin, ReadOnlyInline


class PriceInline(TabularInline):  # type: ignore[misc]  # unfold publishes no types
    """The prices of a book, editable while it is a draft."""

    model = models.Price
    extra = 1

    def _is_draft(self, book: models.PriceBook | None) -> bool:
        return book is None or book.published_at is None

    def has_add_permission(self, _request: HttpRequest, obj: Any = None) -> bool:
        """In a draft only."""
        return self._is_draft(obj)

    def has_change_permission(self, _request: HttpRequest, obj: Any = None) -> bool:
        """In a draft only."""
        return self._is_draft(obj)

    def has_delete_permission(self, _request: HttpRequest, obj: Any = None) -> bool:
        """In a draft only."""
        return self._is_draft(obj)


@admin.register(models.NodeSpec)
class NodeSpecAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """What nodes there are."""

    list_display = ("name", "title", "cpus", "memory_mib", "gpus", "gpu_type", "position", "is_active")
    list_editable = ("position", "is_active")
    search_fields = ("name", "title")

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never: jobs of the past name it. Take it off the offer instead."""
        return False

    def get_readonly_fields(self, _request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """What was bought under a name stays what it was."""
        return ("name", "cpus", "memory_mib", "gpus", "gpu_type") if obj else ()


@admin.register(models.PriceBook)
class PriceBookAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Draft, publish from a date, supersede."""

    list_display = ("name", "currency", "effective_from", "published_at")
    readonly_fields = ("published_at",)
    inlines = (PriceInline,)
    actions = ("publish", "copy")

    def has_change_permission(self, _request: HttpRequest, obj: Any = None) -> bool:
        """Drafts only; published books are shown as they are."""
        return obj is None or obj.published_at is None

    def has_delete_permission(self, _request: HttpRequest, obj: Any = None) -> bool:
        """Drafts only."""
        return obj is not None and obj.published_at is None

    @admin.action(description=_("Publish (from its date, or now)"))
    def publish(self, request: HttpRequest, books: QuerySet[models.PriceBook]) -> None:
        """Publish drafts."""
        for book in books:
            try:
                begins = book.effective_from if book.effective_from and book.effective_from > timezone.now() else None
                pricebooks.publish(book=book, effective_from=begins)
            except BookRefused as error:
                messages.error(request, f"{book}: {error.message}")
            else:
                messages.success(request, _("%(book)s is published.") % {"book": book})

    @admin.action(description=_("Copy to a new draft"))
    def copy(self, request: HttpRequest, books: QuerySet[models.PriceBook]) -> None:
        """Begin the next book."""
        for book in books:
            messages.success(request, _("%(book)s is ready to edit.") % {"book": pricebooks.copy(book=book)})


@admin.register(models.CreditGrant)
class CreditGrantAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Money given, with the reason."""

    list_display = ("organization", "amount_minor", "reason", "granted_by", "created_at")
    autocomplete_fields = ("organization",)

    def has_change_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never: correct a grant with another movement."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never."""
        return False

    def save_model(self, request: HttpRequest, obj: models.CreditGrant, _form: ModelForm[Any], _change: Any) -> None:
        """Grant through the service."""
        account = wallet_account(organization_id=obj.organization_id, currency=default_currency())
        payments.grant(credit=obj, user=cast("User", request.user), account=account)


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
