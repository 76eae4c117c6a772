"""A URL converter for the paths of files in a workspace.

A file name can contain any character. Django's own converter `path` does not match line breaks, so a file with one
could not be opened or deleted.
"""

from __future__ import annotations

from django.urls import register_converter
from django.urls.converters import StringConverter

FILE_ROUTE = "<file:path>"
"""The part of a route that matches a file's path. The view gets the path as its argument `path`."""


class FilePath(StringConverter):
    """Matches any text, also line breaks."""

    regex = r"[\s\S]+"


register_converter(FilePath, "file")
