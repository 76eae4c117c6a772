"""Base classes of read-only admin pages, and the row of an action's address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from django.contrib.auth import get_permission_codename
from django.core.exceptions import ValidationError
from django.db.models import Model
from django.http import Http404, HttpRequest
from django.shortcuts import get_object_or_404
from unfold.admin import ModelAdmin, TabularInline
from unfold.paginator import InfinitePaginator

ROWS_PER_PAGE = 25
"""How many rows a list shows, as on the customers' pages. Rendering 100 rows, Django's default, takes 80 ms."""


Row = TypeVar("Row", bound=Model)


def row_or_404(model: type[Row], object_id: str) -> Row:
    """Return the row whose key is in the address of an action. Raises Http404, also for a text that is no key."""
    try:
        return get_object_or_404(model, pk=object_id)
    except (ValueError, ValidationError):
        raise Http404 from None


class ReadOnly:
    """A mixin for admins and inlines that forbids to add, change and delete rows."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False. The permissions to change and to delete are this method too."""
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def has_act_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may run the actions that name the permission `act`.

        Such an action changes rows that no form may change. The user needs Django's permission to change them.
        """
        options = self.opts  # type: ignore[attr-defined]  # set by Django's class
        return request.user.has_perm(f"{options.app_label}.{get_permission_codename('change', options)}")


class ReadOnlyAdmin(ReadOnly, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """A read-only admin."""

    show_full_result_count = False
    list_per_page = ROWS_PER_PAGE


class LargeTableAdmin(ReadOnlyAdmin):
    """A read-only admin of a table with millions of rows.

    Its lists link to the next page, but do not show how many rows or pages there are, because counting would read the
    whole table. Use it without `actions`, whose selection shows this count.
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
