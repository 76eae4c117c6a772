"""What jobs may do with a customer's money: hold, meter, settle. Each is safe to repeat.

Hides accounts and postings. The one promise: what is charged is never more than what was held, and it was held before
the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.utils import timezone

from billing import budgets, credit, ledger, pricing, receivables
from billing.errors import NoWallet
from billing.models import Account, Hold, Quote, Receipt
from billing.selectors import wallet
from billing.usage import Usage
from console.accounts.models import User
from console.operations.kept import Kept, given

_BY_REFERENCE = Kept(lambda: Hold.objects.filter(reference=given("reference")).select_related("account", "quote"))
_LOCKED = Kept(
    lambda: Hold.objects.select_for_update(of=("self",)).select_related("account", "quote").filter(pk=given("pk"))
)


@transaction.atomic
def hold(*, quote: Quote, reference: str, user: User | None = None, labels: Mapping[str, str] | None = None) -> Hold:
    """Set the quote's ceiling aside, on credit first. `user` buys; `labels` are names that costs are told apart by.

    The same reference again gives the same hold. Raises InsufficientFunds, BudgetExceeded, NoWallet.
    """
    known = _BY_REFERENCE.first(reference=reference)
    if known:
        return known
    account = wallet(quote.organization)
    if account is None:
        raise NoWallet
    credit.take_back_expired(account=account)
    # This locks the wallet: what follows, until the end of the transaction, is done by one order after the other.
    ledger.hold(account=account, amount_minor=quote.ceiling_minor)
    budgets.require_room(account=account, user=user or quote.created_by, amount_minor=quote.ceiling_minor)
    made = Hold.objects.create(
        account=account,
        quote=quote,
        reference=reference,
        amount_minor=quote.ceiling_minor,
        placed_by=user or quote.created_by,
        labels=dict(labels or {}),
    )
    credit.reserve(hold=made)
    return made


def meter(*, hold: Hold, billable_seconds: float) -> int:
    """What the run has cost so far, in minor units; kept on the hold. It changes no balance."""
    terms = pricing.Terms.from_json(hold.quote.terms)
    cost = pricing.rate(Usage(billable_seconds, completed=False), terms).total_minor
    Hold.objects.filter(pk=hold.pk, state=Hold.States.HELD).update(metered_minor=cost)
    return cost


@transaction.atomic
def settle(*, hold: Hold, usage: Usage, title: str, free_lines: Sequence[pricing.Line] = ()) -> Receipt:
    """End a hold: charge the usage, give the rest back, write the receipt. Settling again gives the same receipt.

    Nothing used is a release. `free_lines` (amount 0) stand on the receipt before what is charged.
    """
    locked = _LOCKED.get(pk=hold.pk)
    if locked.state != Hold.States.HELD:
        return locked.receipt
    charge = pricing.rate(usage, pricing.Terms.from_json(locked.quote.terms))
    ledger.unhold(account=locked.account, amount_minor=locked.amount_minor)
    if charge.total_minor:
        revenue = ledger.platform_account(Account.Kinds.REVENUE, locked.account.currency)
        ledger.post(
            reference=f"settle:{locked.reference}",
            kind="charge",
            description=title,
            entries=[(locked.account, -charge.total_minor), (revenue, charge.total_minor)],
        )
    credit.spend(hold=locked, amount_minor=charge.total_minor)
    # What a bank took back while it was held here is owed: it is paid before anything else is bought with the rest.
    receivables.collect(account=locked.account, reference=f"settle:{locked.reference}")
    locked.state = Hold.States.SETTLED if charge.total_minor else Hold.States.RELEASED
    locked.charged_minor = charge.total_minor or None
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


def free_line(
    *,
    rule: str,
    seconds: float,
    began_at: str = "",
    ended_at: str = "",
    nodes: int = 0,
    evidence: dict[str, Any] | None = None,
) -> pricing.Line:
    """A line that says what is not charged, for how long it lasted, and what shows it.

    `rule`: `queue`, `pull`, `start`, `hang` or `platform_fault`. Moments are ISO 8601 texts; `evidence` of a fault has
    `reason`, `node`, `at`, and the failure's `code` and `data` (`billing.wording.evidence_sentence` words it).
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
