"""Run a script, unchanged, that has its data in a place of its own: `with_links.py PLACE=FOLDER ... SCRIPT ...`."""

import contextlib
import runpy
import sys
from pathlib import Path

del sys.argv[0]
while "=" in sys.argv[0]:
    place, _, folder = sys.argv.pop(0).partition("=")
    # Every rank of a node comes by.
    with contextlib.suppress(FileExistsError):
        Path(place).symlink_to(folder)
runpy.run_path(sys.argv[0], run_name="__main__")
