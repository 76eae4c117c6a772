"""Log in, log out, and show the account."""

from __future__ import annotations

import sys

import click

from ..credentials import Console, normalize_url
from ..errors import InvalidChoice
from ..schemas import WhoAmI
from ..session import Session, json_option, pass_session

MAX_TOKEN_LENGTH = 500
"""Longest input that is accepted as a token. Tokens are much shorter; a longer input is probably the wrong file."""


@click.command()
@click.argument("url", default="")
@click.option("--browser", is_flag=True, help="Open the page where tokens are created.")
@click.option("--allow-http", is_flag=True, help="Allow http to another machine: the token is not encrypted then.")
@json_option
@pass_session
def login(session: Session, url: str, browser: bool, allow_http: bool) -> None:
    """Log in to the console at URL with an API token.

    The program asks for the token, or reads it from the standard input: `trainyard login URL < file`. The token is kept
    in a file that only you can read.
    """
    is_interactive = session.is_interactive()
    url = url or session.url or session.environment.get("TRAINYARD_URL", "")
    if not url:
        if not is_interactive:
            raise InvalidChoice("Name the console: trainyard login https://trainyard.example.com")
        # In JSON mode, standard output has only the document: questions go to standard error.
        url = click.prompt("Address of the console", err=session.screen.is_json)
    url = normalize_url(url, allow_http=allow_http)
    page = f"{url}/tokens/"
    if is_interactive:
        session.screen.print(f"Create a token at {page} and paste it here. It is not shown.")
        if browser:
            click.launch(page)
        token = click.prompt("Token", hide_input=True, err=session.screen.is_json)
    else:
        token = sys.stdin.read(MAX_TOKEN_LENGTH + 1)
    token = token.strip()
    if not token.isascii() or not token.isprintable() or not 0 < len(token) <= MAX_TOKEN_LENGTH or " " in token:
        raise InvalidChoice(f"This is not a token. Create one at {page}")
    console = Console(url, token)
    client = session.connect(console)
    me = client.whoami()
    session.credentials.save(console)
    if not session.screen.print_if_json({"url": url, **_account_data(me)}):
        session.screen.print(f"Logged in to {url} as {me.email}, {me.role} of {me.organization.name}.", style="green")
        if not me.organization.service_active:
            session.screen.print(f"The service is not active yet. Activate it at {url}")


@click.command()
@json_option
@pass_session
def logout(session: Session) -> None:
    """Delete the token of a console from this machine. It stays valid until you revoke it on the console's page."""
    url = session.credentials.remove(session.url)
    if not session.screen.print_if_json({"url": url}):
        session.screen.print(f"Logged out of {url}. Revoke the token at {url}/tokens/ if you no longer need it.")


@click.command()
@json_option
@pass_session
def whoami(session: Session) -> None:
    """Show which account and organization the token is for."""
    client = session.connect()
    me = client.whoami()
    if not session.screen.print_if_json({"url": client.url, **_account_data(me)}):
        session.screen.print(f"{me.email}, {me.role} of {me.organization.name}, at {client.url}")


def _account_data(me: WhoAmI) -> dict[str, object]:
    """Return the account for the JSON document of a command."""
    return {
        "email": me.email,
        "organization": me.organization.name,
        "role": me.role,
        "capabilities": list(me.capabilities),
        "service_active": me.organization.service_active,
    }
