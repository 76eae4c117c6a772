"""The money operations of a job (hold, extend, meter, settle) and of a sweep (hold, hold for each trial, release).

Each operation is idempotent. A charge never exceeds its hold. The hold is placed before the run starts, and raised
before the run gets more time. The hold of a sweep is divided among its runs, the trials. So the charges of all trials
together never exceed it either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from billing import budgets, credit, ledger, pricing, receivables
from billing.errors import HoldUsedUp, NoWallet
from billing.models import Account, Hold, HoldExtension, Quote, Receipt
from billing.selectors import wallet
from billing.usage import Usage
from console.accounts.models import User


@transaction.atomic
def hold(
    *,
    quote: Quote,
    reference: str,
    user: User | None = None,
    labels: Mapping[str, str] | None = None,
    parent: Hold | None = None,
) -> Hold:
    """Hold the quote's ceiling in the wallet, credit first. Idempotent on `reference` (see `Hold`).

    `user` is the buyer (default: the quote's creator). `labels` group costs (workspace, node spec …). For a trial,
    `parent` is the hold of its sweep, out of which the amount is taken. Raises InsufficientFunds, BudgetExceeded,
    NoWallet; with a parent only HoldUsedUp.
    """
    if existing := Hold.objects.filter(reference=reference).select_related("account", "quote").first():
        return existing
    if parent:
        return _hold_part(parent, quote, reference, user, dict(labels or {}))
    account = wallet(quote.organization)
    if account is None:
        raise NoWallet
    credit.remove_expired(account=account)
    # Locks the wallet until the transaction ends, so simultaneous orders are checked one after the other.
    ledger.hold(account=account, amount_minor=quote.ceiling_minor)
    budgets.require_budget(account=account, user=user or quote.created_by, amount_minor=quote.ceiling_minor)
    placed = Hold.objects.create(
        account=account,
        quote=quote,
        reference=reference,
        amount_minor=quote.ceiling_minor,
        placed_by=user or quote.created_by,
        labels=dict(labels or {}),
    )
    credit.reserve(hold=placed)
    return placed


def _hold_part(parent: Hold, quote: Quote, reference: str, user: User | None, labels: dict[str, str]) -> Hold:
    """Take a trial's ceiling out of the open hold of its sweep, and return the trial's own hold.

    The wallet's held amount does not change, so neither balance nor budgets need a check.
    """
    sweep_hold = Hold.objects.select_for_update(of=("self",)).select_related("account").get(pk=parent.pk)
    if sweep_hold.state != Hold.States.HELD or sweep_hold.amount_minor < quote.ceiling_minor:
        raise HoldUsedUp
    Hold.objects.filter(pk=sweep_hold.pk).update(amount_minor=F("amount_minor") - quote.ceiling_minor)
    part = Hold.objects.create(
        account=sweep_hold.account,
        quote=quote,
        reference=reference,
        amount_minor=quote.ceiling_minor,
        parent=sweep_hold,
        placed_by=user or quote.created_by,
        labels=labels,
    )
    ledger.lock(account=sweep_hold.account)  # credit changes only under this lock
    credit.move_reserved(source=sweep_hold, target=part, limit_minor=part.amount_minor)
    return part


@transaction.atomic
def extend(*, hold: Hold, quote: Quote, idempotency_key: str, user: User) -> HoldExtension:
    """Raise an open hold to the ceiling of `quote`, which prices the same purchase for a longer time.

    Idempotent on `quote`. The returned row keeps the `idempotency_key` of the request, by which `jobs` finds repeated
    requests. `user` is the member who extends the run. The added amount counts towards the budget of the hold's buyer.
    It must fit that budget and also the budget of `user`. Raises InsufficientFunds, BudgetExceeded, and ValueError if
    the hold has ended or is higher than the quote's ceiling.
    """
    locked = Hold.objects.select_for_update(of=("self",)).select_related("account", "placed_by").get(pk=hold.pk)
    if existing := HoldExtension.objects.filter(hold=locked, quote=quote).first():
        return existing
    amount_minor = quote.ceiling_minor - locked.amount_minor
    if locked.state != Hold.States.HELD or amount_minor < 0:
        raise ValueError(f"The hold {locked} cannot be raised to {quote.ceiling_minor}.")
    credit.remove_expired(account=locked.account)
    ledger.hold(account=locked.account, amount_minor=amount_minor)
    for member in {locked.placed_by, user}:
        budgets.require_budget(account=locked.account, user=member, amount_minor=amount_minor)
    locked.amount_minor = quote.ceiling_minor
    locked.save(update_fields=["amount_minor"])
    credit.reserve_more(hold=locked, amount_minor=amount_minor)
    return HoldExtension.objects.create(
        hold=locked, quote=quote, amount_minor=amount_minor, idempotency_key=idempotency_key, placed_by=user
    )


@transaction.atomic
def release(*, hold: Hold) -> None:
    """End the hold of a sweep, and return to the wallet the amount that no trial used. Safe to repeat.

    Raises ValueError while a trial is open.
    """
    locked = Hold.objects.select_for_update(of=("self",)).select_related("account").get(pk=hold.pk)
    if locked.state != Hold.States.HELD:
        return
    if locked.children.filter(state=Hold.States.HELD).exists():
        raise ValueError(f"The hold {locked} has open parts.")
    ledger.unhold(account=locked.account, amount_minor=locked.amount_minor)
    credit.spend(hold=locked, amount_minor=0)  # spends nothing, but releases the reserved credit
    # As in `settle`, the released amount pays a debt before the customer can spend it.
    receivables.collect(account=locked.account, reference=f"release:{locked.reference}")
    locked.state, locked.ended_at = Hold.States.RELEASED, timezone.now()
    locked.save(update_fields=["state", "ended_at"])


def meter(*, hold: Hold, billable_seconds: float) -> int:
    """Return the run's cost so far in minor units and store it on the hold. Changes no balance.

    `billable_seconds` are seconds on all nodes of the quote: a second on half of the nodes is half a billable second.
    """
    cost = pricing.rate(Usage(billable_seconds, completed=False), _terms(hold)).total_minor
    Hold.objects.filter(pk=hold.pk, state=Hold.States.HELD).update(metered_minor=cost)
    return cost


@transaction.atomic
def settle(*, hold: Hold, usage: Usage, title: str, free_lines: Sequence[pricing.Line] = ()) -> Receipt:
    """Charge the usage, release the rest of the hold, and return the receipt. Idempotent: repeats return that receipt.

    If the usage costs nothing, the whole hold is released. The amount that a trial does not use stays held for its
    sweep. `title` names the run on the receipt. `free_lines` (amount 0) come first on the receipt.
    """
    # The sweep's hold is locked before the trial's, as in `_hold_part`. `parent_id` never changes, so it needs no lock.
    parent = Hold.objects.select_for_update().get(pk=hold.parent_id) if hold.parent_id else None
    locked = Hold.objects.select_for_update(of=("self",)).select_related("account", "quote").get(pk=hold.pk)
    if locked.state != Hold.States.HELD:
        return locked.receipt
    charge = pricing.rate(usage, _terms(locked))
    unused_minor = locked.amount_minor - charge.total_minor
    # The unused amount of a trial stays held in the wallet, for its sweep.
    ledger.unhold(account=locked.account, amount_minor=charge.total_minor if parent else locked.amount_minor)
    if charge.total_minor:
        revenue = ledger.platform_account(Account.Kinds.REVENUE, locked.account.currency)
        ledger.post(
            reference=f"settle:{locked.reference}",
            kind="charge",
            description=title,
            entries=[(locked.account, -charge.total_minor), (revenue, charge.total_minor)],
        )
    credit.spend(hold=locked, amount_minor=charge.total_minor, parent=parent)
    if parent:
        Hold.objects.filter(pk=parent.pk).update(amount_minor=F("amount_minor") + unused_minor)
    # A payment that was disputed during the run may have left a debt. The released amount pays the debt now, before the
    # customer can spend that amount.
    receivables.collect(account=locked.account, reference=f"settle:{locked.reference}")
    locked.state = Hold.States.SETTLED if charge.total_minor else Hold.States.RELEASED
    locked.charged_minor = charge.total_minor or None  # a constraint requires None for RELEASED
    locked.metered_minor = charge.total_minor
    locked.ended_at = timezone.now()
    locked.save(update_fields=["state", "charged_minor", "metered_minor", "ended_at"])
    return Receipt.objects.create(
        hold=locked,
        organization_id=locked.quote.organization_id,
        title=title,
        currency=locked.account.currency,
        lines=[line.to_json() for line in [*free_lines, *charge.lines]],
        total_minor=charge.total_minor,
        ceiling_minor=locked.amount_minor,
        usage=usage.to_json(),
    )


def _terms(hold: Hold) -> pricing.Terms:
    """Return the terms of the hold's quote. Their ceiling is the amount of the hold, which extensions raise."""
    return dataclasses.replace(pricing.Terms.from_json(hold.quote.terms), ceiling_minor=hold.amount_minor)


def free_line(
    *,
    rule: str,
    seconds: float,
    began_at: str = "",
    ended_at: str = "",
    nodes: int = 0,
    evidence: dict[str, Any] | None = None,
) -> pricing.Line:
    """Return a receipt line of amount 0 for time that is not charged.

    `rule` is `queue`, `start`, `hang`, `platform_fault` or `after_cancel`. Times are ISO 8601 strings. The `evidence`
    of a hang or fault has `reason`, `attempt`, `at` (when the attempt ended), and the failure's `node`, `code` and
    `data`.
    """
    return pricing.Line(
        rule=rule,
        quantity=f"{max(0.0, seconds):.1f}",
        unit="seconds",
        unit_minor="0",
        amount_minor=0,
        began_at=began_at,
        ended_at=ended_at,
        nodes=nodes,
        evidence=evidence or {},
    )
