"""Pages of the admin that change nothing. The one rule: what is shown by these can be read, and that is all."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from unfold.admin import ModelAdmin, TabularInline


class ReadOnly:
    """Mixed into what is there to be read."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never."""
        return False


class ReadOnlyAdmin(ReadOnly, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """A list and a page."""

    show_full_result_count = False


class ReadOnlyInline(ReadOnly, TabularInline):  # type: ignore[misc]  # unfold publishes no types
    """Rows on another object's page. `fields` names them; the form of an inline refuses what nobody can edit."""

    extra = 0
    can_delete = False
    fields: tuple[str, ...] = ()

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """All of them."""
        return self.fields
