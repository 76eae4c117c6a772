"""The part of an address that names a file: whatever a file may be called, a line break included.

The one rule: what code wrote into a workspace can be listed, opened and deleted. Django's own `path` ends at a line.
"""

from __future__ import annotations

from django.urls import register_converter
from django.urls.converters import StringConverter

FILE = "<file:path>"
"""A file's path below its workspace's root, in an address."""


class FilePath(StringConverter):
    """Any text."""

    regex = r"[\s\S]+"


register_converter(FilePath, "file")
