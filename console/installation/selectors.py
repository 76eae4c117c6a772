"""Read the installation's brand, texts and notices for pages and mails.

Every page needs them, so each process caches them for `CACHE_SECONDS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.core.cache import caches
from django.db.models import Q
from django.utils import timezone

from console.installation.models import DEFAULT_NAME, Brand, LegalText, Notice

CACHE_KEY = "installation"
CACHE_SECONDS = 20
"""How long a process caches the installation: a change in /admin/ is shown by every process after this time."""


@dataclass(frozen=True)
class ShownNotice:
    """A notice and the time in which it is shown."""

    text: str
    level: str
    begins_at: datetime
    ends_at: datetime | None


@dataclass(frozen=True)
class Installation:
    """The brand, the versions of the legal texts, and the notices.

    `version` changes with the brand; the URLs of logo and style sheet contain it, so that browsers load them again.
    """

    name: str = DEFAULT_NAME
    support_href: str = ""
    has_color: bool = False
    has_logo: bool = False
    version: int = 0
    terms_version: str = ""
    """The version of the operator's own terms; empty while the built-in terms apply."""
    has_privacy: bool = False
    all_notices: tuple[ShownNotice, ...] = ()

    @property
    def notices(self) -> list[ShownNotice]:
        """Return the notices to show now."""
        now = timezone.now()
        begun = [notice for notice in self.all_notices if notice.begins_at <= now]
        return [notice for notice in begun if notice.ends_at is None or now < notice.ends_at]


def installation() -> Installation:
    """Return the installation, from this process's cache or the database. Raises a database error."""
    cached: Installation | None = caches["template_fragments"].get(CACHE_KEY)
    if cached is None:
        cached = _read()
        caches["template_fragments"].set(CACHE_KEY, cached, CACHE_SECONDS)
    return cached


def clear_cache() -> None:
    """Clear this process's cache, so that the next request reads the database."""
    caches["template_fragments"].delete(CACHE_KEY)


def current_text(kind: str) -> LegalText | None:
    """Return the newest version of a legal text, which applies; None before the first."""
    return LegalText.objects.filter(kind=kind).first()


def terms_version() -> str:
    """Return the version of the terms that apply: the operator's, otherwise the built-in ones'."""
    terms = current_text(LegalText.Kinds.TERMS)
    return terms.version if terms else settings.TERMS_VERSION


def _read() -> Installation:
    brand = Brand.objects.first() or Brand(name=DEFAULT_NAME)
    texts = dict(LegalText.objects.order_by("id").values_list("kind", "version"))  # the newest of each kind wins
    notices = Notice.objects.filter(Q(ends_at=None) | Q(ends_at__gt=timezone.now())).order_by("begins_at")
    support = brand.support
    return Installation(
        name=brand.name,
        support_href=f"mailto:{support}" if support and not support.startswith("https://") else support,
        has_color=bool(brand.color),
        has_logo=bool(brand.logo),
        version=int(brand.changed_at.timestamp()) if brand.changed_at else 0,
        terms_version=texts.get(LegalText.Kinds.TERMS, ""),
        has_privacy=LegalText.Kinds.PRIVACY in texts,
        all_notices=tuple(
            ShownNotice(notice.text, notice.level, notice.begins_at, notice.ends_at) for notice in notices
        ),
    )
