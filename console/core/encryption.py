"""Encrypt credentials that the console must read again: customers' secrets and the keys of second factors.

The keys are derived from SECRET_KEY, one for each purpose. Keys in SECRET_KEY_FALLBACKS still decrypt what they
encrypted.
"""

from __future__ import annotations

import base64

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings


def encrypt(text: str, *, purpose: bytes) -> bytes:
    """Return the text encrypted with the key of this purpose."""
    return _cipher(purpose).encrypt(text.encode())


def decrypt(data: bytes | memoryview[int], *, purpose: bytes) -> str | None:
    """Return the decrypted text; None if no key decrypts it any more."""
    try:
        return _cipher(purpose).decrypt(bytes(data)).decode()
    except InvalidToken:
        return None


def _cipher(purpose: bytes) -> MultiFernet:
    keys = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    return MultiFernet([Fernet(_derive_key(key, purpose)) for key in keys])


def _derive_key(key: str | bytes, purpose: bytes) -> bytes:
    """Return the key of a purpose. `purpose` is HKDF's info: it keeps the keys of different purposes apart."""
    raw = key if isinstance(key, bytes) else key.encode()
    return base64.urlsafe_b64encode(HKDF(SHA256(), length=32, salt=None, info=purpose).derive(raw))
