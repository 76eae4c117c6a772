"""Read settings from environment variables.

An invalid value stops the process at start with a sentence that names the variable. Sentences are logged, so they do
not quote addresses that may contain a password.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import environ
from django.core.exceptions import ImproperlyConfigured

FALSE_STRINGS = ("false", "off", "n", "no", "0", "")
"""The values that turn a switch off. django-environ itself takes every value that it does not know for off."""
POSTGRESQL_SCHEMES = ("postgres://", "postgresql://", "psql://", "pgsql://")
REDIS_SCHEMES = ("redis", "rediss", "unix")
"""The schemes of PostgreSQL's and Redis's addresses that django-environ and redis-py know."""
HOST = re.compile(r"(\*\.)?(\w([\w.-]*\w)?|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.IGNORECASE)
"""A host name or address, perhaps with a port. `*.` before it stands for all names below it."""

MAX_PORT = 65535
"""The highest port of TCP."""


class Environment(environ.Env):  # type: ignore[misc]  # django-environ publishes no types
    """Environment variables whose values are checked. Every method raises ImproperlyConfigured for an invalid value."""

    def whole_number(self, name: str, default: int, *, minimum: int = 1, maximum: int | None = None) -> int:
        """Return a whole number from `minimum` to `maximum`, or of at least `minimum` if `maximum` is None."""
        if name not in self.ENVIRON:
            return default
        text: str = self.str(name)
        try:
            value = int(text)
        except ValueError:
            raise ImproperlyConfigured(f"{name} is '{text}'. It must be a whole number.") from None
        if value < minimum:
            raise ImproperlyConfigured(f"{name} is {value}. It must be at least {minimum}.")
        if maximum is not None and value > maximum:
            raise ImproperlyConfigured(f"{name} is {value}. It must be at most {maximum}.")
        return value

    def number(self, name: str, default: float, *, can_be_zero: bool = False) -> float:
        """Return a finite number above 0, or 0 if it `can_be_zero`."""
        if name not in self.ENVIRON:
            return default
        text: str = self.str(name)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not can_be_zero):
            raise ImproperlyConfigured(
                f"{name} is '{text}'. It must be a number {'from' if can_be_zero else 'above'} 0."
            )
        return value

    def switch(self, name: str, default: bool) -> bool:
        """Return whether a switch is on."""
        if name not in self.ENVIRON:
            return default
        text: str = self.str(name)
        value = text.strip().lower()
        if value not in (*self.BOOLEAN_TRUE_STRINGS, *FALSE_STRINGS):
            raise ImproperlyConfigured(f"{name} is '{text}'. It must be 1 or 0.")
        return value in self.BOOLEAN_TRUE_STRINGS

    def choice(self, name: str, default: str, choices: Collection[str]) -> str:
        """Return one of `choices`."""
        text: str = self.str(name, default)
        if text not in choices:
            raise ImproperlyConfigured(f"{name} is '{text}'. It must be one of: {', '.join(choices)}.")
        return text

    def names(self, name: str, default: Sequence[str] = ()) -> list[str]:
        """Return the parts of a comma-separated list, without the spaces around them."""
        return [part.strip() for part in self.list(name, default=list(default)) if part.strip()]

    def hosts(self, name: str, default: Sequence[str] = ()) -> list[str]:
        """Return a comma-separated list of hosts, each perhaps with a port."""
        entries = self._names_without_credentials(name, default)
        for entry in entries:
            if HOST.fullmatch(entry) is None:
                raise ImproperlyConfigured(f"{name} names '{entry}'. Name hosts only, such as data.example.com.")
        return entries

    def domains(self, name: str) -> list[str]:
        """Return a comma-separated list of domains, in lower case. Subdomains of an entry are not part of it."""
        entries = self.hosts(name)
        for entry in entries:
            if entry.startswith("*.") or ":" in entry:
                raise ImproperlyConfigured(
                    f"{name} names '{entry}'. Name whole domains, such as example.com, and each subdomain."
                )
        return [entry.lower() for entry in entries]

    def web_address(self, name: str, default: str = "", *, can_be_empty: bool = False) -> str:
        """Return the http:// or https:// address of a host, without a path, or an empty text if it `can_be_empty`."""
        text: str = self.str(name, default).rstrip("/")
        if not text and can_be_empty:
            return ""
        _refuse_credentials(name, text)
        if not _is_http(text) or urlsplit(text).netloc != text.partition("://")[2]:
            raise ImproperlyConfigured(
                f"{name} is '{text}'. It must be http:// or https:// and a host, such as https://trainyard.example.com."
            )
        return text

    def endpoint(self, name: str) -> str:
        """Return an http:// or https:// address, which may have a path; empty if it is not set."""
        text: str = self.str(name, "")
        _refuse_credentials(name, text)
        if text and not _is_http(text):
            raise ImproperlyConfigured(
                f"{name} is '{text}'. It must be http:// or https:// and a host, such as http://collector:4318."
            )
        return text

    def package_indexes(self, name: str) -> list[str]:
        """Return a comma-separated list of package indexes: http:// or https:// addresses, or absolute folders."""
        entries = self._names_without_credentials(name)
        for entry in entries:
            if not entry.startswith(("/", "file:///")) and not _is_http(entry):
                raise ImproperlyConfigured(
                    f"{name} has '{entry}'. Name addresses that begin with http:// or https://, such as "
                    "https://pypi.org/simple, or absolute folders."
                )
        return entries

    def web_addresses(self, name: str) -> list[str]:
        """Return a comma-separated list of http:// and https:// addresses, which may have paths and queries."""
        entries = self._names_without_credentials(name)
        for entry in entries:
            if not _is_http(entry):
                raise ImproperlyConfigured(f"{name} has '{entry}', which does not begin with http:// or https://.")
        return entries

    def _names_without_credentials(self, name: str, default: Sequence[str] = ()) -> list[str]:
        """Return the parts of a comma-separated list, as `names` does, but refuse a list that contains an @."""
        entries = self.names(name, default)
        _refuse_credentials(name, ",".join(entries))  # joined, because a password may contain a comma
        return entries

    def bind_address(self, name: str, default: str) -> str:
        """Return the address and port of a server, `host:port`."""
        text: str = self.str(name, default)
        host, _, port = text.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
            raise ImproperlyConfigured(f"{name} is '{text}'. It must be an address and a port, such as {default}.")
        return text

    def time_zone(self, name: str, default: str) -> str:
        """Return the name of a time zone of the IANA database."""
        text: str = self.str(name, default)
        try:
            ZoneInfo(text)
        except (ValueError, OSError, LookupError):  # an invalid name, the name of a folder, an unknown name
            raise ImproperlyConfigured(
                f"{name} is '{text}'. It must be an IANA time zone, such as Asia/Shanghai."
            ) from None
        return text

    def database(self, name: str, default: str) -> dict[str, Any]:
        """Return Django's settings of a PostgreSQL database."""
        text: str = self.str(name, default)
        try:
            config: dict[str, Any] = self.db_url_config(text) if text.startswith(POSTGRESQL_SCHEMES) else {}
        except ValueError:  # the port is not a number
            config = {}
        if not config:
            raise ImproperlyConfigured(
                f"{name} is not an address of PostgreSQL, such as postgres://user:password@host/name. "
                "Percent-encode special characters in the password."
            )
        return config

    def redis_address(self, name: str, default: str) -> str:
        """Return the address of a Redis server."""
        text: str = self.str(name, default)
        try:
            parts = urlsplit(text)
            is_valid = parts.scheme in REDIS_SCHEMES and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ImproperlyConfigured(
                f"{name} is not an address of Redis, such as redis://host:6379/0. "
                "Percent-encode special characters in the password."
            )
        return text

    def mail_server(self, name: str) -> Mapping[str, Any]:
        """Return Django's settings of the server that sends emails. Without one, emails are logged."""
        try:
            config: dict[str, Any] = self.email_url(name, default="consolemail://")
        except (ValueError, ImproperlyConfigured):
            config = {}
        if not config or (config["EMAIL_BACKEND"].endswith(".smtp.EmailBackend") and not config["EMAIL_HOST"]):
            raise ImproperlyConfigured(
                f"{name} is not the address of a mail server, such as smtp+tls://user:password@host:587. "
                "Percent-encode special characters in the password."
            )
        return config


def _refuse_credentials(name: str, text: str) -> None:
    """Raise ImproperlyConfigured, without the value, if a text contains an @: what is before it may be a password."""
    if "@" in text:
        raise ImproperlyConfigured(f"{name} must not contain a user name, a password or an @.")


def host_of(url: str) -> str:
    """Return the host of a URL as requests name it: in lower case, without the port, an IPv6 address in brackets."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


def neighbouring_port(port: int, distance: int = 1) -> int:
    """Return the port `distance` above `port`, or below it where ports end."""
    return port + distance if port + distance <= MAX_PORT else port - distance


def _is_http(text: str) -> bool:
    """Return whether a text is an http:// or https:// address with a host, and a valid port or none."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number, or the host not an IPv6 address
        return False
