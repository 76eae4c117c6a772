"""Pagination of API lists by a cursor, the id of a row, because counting the rows would read the whole table."""

from __future__ import annotations

from rest_framework.pagination import CursorPagination


class NewestFirst(CursorPagination):
    """Pages of `{"next", "previous", "results"}`, newest rows first. The values of the first two are URLs or null."""

    ordering = "-id"
    page_size = 50
    page_size_query_param = "page_size"
    max_page_size = 200
