"""The installation's brand (one row), the versions of its legal texts, and notices to everyone."""

from __future__ import annotations

import re
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import URLValidator, validate_email
from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

DEFAULT_NAME = "Trainyard"
MAX_LOGO_BYTES = 256 * 1024
"""The largest logo. Every page loads it, and the database holds it."""
MIN_LOGO_PIXELS = 28
"""The shortest side of a logo: pages show the logo at this size. The texts of the admin's form repeat the limits."""
MAX_LOGO_PIXELS = 1024
"""The longest side of a logo: far more than any screen shows. It bounds the memory in which a browser decodes it."""
MIN_CONTRAST = 4.5
"""The lowest contrast of text with its background; WCAG 2.2 (1.4.3) requires it for normal text."""


def validate_color(value: str) -> None:
    """Raise ValidationError unless `value` is a colour such as #3454d1 on which white text has MIN_CONTRAST."""
    if not re.fullmatch(r"#[0-9a-fA-F]{6}", value):
        raise ValidationError(_("Enter a colour such as #3454d1."))
    if contrast(value, "#ffffff") < MIN_CONTRAST:
        raise ValidationError(_("White text cannot be read well on this colour. Choose a darker one."))


def validate_contact(value: str) -> None:
    """Raise ValidationError unless `value` is an e-mail address or a URL that begins with https://."""
    is_email = "@" in value and ":" not in value  # a URL may contain "@" too, but also has a colon
    validate = validate_email if is_email else URLValidator(schemes=["https"])
    try:
        validate(value)
    except ValidationError as error:
        raise ValidationError(_("Enter an email address or an address that begins with https://.")) from error


class Brand(models.Model):
    """The name and look of the console. There is at most one row, with the key 1. Without it the defaults apply."""

    name = models.CharField(_("name"), max_length=40, default=DEFAULT_NAME)
    color = models.CharField(
        _("colour"),
        max_length=7,
        blank=True,
        validators=[validate_color],
        help_text=_("Of buttons and links: #rrggbb."),
    )
    logo = models.BinaryField(_("logo"), blank=True, default=bytes, editable=False)
    """A PNG picture; empty for the default one."""
    support = models.CharField(
        _("support"),
        max_length=200,
        blank=True,
        validators=[validate_contact],
        help_text=_("An email address, or a page that begins with https://. Every page links to it."),
    )
    changed_at = models.DateTimeField(_("changed"), auto_now=True)

    class Meta:
        verbose_name = _("brand")
        verbose_name_plural = _("brand")
        constraints = (models.CheckConstraint(condition=models.Q(pk=1), name="one_brand"),)

    def __str__(self) -> str:
        return self.name

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the brand under the key 1, so that a second brand replaces the first."""
        self.pk = 1
        kwargs["force_insert"] = False  # `Brand.objects.create` sets it
        super().save(*args, **kwargs)


class LegalText(models.Model):
    """A published version of the terms or the privacy policy. Never changed: customers accepted it as it is."""

    class Kinds(models.TextChoices):
        """The kinds of legal texts."""

        TERMS = "terms", _("Terms of service")
        PRIVACY = "privacy", _("Privacy policy")

    kind = models.CharField(_("kind"), max_length=8, choices=Kinds.choices)
    version = models.CharField(
        _("version"), max_length=32, help_text=_("Such as 2026-11-22. Stored with each acceptance of the terms.")
    )
    text = models.TextField(_("text"), help_text=_("Plain text; an empty line begins a new paragraph."))
    published_at = models.DateTimeField(_("published"), auto_now_add=True)

    class Meta:
        verbose_name = _("legal text")
        verbose_name_plural = _("legal texts")
        ordering = ("-id",)
        constraints = (models.UniqueConstraint(fields=["kind", "version"], name="one_legal_text_per_version"),)

    def __str__(self) -> str:
        return f"{self.get_kind_display()} {self.version}"


class Notice(models.Model):
    """A sentence at the top of every page, from `begins_at` until `ends_at`."""

    class Levels(models.TextChoices):
        """How the notice looks."""

        INFO = "info", _("information")
        WARNING = "warning", _("warning")

    text = models.CharField(_("text"), max_length=300)
    level = models.CharField(_("level"), max_length=8, choices=Levels.choices, default=Levels.INFO)
    begins_at = models.DateTimeField(_("from"), default=timezone.now)
    ends_at = models.DateTimeField(_("until"), null=True, blank=True, help_text=_("Empty: until it is deleted."))

    class Meta:
        verbose_name = _("notice")
        verbose_name_plural = _("notices")
        ordering = ("-begins_at",)

    def __str__(self) -> str:
        return self.text

    def clean(self) -> None:
        """Raise ValidationError if the end is not after the beginning."""
        if self.ends_at and self.begins_at and self.ends_at <= self.begins_at:
            raise ValidationError({"ends_at": _("The end must be after the beginning.")})


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours #rrggbb, 1 to 21, by WCAG 2.2."""
    darker, lighter = sorted((_luminance(first), _luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    """Return the relative luminance of #rrggbb, 0 to 1, by WCAG 2.2."""
    red, green, blue = (_linear(int(color[start : start + 2], 16) / 255) for start in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(channel: float) -> float:
    """Return the linear intensity of an sRGB channel by WCAG 2.2; both are 0 to 1."""
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
