"""Print sentences and tables for people, or one JSON document for programs (`--json`).

Text from the console, especially the output of a run, can contain control characters that a terminal obeys: they could
change its title or hide text. `clean` removes them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from decimal import Decimal
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?", re.DOTALL)
"""Control sequences of terminals (ECMA-48): CSI, then OSC and the other strings, then all others."""
COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
"""The control sequences (SGR) that set colours and styles, and nothing else."""
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and line feed, and those that change the direction of text."""
PIPE_WIDTH = 240
"""Characters in a line of a table that is not printed on a terminal: wide enough for a row of every table, so that
programs such as `grep` read each row as one line."""
# The decimals of each currency's minor unit, as in the console's `billing.currencies`, which this program does not
# import. Currencies in neither set have two.
ZERO_DECIMALS = frozenset(
    ("BIF", "CLP", "DJF", "GNF", "JPY", "KMF", "KRW", "MGA", "PYG", "RWF", "VND", "VUV", "XAF", "XOF", "XPF")
)
THREE_DECIMALS = frozenset(["BHD", "JOD", "KWD", "OMR", "TND"])
Advance = Callable[[int], None]
"""A function that advances a progress bar by a number of bytes."""


def clean(text: str) -> str:
    """Return text without control sequences and control characters; tabs and line feeds stay."""
    return CONTROLS.sub("", ESCAPES.sub("", text))


def clean_output(text: str) -> str:
    """Return a line of a run's output without control sequences and control characters, but with its colours.

    A carriage return begins the line again, as progress bars do: only the text after the last one is returned.
    """
    line = text.rstrip("\r").rpartition("\r")[2]
    parts, position = list[str](), 0
    for colour in COLOURS.finditer(line):
        parts += [clean(line[position : colour.start()]), colour[0]]
        position = colour.end()
    result = "".join([*parts, clean(line[position:])])
    return f"{result}\x1b[0m" if parts else result  # a colour must not continue in the next line


def decimals(currency: str) -> int:
    """Return the number of decimals of the currency's minor unit."""
    if currency in ZERO_DECIMALS:
        return 0
    return 3 if currency in THREE_DECIMALS else 2


def money(amount_minor: int | str, currency: str) -> str:
    """Format an amount in minor units, for example `12.50 USD`."""
    places = decimals(currency)
    return f"{Decimal(amount_minor).scaleb(-places):,.{places}f} {currency}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 file` or `2 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(size_bytes: int) -> str:
    """Format a size with a decimal unit, for example `1.5 MB`."""
    if size_bytes < 1000:
        return count(size_bytes, "byte")
    value, units = size_bytes / 1000, ["kB", "MB", "GB"]
    while round(value, 1) >= 1000 and len(units) > 1:  # rounded, so that no size is 1,000.0 kB
        value, units = value / 1000, units[1:]
    return f"{value:,.1f} {units[0]}"


class Screen:
    """Prints for people on standard output.

    In JSON mode (`is_json`), standard output gets only the JSON document, and all text goes to standard error.
    """

    def __init__(self) -> None:
        self.is_json = False

    @property
    def console(self) -> Console:
        """Return the console of `rich` on which text for people is printed."""
        file = sys.stderr if self.is_json else sys.stdout
        width = None if file.isatty() else PIPE_WIDTH
        return Console(file=file, width=width, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def print(self, text: str, *, style: str = "") -> None:
        """Print a sentence."""
        self.console.print(Text(clean(text), style=style))

    def error(self, code: str, message: str, fields: dict[str, str]) -> None:
        """Print an error on standard error."""
        if self.is_json:
            sys.stderr.write(json.dumps({"code": code, "message": message, "fields": fields}) + "\n")
            return
        console = Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=True)
        console.print(Text.assemble((clean(f"Error ({code}): "), "bold red"), clean(message)))
        for name, sentence in fields.items():
            console.print(Text(clean(f"  {name}: {sentence}")))

    def print_if_json(self, value: Any) -> bool:
        """In JSON mode, print a value as a JSON document. Return whether it was printed."""
        if self.is_json:
            sys.stdout.write(json.dumps(_to_plain(value), indent=2) + "\n")
        return self.is_json

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        title: str = "",
        right_aligned: Collection[str] = (),
    ) -> None:
        """Print a table. `right_aligned` names the columns that are aligned to the right, such as numbers.

        If all names in `columns` are empty, the table has no header.
        """
        table = Table(
            title=Text(clean(title)) if title else None,
            title_justify="left",
            title_style="bold",
            box=None,
            pad_edge=False,
        )
        table.show_header = any(columns)
        for name in columns:
            table.add_column(name, justify="right" if name in right_aligned else "left")
        for row in rows:
            table.add_row(*(Text(clean(cell)) for cell in row))
        self.console.print(table)

    @contextmanager
    def transfer(self, title: str, size_bytes: int | None) -> Iterator[Advance]:
        """Show a progress bar of bytes, and yield a function that advances it.

        `size_bytes` is the total; None if it is not known.
        """
        is_hidden = size_bytes == 0 or not self.console.is_terminal
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=self.console, disable=is_hidden) as bar:
            task = bar.add_task(clean(title), total=size_bytes)
            yield lambda added_bytes: bar.advance(task, added_bytes)


def _to_plain(value: Any) -> Any:
    """Return a value in which dictionaries replace the dataclasses."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {name: _to_plain(item) for name, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, list | tuple) else value
