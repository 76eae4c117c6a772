"""Credentials of customers' image registries. The one rule: a password is only ever stored encrypted, and never shown.

The key is derived from SECRET_KEY; a key listed in SECRET_KEY_FALLBACKS still opens what it closed.
"""

from __future__ import annotations

import base64
import re

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings
from django.utils.translation import gettext_lazy as _

from console.accounts.errors import InvalidInput
from console.accounts.models import Organization
from storage.models import Registry

PURPOSE = b"trainyard registry credentials"
HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?(:[0-9]{1,5})?")


def save_registry(*, organization: Organization, host: str, username: str = "", password: str = "") -> Registry:
    """Store what it takes to pull from `host`, in place of what was stored. Raises InvalidInput."""
    host = host.strip().lower()
    if not HOST.fullmatch(host):
        sentence = _("Give the registry's host alone, such as registry.example.com or registry.example.com:5000.")
        raise InvalidInput(fields={"host": sentence})
    secret = _cipher().encrypt(password.encode()) if password else b""
    registry, _made = Registry.objects.update_or_create(
        organization=organization, host=host, defaults={"username": username, "secret": secret}
    )
    return registry


def registry_for(*, organization: Organization, reference: str) -> Registry | None:
    """The stored credentials for an image's reference, if there are any."""
    return Registry.objects.filter(organization=organization, host=reference.partition("/")[0].lower()).first()


def password_of(registry: Registry) -> str:
    """The password in the clear, for the backend that pulls. Empty when none can be read any more."""
    try:
        return _cipher().decrypt(bytes(registry.secret)).decode() if registry.secret else ""
    except InvalidToken:
        return ""


def _cipher() -> MultiFernet:
    keys = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    return MultiFernet([Fernet(_derived(key)) for key in keys])


def _derived(key: str | bytes) -> bytes:
    raw = key if isinstance(key, bytes) else key.encode()
    return base64.urlsafe_b64encode(HKDF(SHA256(), length=32, salt=None, info=PURPOSE).derive(raw))
