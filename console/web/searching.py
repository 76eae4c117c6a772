"""Search and sort lists by `?q=` and `?sort=`: datasets, models and workspaces, whose number a quota limits."""

from __future__ import annotations

from typing import Any, TypeVar

from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

Row = TypeVar("Row", bound=Model)
MAX_QUERY_LENGTH = 100  # longer than any name in these lists
ORDERS = {
    "": (_("By name"), ("name",)),
    "newest": (_("Newest first"), ("-pk",)),
    "oldest": (_("Oldest first"), ("pk",)),
}
"""Title and columns of each order, by its name in the URL."""


def search_and_sort(request: HttpRequest, rows: QuerySet[Row]) -> tuple[QuerySet[Row], dict[str, Any]]:
    """Return the rows whose name contains the query, in the chosen order, and the context of `list_search.html`."""
    query, sort = request.GET.get("q", "").strip()[:MAX_QUERY_LENGTH], request.GET.get("sort", "")
    sort = sort if sort in ORDERS else ""
    if query:
        rows = rows.filter(name__icontains=query)
    _title, columns = ORDERS[sort]
    titles = {name: title for name, (title, _columns) in ORDERS.items()}
    return rows.order_by(*columns), {"query": query, "sort": sort, "orders": titles}
