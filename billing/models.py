"""What is sold at which price, and every cent that moved.

Amounts are integers in the currency's minor unit (`*_minor`), rates are Decimals. Only `ledger` writes balances;
Transactions and Entries can't be changed or deleted (triggers in the database), and the entries of each Transaction
sum to zero.
"""

from __future__ import annotations

import uuid
from decimal import Decimal
from typing import Any

from django.conf import settings
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import F, Q
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


class Account(models.Model):
    """A place where money is. A wallet belongs to an organization and can't go below what is held of it."""

    class Kinds(models.TextChoices):
        """What an account is for."""

        WALLET = "wallet", _("wallet")
        REVENUE = "revenue", _("revenue")
        CLEARING = "clearing", _("payment provider")
        CREDIT = "credit", _("credits granted")
        RECEIVABLE = "receivable", _("receivable")

    organization = models.ForeignKey(Organization, models.PROTECT, null=True, blank=True, related_name="accounts")
    kind = models.CharField(max_length=16, choices=Kinds.choices)
    currency = models.CharField(max_length=3)
    posted_minor = models.BigIntegerField(_("balance"), default=0)
    held_minor = models.BigIntegerField(_("held"), default=0)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = _("account")
        verbose_name_plural = _("accounts")
        constraints = (
            models.UniqueConstraint(
                fields=["organization", "kind", "currency"], name="one_account_of_a_kind", nulls_distinct=False
            ),
            models.UniqueConstraint(
                fields=["organization"], condition=Q(kind="wallet"), name="one_wallet_per_organization"
            ),
            models.CheckConstraint(condition=Q(held_minor__gte=0), name="held_not_negative"),
            models.CheckConstraint(
                condition=~Q(kind="wallet") | Q(posted_minor__gte=F("held_minor")), name="wallet_covers_what_is_held"
            ),
        )

    def __str__(self) -> str:
        return f"{self.organization or 'platform'} · {self.kind} · {self.currency}"

    @property
    def available_minor(self) -> int:
        """What can be spent now."""
        return self.posted_minor - self.held_minor


class Hold(models.Model):
    """Money set aside for one purchase: HELD until it is SETTLED (charged in part or whole) or RELEASED."""

    class States(models.TextChoices):
        """The life of a hold."""

        HELD = "held", _("held")
        SETTLED = "settled", _("settled")
        RELEASED = "released", _("released")

    account = models.ForeignKey(Account, models.PROTECT, related_name="holds")
    quote = models.OneToOneField(Quote, models.PROTECT, related_name="hold")
    reference = models.CharField(max_length=64, unique=True)
    amount_minor = models.PositiveBigIntegerField()
    metered_minor = models.PositiveBigIntegerField(default=0, help_text=_("What the run has cost so far."))
    charged_minor = models.PositiveBigIntegerField(null=True, blank=True)
    state = models.CharField(max_length=8, choices=States.choices, default=States.HELD)
    created_at = models.DateTimeField(auto_now_add=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = _("hold")
        verbose_name_plural = _("holds")
        ordering = ("-id",)
        constraints = (
            models.CheckConstraint(condition=Q(metered_minor__lte=F("amount_minor")), name="metered_within_the_hold"),
            models.CheckConstraint(
                condition=Q(charged_minor__isnull=True) | Q(charged_minor__lte=F("amount_minor")),
                name="charged_within_the_hold",
            ),
            models.CheckConstraint(
                condition=Q(state="settled", charged_minor__isnull=False)
                | ~Q(state="settled") & Q(charged_minor__isnull=True),
                name="settled_hold_is_charged",
            ),
        )

    def __str__(self) -> str:
        return self.reference


class Transaction(models.Model):
    """Money that moved, once. `reference` names the business object it is about, so it can't be posted twice."""

    reference = models.CharField(_("reference"), max_length=100, unique=True)
    kind = models.CharField(_("kind"), max_length=16)
    description = models.CharField(_("description"), max_length=255)
    created_at = models.DateTimeField(_("when"), default=timezone.now)

    class Meta:
        verbose_name = _("transaction")
        verbose_name_plural = _("transactions")
        ordering = ("-id",)

    def __str__(self) -> str:
        return self.reference


class Entry(models.Model):
    """One account's part in a transaction: positive into the account, negative out of it."""

    transaction = models.ForeignKey(Transaction, models.PROTECT, related_name="entries")
    account = models.ForeignKey(Account, models.PROTECT, related_name="entries")
    amount_minor = models.BigIntegerField(_("amount"))

    class Meta:
        verbose_name = _("entry")
        verbose_name_plural = _("entries")
        ordering = ("id",)
        constraints = (models.CheckConstraint(condition=~Q(amount_minor=0), name="entry_moves_something"),)

    def __str__(self) -> str:
        return f"{self.account} {self.amount_minor:+d}"


class Receipt(models.Model):
    """What one purchase came to: its lines with the rule behind each, written when its hold ended. Never edited."""

    hold = models.OneToOneField(Hold, models.PROTECT, related_name="receipt")
    organization = models.ForeignKey(Organization, models.PROTECT, related_name="receipts")
    title = models.CharField(max_length=255)
    currency = models.CharField(max_length=3)
    lines = models.JSONField()
    total_minor = models.PositiveBigIntegerField()
    ceiling_minor = models.PositiveBigIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = _("receipt")
        verbose_name_plural = _("receipts")
        ordering = ("-id",)

    def __str__(self) -> str:
        return self.title


class TopUp(models.Model):
    """Money a customer pays in. The row is written before the payment provider is called; its id is the key there."""

    class States(models.TextChoices):
        """The life of a top-up."""

        CREATED = "created", _("not yet at the payment page")
        PENDING = "pending", _("waiting for payment")
        PAID = "paid", _("paid")
        EXPIRED = "expired", _("expired")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    account = models.ForeignKey(Account, models.PROTECT, related_name="top_ups")
    amount_minor = models.PositiveBigIntegerField(validators=[MinValueValidator(1)])
    currency = models.CharField(max_length=3)
    state = models.CharField(max_length=8, choices=States.choices, default=States.CREATED)
    session_id = models.CharField(max_length=255, blank=True)
    checkout_url = models.TextField(blank=True)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    paid_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = _("top-up")
        verbose_name_plural = _("top-ups")
        ordering = ("-created_at",)

    def __str__(self) -> str:
        return str(self.id)


class CreditGrant(models.Model):
    """Money an administrator gave, with the reason. Its transaction is `grant:<id>`."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    organization = models.ForeignKey(Organization, models.PROTECT, related_name="credit_grants")
    amount_minor = models.PositiveBigIntegerField(_("amount (minor units)"), validators=[MinValueValidator(1)])
    reason = models.CharField(_("reason"), max_length=255)
    granted_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", editable=False
    )
    created_at = models.DateTimeField(_("when"), auto_now_add=True)

    class Meta:
        verbose_name = _("credit grant")
        verbose_name_plural = _("credit grants")
        ordering = ("-created_at",)

    def __str__(self) -> str:
        return f"{self.organization} {self.amount_minor}"


class StripeEvent(models.Model):
    """A webhook as it came, stored before it is acted on.

    Keyed on the provider's event id, which is never acted on twice.
    """

    class States(models.TextChoices):
        """The life of an event."""

        RECEIVED = "received", _("received")
        APPLIED = "applied", _("applied")
        IGNORED = "ignored", _("nothing to do")
        QUARANTINED = "quarantined", _("quarantined")

    event_id = models.CharField(_("event"), max_length=255, unique=True)
    type = models.CharField(_("type"), max_length=100)
    payload: models.JSONField[dict[str, Any]] = models.JSONField()
    state = models.CharField(_("state"), max_length=12, choices=States.choices, default=States.RECEIVED)
    reason = models.TextField(_("reason"), blank=True)
    received_at = models.DateTimeField(_("received"), auto_now_add=True)
    applied_at = models.DateTimeField(_("applied"), null=True, blank=True)

    class Meta:
        verbose_name = _("payment event")
        verbose_name_plural = _("payment events")
        ordering = ("-id",)

    def __str__(self) -> str:
        return self.event_id
