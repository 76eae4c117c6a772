"""Read Jupyter notebooks that customers wrote, to show them in a page or to turn them into Python scripts.

A page shows the source of cells, and outputs as text and PNG pictures. HTML and SVG are never shown, because they could
contain scripts.
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
"""The size of the largest notebook that is shown, with the pictures that it contains. It is parsed in memory."""
MAX_CELLS = 500
"""The most cells that a page shows. Browsers are slow with longer pages."""
MAX_TEXT_LENGTH = 20_000
"""How many characters of a cell's source, and of each output, are shown. Browsers are slow with longer pages."""
EXPORT_MARK = "# Exported from a notebook. The next export replaces this file."
"""The first line of an exported script. An export never replaces a file without it."""
_IPYTHON_COMMAND = re.compile(r"\s*(?:%{1,2}[A-Za-z]|!)")
"""The start of a line that is a command of IPython and not Python, such as `%matplotlib inline` or `!pip list`."""
_ANSI_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""An escape sequence that colours text in a terminal (ECMA-48). Tracebacks contain them."""


@dataclass(frozen=True)
class Output:
    """One output of a cell: a `text`, or a picture, whose Base64 is `png`.

    `is_error` is True for a traceback, and for what was written to the error output.
    """

    text: str = ""
    png: str = ""
    is_error: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell. `execution_count` is the number that Jupyter shows beside code; None if it is text or did not run."""

    is_code: bool
    source: str
    execution_count: int | None
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class Notebook:
    """A notebook's cells. `is_complete` is False if it has more than MAX_CELLS."""

    cells: tuple[Cell, ...]
    is_complete: bool


def read_notebook(file: OpenFile) -> Notebook:
    """Return the first cells of an open notebook. Raises NotText if the file is no notebook or too large."""
    with _translate_malformed():
        cells = _cells(file)
        shown = tuple(_cell(cell) for cell in cells[:MAX_CELLS])
    return Notebook(shown, is_complete=len(shown) == len(cells))


def script_of(file: OpenFile) -> str:
    """Return a Python script with the code of an open notebook. Raises NotText if the file is no notebook or too large.

    Text and commands of IPython become comments. A line `# %%` begins each cell; editors such as VS Code know it.
    """
    parts = [EXPORT_MARK]
    with _translate_malformed():
        for cell in _cells(file):
            lines = _joined(cell.get("source", "")).splitlines()
            if cell["cell_type"] == "code":
                is_cell_command = bool(lines) and lines[0].startswith("%%")  # such as `%%bash`, for the whole cell
                code = [f"# {line}" if is_cell_command or _IPYTHON_COMMAND.match(line) else line for line in lines]
                parts.append("\n".join(["# %%", *code]))
            else:
                parts.append("\n".join(["# %% [markdown]", *(f"# {line}".rstrip() for line in lines)]))
    return "\n\n".join(parts) + "\n"


@contextmanager
def _translate_malformed() -> Iterator[None]:
    """Raise NotText in place of the exceptions of the block if the file is no notebook."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise NotText(_("This file is not a notebook that can be shown. Download it instead.")) from None


def _cells(file: OpenFile) -> list[dict[str, Any]]:
    """Return the cells as the file has them (nbformat 4). Raises NotText if the file is too large."""
    data = file.stream.read(NOTEBOOK_BYTES + 1)
    if len(data) > NOTEBOOK_BYTES:
        raise NotText(_("This notebook is too large to show here. Download it instead."))
    return list(json.loads(data)["cells"])


def _cell(cell: dict[str, Any]) -> Cell:
    """Return the part of a cell that a page shows."""
    is_code = cell["cell_type"] == "code"
    execution_count = cell.get("execution_count")
    outputs = (_output(output) for output in cell.get("outputs", ())) if is_code else ()
    return Cell(
        is_code,
        _text(cell.get("source", "")),
        execution_count if isinstance(execution_count, int) else None,
        tuple(filter(None, outputs)),
    )


def _output(output: dict[str, Any]) -> Output | None:
    """Return an output that can be shown; None if it has neither text nor a PNG picture, such as a widget."""
    if output["output_type"] == "error":
        return Output(text=_text("\n".join(map(str, output.get("traceback", ())))), is_error=True)
    data = output.get("data", {})
    if png := _png(data.get("image/png")):
        return Output(png=png)
    text = _text(output.get("text", data.get("text/plain", "")))
    return Output(text=text, is_error=output.get("name") == "stderr") if text else None


def _text(value: Any) -> str:
    """Return the text of a multi-line string, without _ANSI_ESCAPE, and cut at MAX_TEXT_LENGTH."""
    text = _ANSI_ESCAPE.sub("", _joined(value))
    return text if len(text) <= MAX_TEXT_LENGTH else text[:MAX_TEXT_LENGTH] + "\n⋯"


def _joined(value: Any) -> str:
    """Return the text of a multi-line string, which nbformat stores as a string or as a list of lines."""
    text = value if isinstance(value, str) else "".join(map(str, value))
    # JSON can escape half of a surrogate pair, which UTF-8 cannot encode.
    return text.encode(errors="replace").decode()


def _png(value: Any) -> str:
    """Return the Base64 of a PNG picture without line breaks; empty for any other value."""
    if not isinstance(value, str | list):
        return ""
    try:
        data = base64.b64decode(value if isinstance(value, str) else "".join(value))
    except (binascii.Error, ValueError):
        return ""
    return base64.b64encode(data).decode() if image_type(data) == "image/png" else ""
