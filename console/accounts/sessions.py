"""Removes ended sessions, which Django keeps."""

from __future__ import annotations

from celery import shared_task
from django.contrib.sessions.backends.db import SessionStore


@shared_task(name="console.accounts.sessions.clear_expired")
def clear_expired() -> None:
    """Delete the rows of ended sessions. Anonymous requests create some too, such as responses to a single sign-on."""
    SessionStore.clear_expired()
