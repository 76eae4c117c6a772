"""`python install_image.py NAME FOLDER FLAVOUR`: install a recipe of deploy/images into FOLDER, for a container image.

FLAVOUR is cpu or cuda. The code that builds the local backend's images does the work, without its last test: two
sandboxed processes cannot run in a container build. Start a free check of the image in the console instead.
"""

import sys
from pathlib import Path

from runtime.errors import RuntimeFault
from runtime.images import builder
from runtime.specs import Flavour


class PrintedProgress:
    """Prints each step, and each line of output, to the build's log (`builder.Progress`)."""

    def step(self, text: str) -> None:
        """Print the title of a step that begins."""
        print("==>", text, flush=True)

    def output(self, line: str) -> None:
        """Print a line of a program's output."""
        print("   ", line, flush=True)


if __name__ == "__main__":
    name, folder, flavour = sys.argv[1:]
    try:
        builder.install(Path(folder), name, flavour=Flavour(flavour), progress=PrintedProgress())
    except RuntimeFault as fault:
        sys.exit(str(fault))
