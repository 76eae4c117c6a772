"""The session of one run of the program, which all commands use: client, credentials, output and questions."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click
import httpx

from .client import Client
from .credentials import Console, Credentials
from .errors import InvalidChoice
from .screen import Screen
from .transport import Transport
from .uploads import Uploads


@dataclass
class Session:
    """One run of the program. `url` is the option --url, `http` the httpx transport (None: the default one).

    Tests replace `environment`, `http`, `pause` and `is_interactive`.
    """

    url: str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    http: httpx.BaseTransport | None = None
    pause: Callable[[float], None] = time.sleep
    is_interactive: Callable[[], bool] = field(default_factory=lambda: sys.stdin.isatty)
    screen: Screen = field(default_factory=Screen)

    @property
    def credentials(self) -> Credentials:
        """Return the tokens of this user."""
        return Credentials(self.environment)

    def connect(self, console: Console | None = None) -> Client:
        """Return a client of `console` (default: the one that the options and credentials name). Raises NotLoggedIn."""
        console = console or self.credentials.console(self.url)
        return Client(Transport(console, transport=self.http, pause=self.pause))

    def uploads(self, client: Client) -> Uploads:
        """Return the sender of large files. It stores the ids of incomplete uploads in the user's state folder."""
        base = self.environment.get("XDG_STATE_HOME", "")
        folder = Path(base) if base.startswith("/") else Path.home() / ".local" / "state"
        return Uploads(client, folder / "trainyard" / "uploads.json", pause=self.pause)

    def confirm(self, question: str, *, is_confirmed: bool, option: str = "--yes") -> None:
        """Ask before an action that costs money or deletes something, unless `is_confirmed`.

        Raises click.Abort if the answer is no, InvalidChoice if there is no terminal; `option` is the option that
        confirms the action without a question.
        """
        if is_confirmed:
            return
        if not self.is_interactive():
            raise InvalidChoice(f"{question} There is no terminal to ask on: add {option}.")
        # In JSON mode, standard output has only the document: questions go to standard error.
        click.confirm(question, abort=True, err=self.screen.is_json)


pass_session = click.make_pass_decorator(Session)


def _set_json(context: click.Context, _option: click.Parameter, is_json: bool) -> None:
    """Turn JSON mode on if the command has the option --json."""
    if is_json:
        context.find_object(Session).screen.is_json = True  # type: ignore[union-attr]  # `main` has created it


json_option = click.option(
    "--json", is_flag=True, expose_value=False, callback=_set_json, help="Print one JSON document."
)
"""Adds `--json` to a command."""
yes_option = click.option("--yes", "-y", is_flag=True, help="Answer all questions with yes.")
