"""Run a script, unchanged, that expects its data at a fixed path: `with_links.py PATH=FOLDER ... SCRIPT ...`."""

import contextlib
import runpy
import sys
from pathlib import Path

del sys.argv[0]  # as if the script had been started itself
while "=" in sys.argv[0]:
    place, _, folder = sys.argv.pop(0).partition("=")
    # Every rank of a node runs this; the first one creates the link.
    with contextlib.suppress(FileExistsError):
        Path(place).symlink_to(folder)
runpy.run_path(sys.argv[0], run_name="__main__")
