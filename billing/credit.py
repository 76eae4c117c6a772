"""Credit: money in a wallet that was granted, not paid in. It is spent before paid-in money, soonest expiry first.

A lot (CreditGrant) is one granted amount with one expiry. Its `amount_minor` splits into used, expired, reserved and
free credit. These parts change only while the wallet's row is locked, in one transaction with the wallet's balance, so
that parts and balance agree.

An open hold reserves credit, and can spend this credit even after it expires. When the hold is settled, credit that is
free by then pays too, in the same order.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta

import redis
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
from console.accounts.models import Organization, ServiceAccount, User
from console.accounts.services import record_audit_event, require_open

CODE_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
"""32 letters and digits, without I, O, 0 and 1, which look alike."""
CODE_LENGTH = 16
"""Characters of a code: 16 of 32 letters are 80 bits."""
MAX_WRONG_CODES = 10
"""After this number of refused codes, `redeem` refuses every code of the organization, and of the person in all
organizations. Ten are enough for typing errors, and too few to guess the short codes that administrators choose."""
WRONG_CODES_SECONDS = 3600
"""Seconds after the first wrong code until the count begins again: an hour, as the message of `redeem` says."""
TRIAL_REASON = gettext_noop("Trial credit")
# Lots with credit that is neither used nor expired; holds may reserve it.
_UNSPENT = Q(amount_minor__gt=F("used_minor") + F("expired_minor"))
# Lots with unspent credit that no hold reserves.
_UNRESERVED = Q(amount_minor__gt=F("used_minor") + F("expired_minor") + F("reserved_minor"))
# Soonest expiry first, then the oldest grant.
_SPENDING_ORDER = (F("expires_at").asc(nulls_last=True), "created_at", "pk")


# --- Grant ------------------------------------------------------------------------------------------------------------


@transaction.atomic
def grant(
    *, credit_grant: CreditGrant, user: User | None, account: Account, action: str = "credit.granted"
) -> CreditGrant:
    """Store an unsaved grant and post its amount to the wallet. Idempotent on the grant's id.

    `user` is the administrator who grants the credit, None if the system does, as for a voucher. `action` is the name
    of the grant in the audit log.
    """
    # Locked first, so a concurrent call with the same grant waits and then finds it.
    Account.objects.select_for_update(no_key=True).get(pk=account.pk)
    if existing := CreditGrant.objects.filter(pk=credit_grant.pk).first():
        return existing
    credit_grant.granted_by = user
    credit_grant.save(force_insert=True)
    source = ledger.platform_account(Account.Kinds.CREDIT, account.currency)
    ledger.post(
        reference=f"grant:{credit_grant.pk}",
        kind="credit",
        description=credit_grant.reason,
        entries=[(account, credit_grant.amount_minor), (source, -credit_grant.amount_minor)],
    )
    record_audit_event(
        organization=credit_grant.organization,
        actor=user or credit_grant.received_by,
        action=action,
        target=f"grant:{credit_grant.pk}",
        data={
            "amount_minor": credit_grant.amount_minor,
            "currency": account.currency,
            "reason": credit_grant.reason,
        },
    )
    return credit_grant


def grant_trial(*, account: Account, user: User) -> CreditGrant | None:
    """Grant the policy's trial credit to a new customer.

    Grants nothing and returns None if the policy has no trial credit, or the organization or the user had it before.
    """
    billing_policy = policy()
    if not billing_policy.trial_credit_minor or account.organization is None:
        return None
    lot = CreditGrant(
        organization=account.organization,
        source=CreditGrant.Sources.TRIAL,
        amount_minor=billing_policy.trial_credit_minor,
        reason=TRIAL_REASON,
        expires_at=timezone.now() + timedelta(days=billing_policy.trial_credit_days),
        received_by=user,
    )
    try:
        with transaction.atomic():  # a savepoint: a violated constraint must not abort the caller's transaction
            return grant(credit_grant=lot, user=None, account=account, action="credit.trial_granted")
    except IntegrityError as error:
        # The names of two constraints begin so: one trial for an organization, and one for a person.
        if "one_trial_for" not in str(error):
            raise
        return None


def add_correction(*, organization: Organization, amount_minor: int, reason: str) -> CreditGrant:
    """Record the credit that a credit note returns, as a lot without expiry. The note has already posted its amount."""
    return CreditGrant.objects.create(
        organization=organization,
        source=CreditGrant.Sources.CORRECTION,
        amount_minor=amount_minor,
        reason=reason,
    )


def new_code() -> str:
    """Return a random voucher code with 80 bits of entropy."""
    return "".join(secrets.choice(CODE_LETTERS) for _unused in range(CODE_LENGTH))


def redeem(*, account: Account, code: str, user: User) -> CreditGrant:
    """Redeem a voucher code and return the granted lot.

    Raises VoucherRefused, also after too many wrong codes, and OrganizationClosing: the credit would be lost.

    Each try counts as wrong until it succeeds. Otherwise many tries at the same time would pass the limit. Raises
    RedisError if Redis cannot count.
    """
    require_open(organization=account.owner)
    # Each service account is a user of its own. With several of them, a person could exceed the limits per person.
    if ServiceAccount.objects.filter(membership__user=user).exists():
        raise _refused(_("A service account can't redeem vouchers. Ask a member who may pay."))
    # A person is limited in all organizations together, because anybody can create organizations.
    failures_keys = (f"voucher-tries:{account.organization_id}", f"voucher-tries:user:{user.pk}")
    if max(_count(key) for key in failures_keys) > MAX_WRONG_CODES:
        raise _refused(_("Too many wrong codes. Try again in an hour."))
    # Stored codes have capital letters and digits only; people type spaces, dashes and small letters.
    normalized = "".join(code.split()).replace("-", "").upper()
    lot = _redeem_voucher(account, normalized, user)
    for key in failures_keys:
        # The hour may have ended, or Redis may have stopped. The voucher is redeemed anyway.
        with suppress(ValueError, redis.RedisError):
            cache.decr(key)
    return lot


def _count(key: str) -> int:
    """Count a try to redeem a code, and return the number of wrong tries in this hour. Raises RedisError."""
    # `incr` keeps the expiry that `add` sets, so the hour begins with the first try.
    cache.add(key, 0, WRONG_CODES_SECONDS)
    try:
        return int(cache.incr(key))
    except ValueError:  # the hour has ended since `add`, so the key is gone
        return 1


@transaction.atomic
def _redeem_voucher(account: Account, code: str, user: User) -> CreditGrant:
    """Grant the credit of the voucher with this normalized code. Raises VoucherRefused."""
    # Locked, so that concurrent redemptions cannot both take the last use.
    voucher = Voucher.objects.select_for_update().filter(code=code).first() if code else None
    now = timezone.now()
    if voucher is None or not voucher.is_active or account.organization is None:
        raise _refused(_("This voucher code does not exist. Check it for typing errors."))
    if voucher.expires_at and voucher.expires_at <= now:
        raise _refused(_("This voucher could be redeemed until %(date)s.") % {"date": f"{voucher.expires_at:%Y-%m-%d}"})
    if voucher.currency != account.currency:
        raise _refused(
            _("This voucher is in %(theirs)s, but your wallet is in %(ours)s.")
            % {"theirs": voucher.currency, "ours": account.currency}
        )
    own_uses = voucher.grants.filter(organization=account.organization).count()
    if own_uses >= voucher.max_uses_each:
        raise _refused(_("Your organization has used this voucher the maximum number of times."))
    # Anybody can create organizations. So the limit applies to a person too, as trial credit is granted once to each.
    if voucher.grants.filter(received_by=user).count() >= voucher.max_uses_each:
        raise _refused(_("You have used this voucher the maximum number of times."))
    if voucher.uses >= voucher.max_uses:
        raise _refused(_("This voucher has no uses left."))
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
    return grant(credit_grant=lot, user=None, account=account, action="credit.redeemed")


def _refused(sentence: str) -> VoucherRefused:
    """Return the error with this sentence, also for the form's field `code`."""
    return VoucherRefused(sentence, fields={"code": sentence})


# --- Spend ------------------------------------------------------------------------------------------------------------


def reserve(*, hold: Hold) -> None:
    """Reserve free credit for a new hold; paid-in money covers the rest. The caller has locked the wallet."""
    needed = hold.amount_minor
    uses = []
    for lot in _free_lots(hold.account.organization_id):
        if needed <= 0:
            break
        amount = min(needed, lot.free_minor)
        needed -= amount
        uses.append(CreditUse(hold=hold, grant=lot, reserved_minor=amount))
        CreditGrant.objects.filter(pk=lot.pk).update(reserved_minor=F("reserved_minor") + amount)
    CreditUse.objects.bulk_create(uses)


def reserve_more(*, hold: Hold, amount_minor: int) -> None:
    """Reserve up to `amount_minor` more of free credit for an open hold. The caller has locked the wallet."""
    for lot in _free_lots(hold.account.organization_id):
        amount = min(amount_minor, lot.free_minor)
        if not amount:
            break
        CreditGrant.objects.filter(pk=lot.pk).update(reserved_minor=F("reserved_minor") + amount)
        _add_reserved(hold, lot.pk, amount)
        amount_minor -= amount


def move_reserved(*, source: Hold, target: Hold, limit_minor: int) -> None:
    """Move up to `limit_minor` of reserved credit, soonest expiry first, from a sweep's hold to a trial's hold.

    The trial's amount was taken out of the sweep's hold `source`. The caller has locked `source` and the wallet. The
    total that is reserved of each lot does not change.
    """
    # `_SPENDING_ORDER` of the lots, as fields of their uses.
    order = (F("grant__expires_at").asc(nulls_last=True), "grant__created_at", "grant__pk")
    for use in CreditUse.objects.filter(hold=source, reserved_minor__gt=0).order_by(*order):
        amount = min(limit_minor, use.reserved_minor)
        if not amount:
            break
        CreditUse.objects.filter(pk=use.pk).update(reserved_minor=F("reserved_minor") - amount)
        _add_reserved(target, use.grant_id, amount)
        limit_minor -= amount


def _add_reserved(hold: Hold, grant_id: uuid.UUID, amount_minor: int) -> None:
    """Note that a hold reserves more of a lot. The caller updates the lot's own total (`reserved_minor`)."""
    use, _created = CreditUse.objects.get_or_create(hold=hold, grant_id=grant_id)
    CreditUse.objects.filter(pk=use.pk).update(reserved_minor=F("reserved_minor") + amount_minor)


def spend(*, hold: Hold, amount_minor: int, parent: Hold | None = None) -> int:
    """Pay a charge of `amount_minor` from credit as far as possible, and release the hold's reservations.

    Returns the credit used, in minor units. For a trial of a sweep, `parent` is the sweep's hold: credit that the trial
    does not use stays reserved for `parent`. The caller has locked the hold, `parent` and, through `ledger.unhold`, the
    wallet.
    """
    # A trial returns this amount to `parent`, so it also returns at most this much of the reserved credit.
    unused_minor = hold.amount_minor - amount_minor
    reserved_by_lot = dict(CreditUse.objects.filter(hold=hold).values_list("grant_id", "reserved_minor"))
    unpaid, used = amount_minor, 0
    now = timezone.now()
    for lot in _spendable_lots(hold, now):
        reserved = reserved_by_lot.get(lot.pk, 0)
        is_expired = lot.expires_at is not None and lot.expires_at <= now
        # From an expired lot, the hold can spend only the part that it reserved.
        amount = min(unpaid, reserved if is_expired else lot.free_minor + reserved)
        if not amount and lot.pk not in reserved_by_lot:  # nothing to pay from this lot, and nothing to release
            continue
        # The charge takes reserved credit before free credit; the rest of the reserved credit can return.
        returned = min(unused_minor, reserved - min(amount, reserved)) if parent else 0
        if parent and returned:
            _add_reserved(parent, lot.pk, returned)
            unused_minor -= returned
        CreditGrant.objects.filter(pk=lot.pk).update(
            reserved_minor=F("reserved_minor") - reserved + returned, used_minor=F("used_minor") + amount
        )
        CreditUse.objects.update_or_create(
            hold=hold, grant_id=lot.pk, defaults={"reserved_minor": 0, "used_minor": amount}
        )
        unpaid -= amount
        used += amount
    return used


# --- Expire -----------------------------------------------------------------------------------------------------------


def remove_expired(*, account: Account) -> int:
    """Remove expired credit from a wallet and return its amount in minor units.

    Credit that an open hold reserves stays until that hold ends. Call this before a new hold, in its transaction, so
    that the hold cannot use expired credit.
    """
    expired_lots = lots_of(account.organization_id).filter(_UNRESERVED, expires_at__lte=timezone.now())
    if not expired_lots.exists():  # the usual case, without locking the wallet
        return 0
    removed = 0
    with transaction.atomic():
        locked = Account.objects.select_for_update(no_key=True).get(pk=account.pk)
        source = ledger.platform_account(Account.Kinds.CREDIT, locked.currency)
        for lot in expired_lots.all():  # `all` reads the lots again, under the lock
            # The wallet may have less available than the lot has free: if a lot expires while a hold is being placed,
            # the hold can take the lot's money without reserving it. A later call removes the rest. `locked` keeps the
            # balance from before the loop, so the amounts that the loop has removed are subtracted.
            amount = min(lot.free_minor, locked.available_minor - removed)
            if amount <= 0:
                continue
            ledger.post(
                # A lot can expire in parts, so the reference also has the amount that expired before, which grows.
                reference=f"credit-expired:{lot.pk}:{lot.expired_minor}",
                kind="credit-expired",
                description=gettext_noop("Expired credit"),
                entries=[(locked, -amount), (source, amount)],
            )
            CreditGrant.objects.filter(pk=lot.pk).update(expired_minor=F("expired_minor") + amount)
            removed += amount
    return removed


def forfeit(*, account: Account) -> None:
    """End all credit of an organization that closes. Safe to repeat."""
    now = timezone.now()
    lots = CreditGrant.objects.filter(_UNSPENT, organization=account.organization_id)
    lots.filter(Q(expires_at=None) | Q(expires_at__gt=now)).update(expires_at=now)
    remove_expired(account=account)


def remove_all_expired(*, limit: int = 1000) -> int:
    """Remove expired credit from at most `limit` wallets, so that a call is short. Returns how many wallets changed.

    The next call continues with the other wallets, because the query no longer finds a changed wallet.
    """
    owners = CreditGrant.objects.filter(_UNRESERVED, expires_at__lte=timezone.now()).values("organization")
    accounts = Account.objects.filter(kind=Account.Kinds.WALLET, organization__in=owners)[:limit]
    return sum(remove_expired(account=account) > 0 for account in accounts)


# --- Read -------------------------------------------------------------------------------------------------------------


def credit_minor(account: Account) -> int:
    """Return the part of a wallet's available balance that is credit, in minor units."""
    return _free_minor(CreditGrant.objects.filter(_UNRESERVED, organization=account.organization_id))


def expired_minor(account: Account) -> int:
    """Return the expired credit that `remove_expired` has yet to remove from a wallet, in minor units."""
    lots = CreditGrant.objects.filter(_UNRESERVED, organization=account.organization_id)
    return min(_free_minor(lots.filter(expires_at__lte=timezone.now())), account.available_minor)


def _free_minor(lots: QuerySet[CreditGrant]) -> int:
    """Return the credit of lots that is neither used, expired nor reserved, in minor units."""
    free_minor = F("amount_minor") - F("used_minor") - F("expired_minor") - F("reserved_minor")
    return int(lots.aggregate(total=Sum(free_minor, default=0))["total"])


def paid_minor(account: Account) -> int:
    """Return the part of a wallet's available balance that was paid in. Tax and debts are paid only from it."""
    return max(0, account.available_minor - credit_minor(account))


def lots_of(organization: Organization | int | None) -> QuerySet[CreditGrant]:
    """Return all lots of an organization in the order in which they are spent."""
    return CreditGrant.objects.filter(organization=organization).order_by(*_SPENDING_ORDER)


def used_by_hold(hold_ids: Sequence[int]) -> dict[int, int]:
    """Return the credit that each hold used, in minor units by hold id. Holds that used no credit are missing."""
    rows = (
        CreditUse.objects.filter(hold__in=hold_ids, used_minor__gt=0).values("hold").annotate(total=Sum("used_minor"))
    )
    return {row["hold"]: row["total"] for row in rows.order_by()}


def _free_lots(organization_id: int | None) -> QuerySet[CreditGrant]:
    """Return the lots with free credit, which a hold can reserve, in the order in which they are spent."""
    return lots_of(organization_id).filter(_UNRESERVED, _not_expired(timezone.now()))


def _spendable_lots(hold: Hold, now: datetime) -> QuerySet[CreditGrant]:
    """Return the unspent lots that can pay for a hold: all that it reserved, and all others that have not expired."""
    reserved = Exists(CreditUse.objects.filter(hold=hold, grant=OuterRef("pk")))
    return lots_of(hold.account.organization_id).filter(_UNSPENT, _not_expired(now) | Q(reserved))


def _not_expired(now: datetime) -> Q:
    return Q(expires_at=None) | Q(expires_at__gt=now)
