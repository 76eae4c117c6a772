"""What an administrator does in a simulated town: credit given and taken back, invoices, credit notes, debts given up.

The one rule: each act may die at any statement, and is done again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.utils import timezone

from billing import credit, invoices, receivables
from billing.errors import InvoiceRefused
from billing.models import CreditGrant, Hold, Invoice
from console.accounts.models import Organization, User


class BooksBroken(Exception):
    """An invariant does not hold; the text says which, where and by which seed."""


@dataclass
class Customer:
    """An organization with a wallet, and its open holds."""

    organization: Organization
    user: User
    account: Any
    purse: int
    """The most it pays in at once. Who pays in little has spent it when a bank takes it back, and owes it."""
    bought: int = 0
    holds: list[Hold] = field(default_factory=list)


class Office:
    """An administrator's acts; the town has the rest."""

    seed: int
    chance: random.Random
    clerk: User
    customers: list[Customer]

    def _perhaps_dying(self, call: Callable[[], Any]) -> bool:
        raise NotImplementedError

    def _with_faults(self, call: Callable[[], Any]) -> None:
        raise NotImplementedError

    def grant(self, customer: Customer) -> bool:
        """An administrator gives credit, some of it for seconds only."""
        lasts = self.chance.choice([None, timedelta(seconds=self.chance.uniform(0, 20))])
        lot = CreditGrant(
            organization=customer.organization,
            amount_minor=self.chance.randint(1, 500),
            reason="A gift",
            expires_at=lasts and timezone.now() + lasts,
        )
        credit.grant(credit=lot, user=self.clerk, account=customer.account)
        return True

    def expire(self, customer: Customer) -> bool:
        """Credit that is over is taken back, once, with what else has expired; what backs an open run stays."""
        lot = CreditGrant(
            organization=customer.organization, amount_minor=5, reason="Too late", expires_at=timezone.now()
        )
        credit.grant(credit=lot, user=self.clerk, account=customer.account)
        self._perhaps_dying(lambda: credit.take_back_expired(account=customer.account))
        credit.take_back_expired(account=customer.account)
        lot.refresh_from_db()
        if lot.left_minor:
            raise BooksBroken(f"credit that expired is still there (seed {self.seed})")
        return True

    # What they are billed

    def invoice(self, customer: Customer) -> bool:
        """Every run on an invoice, its tax out of the wallet or owed; asked for again, it is not written again."""
        issue = lambda: invoices.issue(organization=customer.organization)
        self._perhaps_dying(issue)
        made = issue()
        if issue() is not None:
            raise BooksBroken(f"a run stands on two invoices (seed {self.seed})")
        return made is not None

    def correct(self, customer: Customer) -> bool:
        """A credit note for a part of a run, its tax with it."""
        found = Invoice.objects.filter(organization=customer.organization, kind=Invoice.Kinds.INVOICE).order_by("?")
        invoice = found.first()
        open_lines = [(line, left) for line, left in invoices.correctable(invoice) if left] if invoice else []
        if invoice is None or not open_lines:
            return False
        line, left = self.chance.choice(open_lines)
        back = {line.pk: self.chance.choice([left, self.chance.randint(1, left)])}
        note = lambda: invoices.correct(invoice=invoice, amounts=back, reason="Our fault", user=self.clerk)
        self._perhaps_dying(note)
        with contextlib.suppress(InvoiceRefused):  # nothing may be left, where the first was written
            note()
        return True

    def write_off(self, _customer: Customer) -> bool:
        """An administrator gives up a part of what is owed."""
        debts = [(each.account, receivables.owed_minor(each.account)) for each in self.customers]
        if owing := [debt for debt in debts if debt[1]]:
            account, owed = self.chance.choice(owing)
            part = self.chance.randint(1, owed)
            act = lambda: receivables.write_off(account=account, amount_minor=part, reason="Gone", user=self.clerk)
            self._with_faults(act)
        return bool(owing)
