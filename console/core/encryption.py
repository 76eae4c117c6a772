"""Encrypt what the console must be able to read again: customers' secrets, keys of second factors, notebooks' tickets.

Each encryption key is derived from SECRET_KEY and a purpose, which names one kind of secret. So a text of one kind
cannot be decrypted as another. Texts that were encrypted with a former SECRET_KEY can be decrypted as long as
SECRET_KEY_FALLBACKS has that key.
"""

from __future__ import annotations

import base64

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings


def encrypt(text: str, *, purpose: bytes) -> bytes:
    """Return the encrypted text. Only `decrypt` with the same `purpose` can decrypt it, so never change a purpose."""
    return _cipher(purpose).encrypt(text.encode())


def decrypt(data: bytes | memoryview[int], *, purpose: bytes) -> str | None:
    """Return the decrypted text; None if no key decrypts it, because SECRET_KEY has changed or `data` is forged."""
    try:
        return _cipher(purpose).decrypt(bytes(data)).decode()
    except InvalidToken:
        return None


def _cipher(purpose: bytes) -> MultiFernet:
    """Return a cipher that encrypts with SECRET_KEY, and decrypts with SECRET_KEY and SECRET_KEY_FALLBACKS."""
    keys = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    return MultiFernet([Fernet(_derive_key(key, purpose)) for key in keys])


def _derive_key(key: str | bytes, purpose: bytes) -> bytes:
    """Return the encryption key of a purpose, which is the `info` of HKDF (RFC 5869)."""
    key_bytes = key if isinstance(key, bytes) else key.encode()
    # Fernet's keys have 32 bytes, in URL-safe Base64.
    return base64.urlsafe_b64encode(HKDF(SHA256(), length=32, salt=None, info=purpose).derive(key_bytes))
