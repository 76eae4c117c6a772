"""Password hashing with a limit on concurrent hashes, so that log-ins cannot exhaust memory."""

from __future__ import annotations

import threading
from typing import Any

from django.contrib.auth.hashers import Argon2PasswordHasher

MAX_CONCURRENT_HASHES = 2
"""Largest number of concurrent hashes per process. Each takes 100 MiB (`memory_cost`) for about 0.1 s; others wait."""

_slots = threading.BoundedSemaphore(MAX_CONCURRENT_HASHES)


class BoundedArgon2PasswordHasher(Argon2PasswordHasher):
    """Django's Argon2 hasher with a limited number of concurrent hashes."""

    def encode(self, password: str, salt: str, *args: Any, **kwargs: Any) -> str:
        """Hash a password once a slot is free."""
        with _slots:
            return super().encode(password, salt, *args, **kwargs)

    def verify(self, password: str, encoded: str) -> bool:
        """Verify a password once a slot is free."""
        with _slots:
            return super().verify(password, encoded)
