"""Read the cells of Jupyter notebooks that customers wrote: source, text and PNG pictures, never HTML or SVG.

`script_of` makes a Python script of a notebook.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext_lazy as _

from storage.errors import NotText
from storage.files import OpenFile
from storage.previews import image_type

NOTEBOOK_BYTES = 10 * 1024**2
"""The largest notebook that is shown. Its pictures are part of it."""
MAX_CELLS = 500
"""Cells that are shown. Longer pages are slow in browsers."""
MAX_TEXT = 20_000
"""Characters of a source or an output that are shown."""
EXPORT_MARK = "# Exported from a notebook. The next export replaces this file."
"""The first line of an exported script. A file without it is not replaced."""
_MAGIC = re.compile(r"\s*(?:%{1,2}[A-Za-z]|!)")
"""Start of a line with a command of IPython instead of Python, such as `%matplotlib inline` or `!pip list`."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


@dataclass(frozen=True)
class Output:
    """One output of a cell: `text`, or `png` as the base64 of a picture. `is_error` for a traceback."""

    text: str = ""
    png: str = ""
    is_error: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell. `number` counts executions; None for text, and for code that was not run."""

    is_code: bool
    source: str
    number: int | None
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class Notebook:
    """A notebook's cells. `is_complete` is False if it has more than are shown."""

    cells: tuple[Cell, ...]
    is_complete: bool


def read_notebook(file: OpenFile) -> Notebook:
    """Return the cells of an open notebook. Raises NotText if it is none, or too large."""
    with _translate_malformed():
        cells = _cells(file)
        shown = tuple(_cell(cell) for cell in cells[:MAX_CELLS])
    return Notebook(shown, is_complete=len(shown) == len(cells))


def script_of(file: OpenFile) -> str:
    """Return a Python script with the code of an open notebook. Raises NotText if it is none, or too large.

    Text and commands of IPython become comments. `# %%` marks each cell, as editors expect it.
    """
    parts = [EXPORT_MARK]
    with _translate_malformed():
        for cell in _cells(file):
            lines = _joined(cell.get("source", "")).splitlines()
            if cell["cell_type"] == "code":
                is_for_ipython = bool(lines) and lines[0].startswith("%%")
                code = [f"# {line}" if is_for_ipython or _MAGIC.match(line) else line for line in lines]
                parts.append("\n".join(["# %%", *code]))
            else:
                parts.append("\n".join(["# %% [markdown]", *(f"# {line}".rstrip() for line in lines)]))
    return "\n\n".join(parts) + "\n"


@contextmanager
def _translate_malformed() -> Iterator[None]:
    """Raise NotText in place of the errors that a file causes if it is no notebook."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise NotText(_("This file is not a notebook that can be shown. Download it instead.")) from None


def _cells(file: OpenFile) -> list[dict[str, Any]]:
    data = file.stream.read(NOTEBOOK_BYTES + 1)
    if len(data) > NOTEBOOK_BYTES:
        raise NotText(_("This notebook is too large to show here. Download it instead."))
    return list(json.loads(data)["cells"])


def _cell(cell: dict[str, Any]) -> Cell:
    is_code = cell["cell_type"] == "code"
    number = cell.get("execution_count")
    outputs = (_output(output) for output in cell.get("outputs", ())) if is_code else ()
    return Cell(
        is_code,
        _text(cell.get("source", "")),
        number if isinstance(number, int) else None,
        tuple(filter(None, outputs)),
    )


def _output(output: dict[str, Any]) -> Output | None:
    """Return an output that can be shown; None for widgets and the like, which have neither text nor a picture."""
    if output["output_type"] == "error":
        return Output(text=_text("\n".join(map(str, output.get("traceback", ())))), is_error=True)
    data = output.get("data", {})
    if png := _png(data.get("image/png")):
        return Output(png=png)
    text = _text(output.get("text", data.get("text/plain", "")))
    return Output(text=text, is_error=output.get("name") == "stderr") if text else None


def _text(value: Any) -> str:
    """Return a multi-line string, cut, and without the codes that colour a terminal."""
    text = _ANSI.sub("", _joined(value))
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "\n⋯"


def _joined(value: Any) -> str:
    """Join the lines of a multi-line string."""
    text = value if isinstance(value, str) else "".join(map(str, value))
    return text.encode(errors="replace").decode()


def _png(value: Any) -> str:
    """Return the base64 of a PNG without line breaks; empty for anything else."""
    if not isinstance(value, str | list):
        return ""
    try:
        data = base64.b64decode(value if isinstance(value, str) else "".join(value))
    except (binascii.Error, ValueError):
        return ""
    return base64.b64encode(data).decode() if image_type(data) == "image/png" else ""
