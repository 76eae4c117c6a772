"""What is sold at which price, and what was offered to whom.

Amounts are integers in the currency's minor unit (`*_minor`), prices are Decimals. One rule: a published book and a
quote are never edited.
"""

from __future__ import annotations

import uuid
from decimal import Decimal

from django.conf import settings
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from billing.pricing import Mode, PriceKind
from console.accounts.models import Organization


class NodeSpec(models.Model):
    """A kind of node that can be bought: what it has, not what it costs."""

    name = models.SlugField(_("name"), unique=True)
    title = models.CharField(_("title"), max_length=100)
    description = models.TextField(_("description"), blank=True)
    cpus = models.DecimalField(
        _("CPU cores"), max_digits=6, decimal_places=2, validators=[MinValueValidator(Decimal("0.1"))]
    )
    memory_mib = models.PositiveIntegerField(_("memory (MiB)"), validators=[MinValueValidator(128)])
    gpus = models.PositiveSmallIntegerField(_("GPUs"), default=0)
    gpu_type = models.CharField(_("GPU type"), max_length=50, blank=True)
    cluster = models.CharField(
        _("cluster"),
        max_length=32,
        blank=True,
        default="",
        db_default="",
        help_text=_("Where its runs start: a name of TRAINYARD_CLUSTERS. Empty: the first of them."),
    )
    position = models.PositiveSmallIntegerField(_("position in lists"), default=100)
    is_active = models.BooleanField(_("offered"), default=True)

    class Meta:
        verbose_name = _("node spec")
        verbose_name_plural = _("node specs")
        ordering = ("position", "name")

    def __str__(self) -> str:
        return self.name


class PriceBook(models.Model):
    """All prices in one currency, valid from a moment until the next book's. Published books are never edited."""

    name = models.CharField(_("name"), max_length=100)
    currency = models.CharField(_("currency"), max_length=3)
    effective_from = models.DateTimeField(_("valid from"), null=True, blank=True)
    published_at = models.DateTimeField(_("published"), null=True, blank=True, editable=False)
    created_at = models.DateTimeField(_("created"), auto_now_add=True)

    class Meta:
        verbose_name = _("price book")
        verbose_name_plural = _("price books")
        ordering = ("-effective_from",)
        constraints = (
            models.UniqueConstraint(
                fields=["currency", "effective_from"],
                condition=Q(published_at__isnull=False),
                name="one_price_book_at_a_time",
            ),
            models.CheckConstraint(
                condition=Q(published_at__isnull=True) | Q(effective_from__isnull=False),
                name="published_book_has_a_date",
            ),
        )

    def __str__(self) -> str:
        return self.name


class Price(models.Model):
    """One price of a book. What it is per depends on its kind; amounts are in minor units, as Decimals."""

    class Kinds(models.TextChoices):
        """Labels for `pricing.PriceKind`."""

        NODE_HOUR = PriceKind.NODE_HOUR, _("per node and hour")
        EPOCH = PriceKind.EPOCH, _("per epoch, when the run completes")
        FIXED_EPOCH = PriceKind.FIXED_EPOCH, _("fixed, per epoch and node")
        MINIMUM = PriceKind.MINIMUM, _("least charge of a run")

    book = models.ForeignKey(PriceBook, models.CASCADE, related_name="prices")
    kind = models.CharField(_("kind"), max_length=16, choices=Kinds.choices)
    product = models.SlugField(_("product"), blank=True, help_text=_("Empty: every product."))
    node_spec = models.ForeignKey(
        NodeSpec, models.PROTECT, null=True, blank=True, related_name="prices", verbose_name=_("node spec")
    )
    nodes_from = models.PositiveSmallIntegerField(_("from this many nodes"), default=1)
    amount = models.DecimalField(_("amount (minor units)"), max_digits=14, decimal_places=4)

    class Meta:
        verbose_name = _("price")
        verbose_name_plural = _("prices")
        ordering = ("kind", "product", "node_spec__position", "nodes_from")
        constraints = (
            models.UniqueConstraint(
                fields=["book", "kind", "product", "node_spec", "nodes_from"],
                name="one_price_of_a_kind",
                nulls_distinct=False,
            ),
            models.CheckConstraint(condition=Q(amount__gte=0), name="price_not_negative"),
            models.CheckConstraint(
                condition=Q(kind__in=[PriceKind.NODE_HOUR, PriceKind.FIXED_EPOCH], node_spec__isnull=False)
                | Q(kind__in=[PriceKind.EPOCH, PriceKind.MINIMUM], node_spec__isnull=True),
                name="price_of_a_node_names_its_spec",
            ),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.product or '*'} {self.node_spec or ''} {self.amount}"


class Quote(models.Model):
    """An offer: what would be bought, the prices used, the estimate with its basis, and the ceiling. Never edited."""

    class Modes(models.TextChoices):
        """Labels for `pricing.Mode`."""

        METERED = Mode.METERED, _("metered: the time used, up to the ceiling")
        FIXED = Mode.FIXED, _("fixed: known in full before the run")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    organization = models.ForeignKey(Organization, models.CASCADE, related_name="quotes")
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    book = models.ForeignKey(PriceBook, models.PROTECT, related_name="+")
    currency = models.CharField(max_length=3)
    mode = models.CharField(max_length=8, choices=Modes.choices)
    purchase = models.JSONField(help_text=_("What is bought, as asked for; read by the room that sells it."))
    terms = models.JSONField(help_text=_("pricing.Terms as JSON: the prices this quote was made with."))
    lines = models.JSONField()
    p50_minor = models.PositiveBigIntegerField()
    p90_minor = models.PositiveBigIntegerField()
    basis = models.JSONField()
    ceiling_minor = models.PositiveBigIntegerField()
    deadline_seconds = models.PositiveIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()

    class Meta:
        verbose_name = _("quote")
        verbose_name_plural = _("quotes")
        ordering = ("-created_at",)

    def __str__(self) -> str:
        return str(self.id)

    @property
    def is_expired(self) -> bool:
        """Whether it can no longer be bought."""
        return timezone.now() >= self.expires_at
