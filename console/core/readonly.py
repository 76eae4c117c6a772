"""Base classes of read-only admin pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.http import HttpRequest
from unfold.admin import ModelAdmin, TabularInline
from unfold.paginator import InfinitePaginator

ROWS_PER_PAGE = 25
"""Rows of a list, as on the customers' pages. Rendering a row takes most of the time, and 100 rows take 80 ms."""


class ReadOnly:
    """Mixin that denies all changes."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never allowed."""
        return False

    has_change_permission = has_delete_permission = has_add_permission


class ReadOnlyAdmin(ReadOnly, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """A read-only admin."""

    show_full_result_count = False
    list_per_page = ROWS_PER_PAGE


class LargeTableAdmin(ReadOnlyAdmin):
    """A read-only admin of a table with millions of rows: pages have a next one but no number of rows or pages.

    Counting the rows would read the whole table for each page. Use it without `actions`, which show the count.
    """

    paginator = InfinitePaginator


class ReadOnlyInline(ReadOnly, TabularInline):  # type: ignore[misc]  # unfold publishes no types
    """A read-only inline that shows `fields`."""

    extra = 0
    can_delete = False
    fields: tuple[str, ...] = ()

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Sequence[Any]:
        """Return all fields."""
        return self.fields
