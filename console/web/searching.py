"""Search and sort lists by `?q=` and `?sort=`: datasets, models and workspaces.

A search reads all rows of the organization. That is fast enough, because a quota limits their number.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

Row = TypeVar("Row", bound=Model)
MAX_QUERY_LENGTH = 100
"""Longer queries are cut. No name in these lists is as long."""


class SortOrder(NamedTuple):
    """An order of the rows."""

    title: str | Promise
    column: str


SORT_ORDERS = {
    "": SortOrder(_("By name"), "name"),
    "newest": SortOrder(_("Newest first"), "-pk"),
    "oldest": SortOrder(_("Oldest first"), "pk"),
}
"""The orders by their values of `?sort=`."""


def search_and_sort(request: HttpRequest, rows: QuerySet[Row]) -> tuple[QuerySet[Row], dict[str, Any]]:
    """Return the matching rows in the chosen order, and the context of the template `list_search.html`."""
    query = request.GET.get("q", "").strip()[:MAX_QUERY_LENGTH]
    sort = request.GET.get("sort", "")
    sort = sort if sort in SORT_ORDERS else ""
    if query:
        rows = rows.filter(name__icontains=query)
    titles = {name: order.title for name, order in SORT_ORDERS.items()}
    return rows.order_by(SORT_ORDERS[sort].column), {"query": query, "sort": sort, "orders": titles}
