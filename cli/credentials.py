"""The tokens of the consoles that this user has logged in to, in a file that only the user can read.

The file is `credentials.json` in `$XDG_CONFIG_HOME/trainyard` or `~/.config/trainyard`, with mode 0600:
`{"default": URL, "tokens": {URL: TOKEN}}`. For the console at `TRAINYARD_URL`, `TRAINYARD_TOKEN` has precedence over
the file. An http address in `TRAINYARD_URL` then needs `TRAINYARD_ALLOW_HTTP`, as `login` needs --allow-http.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from .errors import InvalidChoice, NotLoggedIn, UnsafeCredentials

FILE_MODE, FOLDER_MODE = 0o600, 0o700
"""Only the user can read the file, and list the folder."""
LOG_IN = "Run: trainyard login"
"""The advice in an error for a user without a token."""


@dataclass(frozen=True)
class Console:
    """A console and the token for it. The token is never shown."""

    url: str
    token: str = field(repr=False)


def normalize_url(text: str, *, allow_http: bool = False) -> str:
    """Return the address of a console in the form in which it is stored. Raises InvalidChoice, UnsafeCredentials.

    HTTP, which would send the token unencrypted, is accepted only for this machine, or with `allow_http`.
    """
    text = text.strip()
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        parts.port  # noqa: B018  # raises ValueError for an invalid port
        is_valid = parts.scheme in {"http", "https"} and "@" not in parts.netloc and text.isprintable()
    except ValueError:
        is_valid = False
    if not is_valid or not parts.hostname:
        raise InvalidChoice("Enter the address of a console, for example https://trainyard.example.com")
    if parts.scheme == "http" and not allow_http and not _is_this_machine(parts.hostname):
        raise UnsafeCredentials(
            f"{parts.hostname} is not this machine, and http would send the token unencrypted. Use https, or add "
            "--allow-http on a network that you trust."
        )
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def _is_this_machine(host: str) -> bool:
    """Return whether a host is this machine by its name or address: nothing is sent over a network then."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def default_path(environment: Mapping[str, str]) -> Path:
    """Return the path of the file with the tokens."""
    base = environment.get("XDG_CONFIG_HOME", "")
    # The XDG Base Directory Specification says that relative paths are ignored.
    folder = Path(base) if base.startswith("/") else Path.home() / ".config"
    return folder / "trainyard" / "credentials.json"


class Credentials:
    """The tokens in the file and in the environment. The environment has precedence."""

    def __init__(self, environment: Mapping[str, str], path: Path | None = None) -> None:
        self._environment = environment
        self.path = path or default_path(environment)

    def console(self, url: str = "") -> Console:
        """Return the console at `url`, else at TRAINYARD_URL, else of the last login.

        TRAINYARD_TOKEN is only for the console at TRAINYARD_URL. Raises NotLoggedIn, InvalidChoice, UnsafeCredentials.
        """
        own_url = self._environment.get("TRAINYARD_URL", "")
        # `login` has asked for --allow-http before it stored an address with http.
        url = normalize_url(url or own_url, allow_http=True) if url or own_url else ""
        if token := self._environment.get("TRAINYARD_TOKEN", "").strip():
            if not own_url:
                raise NotLoggedIn("TRAINYARD_TOKEN is set. Set TRAINYARD_URL to the console that it is for, too.")
            if url == normalize_url(own_url, allow_http=True):
                allow_http = bool(self._environment.get("TRAINYARD_ALLOW_HTTP"))
                return Console(normalize_url(url, allow_http=allow_http), token)
        default_url, tokens = self._read()
        url = url or default_url
        if not url:
            raise NotLoggedIn(f"You are not logged in. {LOG_IN}")
        if url not in tokens:
            raise NotLoggedIn(f"You are not logged in to {url}. {LOG_IN} {url}")
        return Console(url, tokens[url])

    def save(self, console: Console) -> None:
        """Store the token, and make the console the default."""
        _default, tokens = self._read()
        self._write(console.url, tokens | {console.url: console.token})

    def remove(self, url: str = "") -> str:
        """Remove the token of a console (default: the last login's) and return the console's address.

        Raises NotLoggedIn.
        """
        default_url, tokens = self._read()
        url = normalize_url(url, allow_http=True) if url else default_url
        if tokens.pop(url, None) is None:
            raise NotLoggedIn("There is no such login.")
        if url == default_url:
            default_url = next(iter(tokens), "")  # the oldest of the other logins
        self._write(default_url, tokens)
        return url

    def _read(self) -> tuple[str, dict[str, str]]:
        """Return the default console and the tokens by address. Raises UnsafeCredentials."""
        try:
            with self.path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if os.name == "posix" and mode & 0o077:
                    raise UnsafeCredentials(f"Others can read your tokens. Run: chmod 600 {self.path}")
                content = json.load(file)
            return str(content["default"]), {str(url): str(token) for url, token in content["tokens"].items()}
        except FileNotFoundError:
            return "", {}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UnsafeCredentials(f"{self.path} is damaged. Delete it and log in again.") from None

    def _write(self, default_url: str, tokens: Mapping[str, str]) -> None:
        """Replace the file atomically. Other users cannot read it, not even while it is written."""
        self.path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        new_path = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        new_fd = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            with os.fdopen(new_fd, "w", encoding="utf-8") as file:
                json.dump({"default": default_url, "tokens": tokens}, file, indent=2)
            new_path.replace(self.path)
        except BaseException:
            new_path.unlink(missing_ok=True)
            raise
