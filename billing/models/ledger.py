"""Accounts, transactions, entries, holds, receipts and write-offs.

Only `billing.ledger` writes balances. Triggers keep transactions and entries append-only and each transaction's sum at
zero.
"""

from __future__ import annotations

from django.conf import settings
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from billing.models.pricing import Quote
from console.accounts.models import Organization


class Account(models.Model):
    """An account of the ledger. A wallet belongs to an organization and cannot fall below its holds.

    The `account` that functions of billing take is a wallet, unless they say otherwise.
    """

    class Kinds(models.TextChoices):
        """The purpose of an account.

        WALLET, RECEIVABLE and WRITTEN_OFF belong to an organization, the others to the platform. CLEARING is debited
        when a payment is credited to a wallet, CREDIT when credit is granted.
        """

        WALLET = "wallet", _("wallet")
        REVENUE = "revenue", _("revenue")
        CLEARING = "clearing", _("payment provider")
        CREDIT = "credit", _("credits granted")
        TAX = "tax", _("tax payable")
        RECEIVABLE = "receivable", _("receivable")
        WRITTEN_OFF = "written_off", _("written off")

    organization = models.ForeignKey(
        Organization, models.PROTECT, null=True, blank=True, related_name="accounts", verbose_name=_("organization")
    )
    kind = models.CharField(_("kind"), max_length=16, choices=Kinds.choices)
    currency = models.CharField(_("currency"), max_length=3)
    posted_minor = models.BigIntegerField(_("balance"), default=0)
    """The sum of the account's entries."""
    held_minor = models.BigIntegerField(_("held"), default=0)
    """The sum of the account's open holds."""
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
        return f"{self.organization or _('platform')} · {self.get_kind_display()} · {self.currency}"

    @property
    def available_minor(self) -> int:
        """Return the amount that can be spent now: the balance without the held amount, in minor units."""
        return self.posted_minor - self.held_minor

    @property
    def owner(self) -> Organization:
        """Return the organization of the account. Raises ValueError for an account of the platform, which has none."""
        if self.organization is None:
            raise ValueError("An account of the platform has no owner.")
        return self.organization


class Hold(models.Model):
    """Money reserved for one purchase: HELD until it is SETTLED (charged) or RELEASED.

    The hold of a sweep is the `parent` of the holds of its runs, the trials. A trial's amount is taken out of the
    parent's amount, and the part that the trial does not use returns to the parent. So the ceiling of the sweep is
    always the sum of three parts: the parent's amount, the amounts of its open children, and the charges of its ended
    children.
    """

    class States(models.TextChoices):
        """The states of a hold."""

        HELD = "held", _("held")
        SETTLED = "settled", _("settled")
        RELEASED = "released", _("released")

    STORAGE_PREFIX = "storage:"
    """Start of the references of holds that paid for storage. References of jobs and sweeps never start with it."""

    account = models.ForeignKey(Account, models.PROTECT, related_name="holds", verbose_name=_("account"))
    quote = models.OneToOneField(Quote, models.PROTECT, related_name="hold", verbose_name=_("quote"))
    reference = models.CharField(_("reference"), max_length=64, unique=True)
    """Names the purchase: `order:<quote>`, `sweep:<quote>` or `storage:<account>:<number>`."""
    amount_minor = models.PositiveBigIntegerField(_("amount"))
    parent = models.ForeignKey(
        "self", models.PROTECT, null=True, blank=True, related_name="children", verbose_name=_("part of")
    )
    """The sweep's hold that this amount was taken out of; None for an ordinary purchase."""
    metered_minor = models.PositiveBigIntegerField(_("cost so far"), default=0, help_text=_("Cost of the run so far."))
    charged_minor = models.PositiveBigIntegerField(_("charged"), null=True, blank=True)
    placed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("bought by")
    )
    labels = models.JSONField(
        _("cost labels"), default=dict, help_text=_("Labels to group costs by: workspace, node_spec.")
    )
    state = models.CharField(_("state"), max_length=8, choices=States.choices, default=States.HELD)
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    ended_at = models.DateTimeField(_("ended"), null=True, blank=True)

    class Meta:
        verbose_name = _("hold")
        verbose_name_plural = _("holds")
        ordering = ("-id",)
        indexes = (
            models.Index(fields=["account", "ended_at"], name="holds_of_a_wallet_by_end"),
            models.Index(fields=["account"], name="open_holds_of_a_wallet", condition=Q(state="held")),
        )
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


class HoldExtension(models.Model):
    """A raise of an open hold, because its purchase was extended. `quote` prices the whole extended purchase."""

    hold = models.ForeignKey(Hold, models.PROTECT, related_name="extensions")
    quote = models.OneToOneField(Quote, models.PROTECT, related_name="extension", verbose_name=_("quote"))
    amount_minor = models.PositiveBigIntegerField(_("amount"))
    """The difference by which the hold was raised."""
    idempotency_key = models.CharField(max_length=255)
    placed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("bought by")
    )
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = _("extension of a hold")
        verbose_name_plural = _("extensions of holds")
        ordering = ("id",)
        constraints = (
            models.UniqueConstraint(fields=["hold", "idempotency_key"], name="one_extension_per_idempotency_key"),
        )

    def __str__(self) -> str:
        return str(self.hold)


class Transaction(models.Model):
    """A transaction. Its unique `reference` names what it was posted for, such as `top-up:<id>`.

    Nothing is posted twice, because a second transaction with the same reference is refused.
    """

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
    """One account's entry in a transaction: positive into the account, negative out of it."""

    transaction = models.ForeignKey(Transaction, models.PROTECT, related_name="entries")
    # Needs no index of its own, because the index below begins with it.
    account = models.ForeignKey(
        Account, models.PROTECT, related_name="entries", db_index=False, verbose_name=_("account")
    )
    amount_minor = models.BigIntegerField(_("amount"))

    class Meta:
        verbose_name = _("entry")
        verbose_name_plural = _("entries")
        ordering = ("id",)
        indexes = (models.Index(fields=["account", "-id"], name="entries_of_an_account"),)
        constraints = (models.CheckConstraint(condition=~Q(amount_minor=0), name="entry_moves_something"),)

    def __str__(self) -> str:
        return f"{self.account}: {self.transaction}"


class Receipt(models.Model):
    """The receipt of one purchase, written when its hold ends. Each line names its pricing rule. Never edited."""

    hold = models.OneToOneField(Hold, models.PROTECT, related_name="receipt", verbose_name=_("hold"))
    # Needs no index of its own, because two of the indexes below begin with it.
    organization = models.ForeignKey(
        Organization, models.PROTECT, db_index=False, related_name="receipts", verbose_name=_("organization")
    )
    title = models.CharField(pgettext_lazy("of a receipt", "title"), max_length=255)
    currency = models.CharField(_("currency"), max_length=3)
    lines = models.JSONField(_("receipt lines"))
    """A list of pricing.Line as JSON. Their amounts sum to the total."""
    total_minor = models.PositiveBigIntegerField(_("charged"))
    ceiling_minor = models.PositiveBigIntegerField(_("ceiling"))
    usage = models.JSONField(_("usage"), null=True, help_text=_("The rated usage: pricing.Usage as JSON."))
    created_at = models.DateTimeField(_("created"), auto_now_add=True)

    class Meta:
        verbose_name = _("receipt")
        verbose_name_plural = _("receipts")
        ordering = ("-id",)
        indexes = (
            # The receipts of one organization are spread over the table, often one in each block. With all needed
            # columns in these indexes, totals, costs and searches do not read the table.
            models.Index(
                fields=["organization", "created_at"], include=["total_minor", "hold"], name="receipts_and_amounts"
            ),
            models.Index(fields=["organization", "-id"], include=["title"], name="receipts_and_titles"),
        )

    def __str__(self) -> str:
        return self.title


class WriteOff(models.Model):
    """A debt that was written off, in part or whole. The reference of its transaction is `write-off:<id>`."""

    account = models.ForeignKey(Account, models.PROTECT, related_name="write_offs", verbose_name=_("receivable"))
    amount_minor = models.PositiveBigIntegerField(_("amount"), validators=[MinValueValidator(1)])
    reason = models.CharField(_("reason"), max_length=255)
    written_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", editable=False, verbose_name=_("by")
    )
    created_at = models.DateTimeField(_("when"), auto_now_add=True)

    class Meta:
        verbose_name = _("write-off")
        verbose_name_plural = _("write-offs")
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"write-off:{self.pk}"
