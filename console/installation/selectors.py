"""What pages and mails show of the installation. Each process keeps it for some seconds, since every page needs it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.core.cache import caches
from django.db.models import Q
from django.utils import timezone

from console.installation.models import DEFAULT_NAME, Brand, LegalText, Notice

KEY = "installation"
KEEP_SECONDS = 20
"""How long a process shows what was true; a change in /admin/ is seen everywhere after this time."""


@dataclass(frozen=True)
class ShownNotice:
    """A notice and the time in which it is shown."""

    text: str
    level: str
    begins_at: datetime
    ends_at: datetime | None


@dataclass(frozen=True)
class Installation:
    """The brand, and which texts there are. `version` changes with the brand, for the addresses of its files."""

    name: str = DEFAULT_NAME
    support_href: str = ""
    has_color: bool = False
    has_logo: bool = False
    version: int = 0
    terms_version: str = ""
    """Of the operator's own terms; empty while the built-in terms hold."""
    has_privacy: bool = False
    all_notices: tuple[ShownNotice, ...] = ()

    @property
    def notices(self) -> list[ShownNotice]:
        """Return the notices of this moment."""
        now = timezone.now()
        return [each for each in self.all_notices if each.begins_at <= now and (not each.ends_at or now < each.ends_at)]


def installation() -> Installation:
    """Return what this process last read. Raises a database error."""
    kept: Installation | None = caches["template_fragments"].get(KEY)
    if kept is None:
        kept = _read()
        caches["template_fragments"].set(KEY, kept, KEEP_SECONDS)
    return kept


def forget() -> None:
    """Have this process read again at the next request."""
    caches["template_fragments"].delete(KEY)


def current(kind: str) -> LegalText | None:
    """Return the version of a legal text that holds now; None before the first."""
    return LegalText.objects.filter(kind=kind).first()


def terms_version() -> str:
    """Return the version of the terms that hold now: the operator's, otherwise the built-in ones'."""
    terms = current(LegalText.Kinds.TERMS)
    return terms.version if terms else settings.TERMS_VERSION


def _read() -> Installation:
    brand = Brand.objects.first() or Brand(name=DEFAULT_NAME)
    texts = dict(LegalText.objects.order_by("id").values_list("kind", "version"))  # the last of each kind stays
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
        all_notices=tuple(ShownNotice(each.text, each.level, each.begins_at, each.ends_at) for each in notices),
    )
