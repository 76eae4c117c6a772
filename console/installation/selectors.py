"""Read the installation's brand, legal texts and notices for pages and mails.

Every page needs them, so each process caches them in its memory for CACHE_SECONDS.
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
"""The key in the cache `template_fragments`, which is in the memory of each process; the default cache is in Redis."""
CACHE_SECONDS = 20
"""How long a process caches the installation. Every process shows a change made in /admin/ after this time, which is
short enough for an operator who checks the result."""


@dataclass(frozen=True)
class ShownNotice:
    """A row of Notice, as the cache holds it; `ends_at` is None if the notice is shown until it is deleted."""

    text: str
    level: str
    begins_at: datetime
    ends_at: datetime | None


@dataclass(frozen=True)
class Installation:
    """The data of the installation that all pages show: the brand, which legal texts there are, and the notices."""

    name: str = DEFAULT_NAME
    support_href: str = ""
    """The URL of the link to the operator's support, `https:` or `mailto:`; empty: there is no link."""
    has_color: bool = False
    has_logo: bool = False
    version: int = 0
    """A number that changes with the brand. The URLs of logo and style sheet have it, so browsers load them again."""
    terms_version: str = ""
    """The version of the operator's own terms; empty while the built-in terms apply."""
    has_privacy: bool = False
    """Whether the operator has published a privacy policy."""
    all_notices: tuple[ShownNotice, ...] = ()
    """The notices that had not ended when they were read; some may begin later."""

    @property
    def notices(self) -> list[ShownNotice]:
        """Return the notices to show now."""
        now = timezone.now()
        begun = [notice for notice in self.all_notices if notice.begins_at <= now]
        return [notice for notice in begun if notice.ends_at is None or now < notice.ends_at]


def installation() -> Installation:
    """Return the installation, from this process's cache or the database. Raises a database error if both fail."""
    cached: Installation | None = caches["template_fragments"].get(CACHE_KEY)
    if cached is None:
        cached = _read_installation()
        caches["template_fragments"].set(CACHE_KEY, cached, CACHE_SECONDS)
    return cached


def clear_cache() -> None:
    """Clear this process's cache, so that the next request reads the database."""
    caches["template_fragments"].delete(CACHE_KEY)


def current_text(kind: str) -> LegalText | None:
    """Return the newest version of a kind of legal text, which is the one that applies; None if there is none."""
    return LegalText.objects.filter(kind=kind).first()


def terms_version() -> str:
    """Return the version of the terms that apply: the operator's terms, or the built-in ones if there are none."""
    terms = current_text(LegalText.Kinds.TERMS)
    return terms.version if terms else settings.TERMS_VERSION


def _read_installation() -> Installation:
    """Return the installation from the database."""
    brand = Brand.objects.first() or Brand(name=DEFAULT_NAME)
    # In the order of their ids, so that the newest version of each kind overwrites the older ones.
    texts = dict(LegalText.objects.order_by("id").values_list("kind", "version"))
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
