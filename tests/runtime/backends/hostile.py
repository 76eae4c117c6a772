"""What tests of isolation share: both ways to start, and words for scripts that try what they may not."""

from __future__ import annotations

from tests.console.processes import wait_for
from tests.runtime.conftest import MAY_IMPORT_ANYTHING, Yard

TRY = """
    import json, os
    def attempt(action, *arguments):
        try:
            return str(action(*arguments))
        except OSError as error:
            return type(error).__name__
    def read(path):
        with open(path, "rb") as file: return file.read(100)
    def write(path):
        with open(path, "w") as file: return file.write("x")
"""


def started(yard: Yard, how: str) -> Yard:
    """Ranks that are started by the interpreter's start (`cold`), or forked from one that is ready (`warm`)."""
    if how == "warm":
        warm(yard)
    return yard


def warm(yard: Yard) -> None:
    """From here on runs start warm: the nursery is there, and the image's zygote in it."""
    yard.backend = yard.another(warm_seconds=600)
    yard.preface = MAY_IMPORT_ANYTHING
    image = yard.spec().image
    yard.backend.prepare(image)
    wait_for(lambda: yard.backend.is_prepared(image), 30)
