"""`python install_image.py NAME FOLDER FLAVOUR`: install a recipe of deploy/images into FOLDER, for a container image.

FLAVOUR is cpu or cuda. The code that builds the local backend's images does the work. It leaves out the real run of two
sandboxed processes, which a container build cannot do: start a free check of the image in the console.
"""

import sys
from pathlib import Path

from runtime.errors import RuntimeFault
from runtime.images import builder
from runtime.specs import Flavour


class Lines:
    """Every step and every line, for the build's log."""

    def step(self, text: str) -> None:
        """A new step begins."""
        print("==>", text, flush=True)

    def output(self, line: str) -> None:
        """What its programs say."""
        print("   ", line, flush=True)


if __name__ == "__main__":
    name, folder, flavour = sys.argv[1:]
    try:
        builder.install(Path(folder), name, flavour=Flavour(flavour), progress=Lines())
    except RuntimeFault as fault:
        sys.exit(str(fault))
