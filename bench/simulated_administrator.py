"""Actions of an administrator in the simulation: grants of credit, invoices, credit notes, write-offs.

The process may crash at any statement of an action. All actions but `write_off` are then repeated.
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
from billing.models import Account, CreditGrant, Hold, Invoice
from console.accounts.models import Organization, User


class InvariantBroken(Exception):
    """An invariant does not hold; the text says which, where and with which seed."""


@dataclass
class Customer:
    """An organization with a wallet, and its open holds.

    `max_top_up_minor` is small for some customers. When a bank takes a payment back, they have already spent the money,
    and so come to owe it.
    """

    organization: Organization
    user: User
    account: Account
    max_top_up_minor: int
    purchases: int = 0
    holds: list[Hold] = field(default_factory=list)


class SimulatedAdministrator:
    """The administrator's actions. Each returns whether it did anything.

    The subclass `SimulatedCustomers` has all other actions, and defines how calls fail.
    """

    seed: int
    chance: random.Random
    administrator: User
    customers: list[Customer]

    def _maybe_crash(self, call: Callable[[], Any]) -> bool:
        """At random, make the call and try to crash it, or do nothing. Return whether it crashed."""
        raise NotImplementedError

    def _call_with_faults(self, call: Callable[[], Any]) -> None:
        """Make the call, which may crash or lose the network, and ignore a refusal. A crashed call is not repeated."""
        raise NotImplementedError

    def grant_credit(self, customer: Customer) -> bool:
        """Grant credit, some of it for seconds only."""
        lifetime = self.chance.choice([None, timedelta(seconds=self.chance.uniform(0, 20))])
        grant = CreditGrant(
            organization=customer.organization,
            amount_minor=self.chance.randint(1, 500),
            reason="A gift",
            expires_at=lifetime and timezone.now() + lifetime,
        )
        credit.grant(credit_grant=grant, user=self.administrator, account=customer.account)
        return True

    def expire_credit(self, customer: Customer) -> bool:
        """Grant expired credit and remove it, with all other expired credit. Credit that backs an open run stays."""
        grant = CreditGrant(
            organization=customer.organization, amount_minor=5, reason="Too late", expires_at=timezone.now()
        )
        credit.grant(credit_grant=grant, user=self.administrator, account=customer.account)
        self._maybe_crash(lambda: credit.remove_expired(account=customer.account))
        credit.remove_expired(account=customer.account)
        grant.refresh_from_db()
        if grant.left_minor:
            raise InvariantBroken(f"expired credit was not removed (seed {self.seed})")
        return True

    def issue_invoice(self, customer: Customer) -> bool:
        """Invoice all runs; their tax is paid from the wallet or owed. A second request issues no second invoice."""
        issue = lambda: invoices.issue(organization=customer.organization)
        self._maybe_crash(issue)
        invoice = issue()
        if issue() is not None:
            raise InvariantBroken(f"a run is on two invoices (seed {self.seed})")
        return invoice is not None

    def issue_credit_note(self, customer: Customer) -> bool:
        """Issue a credit note for a part of a run and its tax."""
        issued = Invoice.objects.filter(organization=customer.organization, kind=Invoice.Kinds.INVOICE)
        invoices_by_age = list(issued.order_by("pk"))
        invoice = self.chance.choice(invoices_by_age) if invoices_by_age else None
        lines = (
            [(line, open_minor) for line, open_minor in invoices.correctable_lines(invoice) if open_minor]
            if invoice
            else []
        )
        if invoice is None or not lines:
            return False
        line, open_minor = self.chance.choice(lines)
        amounts = {line.pk: self.chance.choice([open_minor, self.chance.randint(1, open_minor)])}
        issue = lambda: invoices.correct(invoice=invoice, amounts=amounts, reason="Our fault", user=self.administrator)
        self._maybe_crash(issue)
        with contextlib.suppress(InvoiceRefused):  # less than `amounts` may be left if the first call has committed
            issue()
        return True

    def write_off(self, _customer: Customer) -> bool:
        """Write off a part of some customer's debt."""
        debts = [(customer.account, receivables.owed_minor(customer.account)) for customer in self.customers]
        debts = [(account, owed_minor) for account, owed_minor in debts if owed_minor]
        if debts:
            account, owed_minor = self.chance.choice(debts)
            amount_minor = self.chance.randint(1, owed_minor)
            # Not repeated after a crash as the other actions are: each call writes off another amount.
            self._call_with_faults(
                lambda: receivables.write_off(
                    account=account, amount_minor=amount_minor, reason="Gone", user=self.administrator
                )
            )
        return bool(debts)
