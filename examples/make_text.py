"""Write the chapters of Python's reference manual, which every Python contains, to one text file.

    python examples/make_text.py python.txt [KILOBYTES]

Writes about 460 kB, or the first KILOBYTES of it. Publish the file as a dataset for the language models of these
examples.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics


def write_text(path: Path, kilobytes: int | None = None) -> None:
    """Write the text in UTF-8: all of it, or the first `kilobytes` times 1,000 bytes."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    path.write_bytes(text if kilobytes is None else text[: kilobytes * 1000])


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: make_text.py OUT.txt [KILOBYTES]")
    write_text(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else None)
