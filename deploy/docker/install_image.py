"""`python install_image.py NAME FOLDER`: a recipe of deploy/images installed into FOLDER, for a container image.

The one rule: the very code that builds the local backend's images does it. What it adds there, a real run of two
sandboxed processes, can't be done while a container image is built: a free check of the image, in the console, does it.
"""

import sys
from pathlib import Path

from runtime.backends import builder
from runtime.errors import RuntimeFault


class Lines:
    """Every step and every line, for the build's log."""

    def step(self, text: str) -> None:
        """A new step begins."""
        print("==>", text, flush=True)

    def output(self, line: str) -> None:
        """What its programs say."""
        print("   ", line, flush=True)


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    try:
        builder.install(Path(folder), name, progress=Lines())
    except RuntimeFault as fault:
        sys.exit(str(fault))
