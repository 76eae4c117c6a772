"""URL converter for file paths in a workspace.

A file name can contain any character. Django's own `path` converter does not match line breaks, so such a file could
not be listed, opened or deleted.
"""

from __future__ import annotations

from django.urls import register_converter
from django.urls.converters import StringConverter

FILE = "<file:path>"
"""Route part that captures a file's path below its workspace's root."""


class FilePath(StringConverter):
    """Matches any text, also line breaks."""

    regex = r"[\s\S]+"


register_converter(FilePath, "file")
