"""Node specs and price books. The one rule: a published book is shown, never edited."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin, TabularInline

from billing import models, pricebooks
from billing.errors import BookRefused


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
