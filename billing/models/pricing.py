"""Node specs, price books, prices and quotes.

Amounts are integers in the currency's minor unit (`*_minor`), prices are Decimals. Published books and quotes are never
edited. A newer column has a `db_default`, because processes of the previous release write rows too during an upgrade.
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
    """A kind of node on offer: its resources, not its price."""

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
        help_text=_("Name of the cluster in TRAINYARD_CLUSTERS. Leave empty for the first cluster."),
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
    """The prices in one currency, in effect until the next book. Published books are never edited."""

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
    """One price of a book, in minor units as a Decimal. `kind` is its unit."""

    class Kinds(models.TextChoices):
        """Labels for `pricing.PriceKind`."""

        NODE_HOUR = PriceKind.NODE_HOUR, _("per node and hour")
        EPOCH = PriceKind.EPOCH, _("per epoch, when the run completes")
        FIXED_EPOCH = PriceKind.FIXED_EPOCH, _("fixed, per epoch and node")
        MINIMUM = PriceKind.MINIMUM, _("minimum charge of a run")
        STORAGE = PriceKind.STORAGE, _("storage, per GB and month")

    book = models.ForeignKey(PriceBook, models.CASCADE, related_name="prices")
    kind = models.CharField(_("kind"), max_length=16, choices=Kinds.choices)
    product = models.SlugField(_("product"), blank=True, help_text=_("Leave empty for all products."))
    node_spec = models.ForeignKey(
        NodeSpec, models.PROTECT, null=True, blank=True, related_name="prices", verbose_name=_("node spec")
    )
    nodes_from = models.PositiveSmallIntegerField(_("minimum number of nodes"), default=1)
    amount = models.DecimalField(_("amount"), max_digits=14, decimal_places=4)

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
                | Q(kind__in=[PriceKind.EPOCH, PriceKind.MINIMUM, PriceKind.STORAGE], node_spec__isnull=True),
                name="price_of_a_node_names_its_spec",
            ),
        )

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.get_kind_display(), str(self.node_spec or ""), self.product)))


class Quote(models.Model):
    """A quote: the purchase, its prices, the estimate with its basis, and the ceiling. Never edited."""

    class Modes(models.TextChoices):
        """Labels for `pricing.Mode`."""

        METERED = Mode.METERED, _("metered: the time used, up to the ceiling")
        FIXED = Mode.FIXED, _("fixed: one price that includes a running time")

    id = models.UUIDField("ID", primary_key=True, default=uuid.uuid4, editable=False)
    organization = models.ForeignKey(
        Organization, models.CASCADE, related_name="quotes", verbose_name=_("organization")
    )
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("created by")
    )
    book = models.ForeignKey(PriceBook, models.PROTECT, related_name="+", verbose_name=_("price book"))
    currency = models.CharField(_("currency"), max_length=3)
    mode = models.CharField(_("mode of sale"), max_length=8, choices=Modes.choices)
    purchase = models.JSONField(_("purchase"), help_text=_("The purchase as requested; read by the app that sells it."))
    """`billing` does not interpret this JSON; the Django app that made the quote (`jobs`) does."""
    terms = models.JSONField(_("prices"), help_text=_("Prices of this quote: pricing.Terms as JSON."))
    lines = models.JSONField(_("quote lines"))
    """A list of pricing.Line as JSON. Their amounts sum to the ceiling."""
    p50_minor = models.PositiveBigIntegerField(_("estimated cost"))
    p90_minor = models.PositiveBigIntegerField(_("high estimate"))
    basis = models.JSONField(_("basis of the estimate"))
    """The pricing.Estimate as JSON."""
    ceiling_minor = models.PositiveBigIntegerField(_("ceiling"))
    deadline_seconds = models.PositiveIntegerField(_("time limit (seconds)"))
    """Running time after which the run is ended, so that it never costs more than the ceiling."""
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    expires_at = models.DateTimeField(_("expires"))

    class Meta:
        verbose_name = _("quote")
        verbose_name_plural = _("quotes")
        ordering = ("-created_at",)
        indexes = (models.Index(fields=["-created_at", "-id"], name="quotes_by_time"),)

    def __str__(self) -> str:
        return str(self.id)

    @property
    def is_expired(self) -> bool:
        """Return whether the quote has expired."""
        return timezone.now() >= self.expires_at
