"""Base classes of read-only admin pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.http import HttpRequest
from unfold.admin import ModelAdmin, TabularInline


class ReadOnly:
    """Mixin that denies all changes."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never allowed."""
        return False

    has_change_permission = has_delete_permission = has_add_permission


class ReadOnlyAdmin(ReadOnly, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """A read-only admin."""

    show_full_result_count = False


class ReadOnlyInline(ReadOnly, TabularInline):  # type: ignore[misc]  # unfold publishes no types
    """A read-only inline that shows `fields`."""

    extra = 0
    can_delete = False
    fields: tuple[str, ...] = ()

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Sequence[Any]:
        """Return all fields."""
        return self.fields
