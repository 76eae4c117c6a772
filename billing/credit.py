"""Credit: given in lots, spent before what was paid in, soonest expiry first, and taken back when it expires.

Hides how lots and holds meet. The one rule: whoever changes a lot has locked its wallet's row first, in the same
transaction; so the balance and the lots always agree, and posting to the ledger needs to know nothing of lots.

An open hold reserves credit, and what is reserved stays good for that hold though it expires meanwhile. When the hold
is charged, credit that came later is used too, in the same order.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta

from django.core.cache import cache
from django.db import IntegrityError, transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet, Sum
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from billing import ledger
from billing.errors import VoucherRefused
from billing.models import Account, CreditGrant, CreditUse, Hold, Voucher
from billing.policy import policy
from console.accounts.models import Organization, User
from console.operations.kept import Kept, given

CODE_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
"""Without those that are taken for each other."""
CODE_LENGTH = 16
WRONG_CODES = 10
WRONG_CODES_SECONDS = 3600
TRIAL_REASON = gettext_noop("Trial credit")
_LEFT = Q(amount_minor__gt=F("used_minor") + F("expired_minor"))
_FREE = Q(amount_minor__gt=F("used_minor") + F("expired_minor") + F("reserved_minor"))
_SOONEST = (F("expires_at").asc(nulls_last=True), "created_at", "pk")


# --- Given ------------------------------------------------------------------------------------------------------------


@transaction.atomic
def grant(*, credit: CreditGrant, user: User | None, account: Account) -> CreditGrant:
    """Record a credit and move its money into the wallet. The same credit (by its id) is given once."""
    Account.objects.select_for_update(no_key=True).get(pk=account.pk)
    if known := CreditGrant.objects.filter(pk=credit.pk).first():
        return known
    credit.granted_by = user
    credit.save(force_insert=True)
    source = ledger.platform_account(Account.Kinds.CREDIT, account.currency)
    ledger.post(
        reference=f"grant:{credit.pk}",
        kind="credit",
        description=credit.reason,
        entries=[(account, credit.amount_minor), (source, -credit.amount_minor)],
    )
    return credit


def grant_trial(*, account: Account, user: User) -> CreditGrant | None:
    """The credit for trying out, where the policy has one: once for an organization, and once for a person."""
    rules = policy()
    if not rules.trial_credit_minor or account.organization is None:
        return None
    lot = CreditGrant(
        organization=account.organization,
        source=CreditGrant.Sources.TRIAL,
        amount_minor=rules.trial_credit_minor,
        reason=TRIAL_REASON,
        expires_at=timezone.now() + timedelta(days=rules.trial_credit_days),
        received_by=user,
    )
    try:
        with transaction.atomic():
            return grant(credit=lot, user=None, account=account)
    except IntegrityError as error:
        if "one_trial_for" not in str(error):
            raise
        return None


def give_back(*, organization: Organization, amount_minor: int, reason: str) -> CreditGrant:
    """A lot for money that a credit note has posted to the wallet already; it does not expire."""
    return CreditGrant.objects.create(
        organization=organization,
        source=CreditGrant.Sources.CORRECTION,
        amount_minor=amount_minor,
        reason=reason,
    )


def new_code() -> str:
    """A voucher's code that can't be guessed: 80 bits."""
    return "".join(secrets.choice(CODE_LETTERS) for _unused in range(CODE_LENGTH))


def redeem(*, account: Account, code: str, user: User) -> CreditGrant:
    """Enter a voucher's code. Raises VoucherRefused (field code), also after too many wrong ones."""
    tries = f"voucher-tries:{account.organization_id}"
    if int(cache.get(tries, 0)) >= WRONG_CODES:
        raise _refused(_("Too many codes were wrong. Try again in an hour."))
    normal = "".join(code.split()).replace("-", "").upper()
    try:
        return _redeem(account, normal, user)
    except VoucherRefused:
        cache.add(tries, 0, WRONG_CODES_SECONDS)
        cache.incr(tries)
        raise


@transaction.atomic
def _redeem(account: Account, code: str, user: User) -> CreditGrant:
    # Locked: two who enter it at once take its uses one after the other.
    voucher = Voucher.objects.select_for_update().filter(code=code).first() if code else None
    now = timezone.now()
    if voucher is None or not voucher.is_active or account.organization is None:
        raise _refused(_("There is no voucher with this code. Check it letter by letter."))
    if voucher.expires_at and voucher.expires_at <= now:
        raise _refused(_("This voucher could be entered until %(date)s.") % {"date": f"{voucher.expires_at:%Y-%m-%d}"})
    if voucher.currency != account.currency:
        raise _refused(
            _("This voucher is in %(theirs)s, and your wallet in %(ours)s.")
            % {"theirs": voucher.currency, "ours": account.currency}
        )
    mine = voucher.grants.filter(organization=account.organization).count()
    if voucher.uses >= voucher.max_uses or mine >= voucher.max_uses_each:
        raise _refused(
            _("Your organization has used this voucher as often as it may.")
            if mine >= voucher.max_uses_each
            else _("This voucher is used up.")
        )
    Voucher.objects.filter(pk=voucher.pk).update(uses=F("uses") + 1)
    lot = CreditGrant(
        organization=account.organization,
        source=CreditGrant.Sources.VOUCHER,
        voucher=voucher,
        amount_minor=voucher.amount_minor,
        reason=voucher.reason,
        expires_at=now + timedelta(days=voucher.credit_days) if voucher.credit_days else None,
        received_by=user,
    )
    return grant(credit=lot, user=None, account=account)


def _refused(sentence: str) -> VoucherRefused:
    return VoucherRefused(sentence, fields={"code": sentence})


# --- Spent ------------------------------------------------------------------------------------------------------------


def reserve(*, hold: Hold) -> None:
    """Let a new hold rest on credit, as far as there is some. The caller has locked the wallet by `ledger.hold`."""
    needed = hold.amount_minor
    uses = []
    for lot in _FREE_LOTS.all(organization=hold.account.organization_id, now=timezone.now()):
        if needed <= 0:
            break
        part = min(needed, lot.free_minor)
        needed -= part
        uses.append(CreditUse(hold=hold, grant=lot, reserved_minor=part))
        CreditGrant.objects.filter(pk=lot.pk).update(reserved_minor=F("reserved_minor") + part)
    CreditUse.objects.bulk_create(uses)


def spend(*, hold: Hold, amount_minor: int) -> int:
    """Use credit for what a hold is charged, and free what it reserved. Gives how much credit was used.

    The caller has locked the hold and, by `ledger.unhold`, the wallet.
    """
    own = {use.grant_id: use for use in _USES.all(hold=hold)}
    due, used = amount_minor, 0
    now = timezone.now()
    lots = _OWN_LOTS.all(organization=hold.account.organization_id, now=now, hold=hold)
    for lot in lots:
        use = own.pop(lot.pk, None)
        reserved = use.reserved_minor if use else 0
        is_expired = lot.expires_at is not None and lot.expires_at <= now
        part = min(due, reserved if is_expired else lot.free_minor + reserved)
        if not part and use is None:
            continue
        CreditGrant.objects.filter(pk=lot.pk).update(
            reserved_minor=F("reserved_minor") - reserved, used_minor=F("used_minor") + part
        )
        CreditUse.objects.update_or_create(
            hold=hold, grant_id=lot.pk, defaults={"reserved_minor": 0, "used_minor": part}
        )
        due -= part
        used += part
    return used


# --- Expired ----------------------------------------------------------------------------------------------------------


def take_back_expired(*, account: Account) -> int:
    """Post what expired out of a wallet, each cent once; what backs an open hold waits for its end. Gives how much.

    In the caller's transaction: nothing that has expired can be held or spent after it.
    """
    now = timezone.now()
    if not _EXPIRED_LOTS.exists(organization=account.organization_id, now=now):
        return 0
    taken = 0
    with transaction.atomic():
        locked = Account.objects.select_for_update(no_key=True).get(pk=account.pk)
        source = ledger.platform_account(Account.Kinds.CREDIT, locked.currency)
        for lot in _EXPIRED_LOTS.all(organization=locked.organization_id, now=now):
            # Never more than is there, whatever else took from the wallet; the rest is looked at again.
            part = min(lot.free_minor, locked.available_minor - taken)
            if part <= 0:
                continue
            ledger.post(
                reference=f"credit-expired:{lot.pk}:{lot.expired_minor}",
                kind="credit-expired",
                description=gettext_noop("Credit that expired"),
                entries=[(locked, -part), (source, part)],
            )
            CreditGrant.objects.filter(pk=lot.pk).update(expired_minor=F("expired_minor") + part)
            taken += part
    return taken


def sweep_expired(*, limit: int = 1000) -> int:
    """Take back what has expired, wallet by wallet. Gives from how many wallets."""
    owners = CreditGrant.objects.filter(_FREE, expires_at__lte=timezone.now()).values("organization")
    accounts = Account.objects.filter(kind=Account.Kinds.WALLET, organization__in=owners)[:limit]
    return sum(take_back_expired(account=account) > 0 for account in accounts)


# --- Read -------------------------------------------------------------------------------------------------------------


def credit_minor(account: Account) -> int:
    """How much of what a wallet has available is credit."""
    lots = CreditGrant.objects.filter(_FREE, organization=account.organization_id)
    free = lots.aggregate(total=Sum(F("amount_minor") - F("used_minor") - F("expired_minor") - F("reserved_minor")))
    return int(free["total"] or 0)


def paid_minor(account: Account) -> int:
    """How much of what a wallet has available was paid in: what can be refunded, or taken for a tax."""
    return max(0, account.available_minor - credit_minor(account))


def credits_for(organization: Organization) -> QuerySet[CreditGrant]:
    """Every credit, in the order they are spent."""
    return CreditGrant.objects.filter(organization=organization).order_by(*_SOONEST)


def used_for(holds: Sequence[int]) -> dict[int, int]:
    """How much credit was used for each of these holds (by id); those without are left out."""
    rows = CreditUse.objects.filter(hold__in=holds, used_minor__gt=0).values("hold").annotate(total=Sum("used_minor"))
    return {row["hold"]: row["total"] for row in rows.order_by()}


def _lots(which: Q) -> Kept[CreditGrant]:
    """An organization's, in the order in which they are spent."""
    return Kept(lambda: CreditGrant.objects.filter(which, organization=given("organization")).order_by(*_SOONEST))


_NOT_EXPIRED = Q(expires_at=None) | Q(expires_at__gt=given("now"))
_FREE_LOTS = _lots(_FREE & _NOT_EXPIRED)
_OWN_LOTS = _lots(
    _LEFT & (_NOT_EXPIRED | Q(Exists(CreditUse.objects.filter(hold=given("hold"), grant=OuterRef("pk")))))
)
_EXPIRED_LOTS = _lots(_FREE & Q(expires_at__lte=given("now")))
_USES = Kept(lambda: CreditUse.objects.filter(hold=given("hold")))
