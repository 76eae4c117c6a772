"""How lists are cut into pages. The one rule: by a cursor on the id, so that no page counts the whole table."""

from __future__ import annotations

from rest_framework.pagination import CursorPagination


class NewestFirst(CursorPagination):
    """Newest first: `{"next", "previous", "results"}`, the first two being addresses or null."""

    ordering = "-id"
    page_size = 50
    page_size_query_param = "page_size"
    max_page_size = 200
