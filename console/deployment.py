"""Check whether the settings suit a deployment on several machines.

The defaults suit one machine: a generated key, embedded servers, printed mail, sandbox payments. On several machines
they fail only in use; for example, one replica does not know the sessions of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from django.conf import settings

PLACEHOLDER = "CHANGE-ME"
"""The text in the example files of `deploy/` that an operator must replace by a value."""
MIN_KEY_LENGTH = 50
"""The shortest SECRET_KEY in characters, as in Django's own deployment check."""
CHECKED_FOR_PLACEHOLDER = (
    "TRAINYARD_URL", "SECRET_KEY", "REDIS_URL", "STRIPE_SECRET_KEY", "STRIPE_WEBHOOK_SECRETS", "ALLOWED_HOSTS",
    "DEFAULT_FROM_EMAIL", "EMAIL_HOST", "EMAIL_HOST_USER", "EMAIL_HOST_PASSWORD", "TRAINYARD_CLUSTERS",
)  # fmt: skip


class Finding(NamedTuple):
    """One setting that is not ready, with the problem and its remedy, as sentences for the operator."""

    setting: str
    problem: str
    remedy: str
    is_fine_for_trial: bool = False
    """Whether `manage.py prepare --trial` ignores the finding."""


def findings() -> list[Finding]:
    """Return the settings that a deployment must change; empty if there are none."""
    return [*_placeholders(), *_secrets(), *_servers(), *_public_settings()]


def _placeholders() -> Iterator[Finding]:
    for name in CHECKED_FOR_PLACEHOLDER:
        if PLACEHOLDER in str(getattr(settings, name, "")):
            yield Finding(name, f"still holds the example's {PLACEHOLDER}.", "Fill it in.")
    database = settings.DATABASES["default"]
    if PLACEHOLDER in " ".join(str(database.get(part, "")) for part in ("NAME", "USER", "PASSWORD", "HOST")):
        yield Finding("DATABASE_URL", f"still holds the example's {PLACEHOLDER}.", "Fill it in.")


def _secrets() -> Iterator[Finding]:
    generated = settings.VAR_DIR / "secret_key"
    if generated.exists() and generated.read_text().strip() == settings.SECRET_KEY:
        yield Finding(
            "SECRET_KEY",
            "was made by this process: others have another one.",
            "Make one for all: `openssl rand -base64 64`.",
        )
    elif len(settings.SECRET_KEY) < MIN_KEY_LENGTH:
        yield Finding("SECRET_KEY", "is short.", f"Use {MIN_KEY_LENGTH} random characters or more.")
    if settings.DEBUG:
        yield Finding("DEBUG", "is on: errors show settings and code to everybody.", "Unset it.")
    if settings.STRIPE_SECRET_KEY and not settings.STRIPE_WEBHOOK_SECRETS:
        yield Finding("STRIPE_WEBHOOK_SECRETS", "is empty: no payment would be believed.", "Set the endpoint's secret.")


def _servers() -> Iterator[Finding]:
    if settings.EMBEDDED_DATABASE:
        yield Finding("DATABASE_URL", "is not set: each machine would have a database of its own.", "Set it.")
    if settings.EMBEDDED_REDIS:
        yield Finding("REDIS_URL", "is not set: no process would hear of another's tasks.", "Set it.")
    if settings.UPLOAD_BUCKET and not settings.UPLOAD_BUCKET_ENDPOINT.startswith(("http://", "https://")):
        yield Finding("UPLOAD_BUCKET_ENDPOINT", "is no address: large uploads would fail.", "Set it, https://...")
    if local := [name for name, config in settings.TRAINYARD_CLUSTERS.items() if config is None]:
        yield Finding("TRAINYARD_CLUSTERS", f"has runs as processes of this container ({local[0]}).", "Name a cluster.")


def _public_settings() -> Iterator[Finding]:
    if not settings.HTTPS:
        yield Finding("TRAINYARD_URL", "is not https://.", "Put TLS in front, and set the address customers use.", True)
    if settings.PAYMENTS_SANDBOX:
        yield Finding("STRIPE_SECRET_KEY", "is not set: customers would pay with play money.", "Set it.", True)
    if settings.EMAIL_BACKEND.endswith("console.EmailBackend"):
        yield Finding("EMAIL_URL", "is not set: mails would be printed, not sent.", "Set it, smtp://...", True)
    if settings.ACCOUNT_EMAIL_VERIFICATION != "mandatory":
        yield Finding("EMAIL_VERIFICATION", "is off: sign-up tells who has an account.", "Set it to mandatory.", True)
    if settings.DEFAULT_FROM_EMAIL.endswith("@localhost>"):
        yield Finding("DEFAULT_FROM_EMAIL", "is of localhost: mails would be refused.", "Set it.", True)
