"""Read typed values from one cluster's object in TRAINYARD_CLUSTERS. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

DNS_LABEL = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
"""A DNS label (RFC 1123), which has at most 63 characters."""


class SettingsReader:
    """Reads typed values from one cluster's JSON object.

    Each method raises ValueError with the setting's name for an invalid value, and returns the default for a missing
    one.
    """

    def __init__(self, name: str, data: object) -> None:
        self.cluster = name
        if not DNS_LABEL.match(name):
            raise ValueError(f"'{name}' cannot name a cluster: use lower-case letters, digits and dashes.")
        if not isinstance(data, Mapping):
            raise ValueError(f"The cluster '{name}' must be a JSON object.")  # noqa: TRY004 - settings raise ValueError only
        self.data: Mapping[str, Any] = data

    def error(self, setting: str, problem: str) -> ValueError:
        """Return the error for a setting. `problem` follows the setting's name: "must be a string"."""
        return ValueError(f"The cluster '{self.cluster}': '{setting}' {problem}.")

    def refuse_unknown(self, known_settings: set[str], *, backend: str) -> None:
        """Refuse a setting that is not in `known_settings`, and a setting `backend` that names another backend."""
        for setting in self.data:
            if setting not in known_settings:
                raise self.error(setting, f"is not a setting; the settings are {', '.join(sorted(known_settings))}")
        if self.data.get("backend", backend) != backend:
            raise self.error("backend", f"must be {backend} here")

    def text(self, setting: str, default: str = "") -> str:
        """Return a string."""
        value = self.data.get(setting, default)
        if not isinstance(value, str):
            raise self.error(setting, "must be a string")
        return value

    def matching(self, setting: str, default: str, pattern: re.Pattern[str], description: str) -> str:
        """Return a string that matches `pattern`, or the default for an empty string."""
        value = self.text(setting, default)
        if value and not pattern.match(value):
            raise self.error(setting, f"is '{value}', which is not {description}")
        return value or default

    def choice(self, setting: str, default: str, choices: tuple[str, ...]) -> str:
        """Return one of the choices."""
        value = self.text(setting, default)
        if value not in choices:
            raise self.error(setting, f"must be one of {', '.join(choices)}")
        return value

    def flag(self, setting: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self.data.get(setting, default)
        if not isinstance(value, bool):
            raise self.error(setting, "must be true or false")
        return value

    def number(self, setting: str, default: int, *, minimum: int) -> int:
        """Return a whole number."""
        value = self.data.get(setting, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(setting, f"must be a whole number of at least {minimum}")
        return value

    def mapping(self, setting: str) -> Mapping[str, Any]:
        """Return a JSON object."""
        value = self.data.get(setting, {})
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self.error(setting, "must be a JSON object")
        return value

    def string_mapping(self, setting: str) -> Mapping[str, str]:
        """Return a JSON object whose values are strings that are not empty."""
        value = self.mapping(setting)
        if not all(isinstance(text, str) and text for text in value.values()):
            raise self.error(setting, "must map names to strings that are not empty")
        return MappingProxyType(dict(value))
