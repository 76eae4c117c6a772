"""Limits that customers set: a budget of a month for the organization and for a member; and wallets that run low.

The one rule: what counts is committed money, charged this month or held now, so that no order passes a budget by
running long. A new order is checked while its wallet's row is locked: two at once can't both take the last room.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet, Sum
from django.utils import timezone
from django.utils.translation import gettext as _

from billing import selectors
from billing.errors import BudgetExceeded, NoWallet
from billing.models import Account, BalanceWarning, Budget, BudgetAlert, Hold
from billing.wording import money
from console.accounts.errors import InvalidInput
from console.accounts.models import Membership, Organization, User
from console.accounts.services import record
from console.operations.kept import Kept, given

THRESHOLDS = (50, 80, 100)
"""Percent of a budget at which its people are told."""
MOST_MINOR = 10**12
SPEND_DAYS = 14
"""Recent spend is the average of so many days."""
STANDS = Q(user=None) | Exists(
    Membership.objects.filter(organization=OuterRef("organization"), user=OuterRef("user")).values("pk")
)
"""Of budgets: not of those who have left. Theirs is told to nobody, and holds again should they come back."""
_MINE = Kept(
    lambda: Budget.objects.filter(
        Q(user=None) | Q(user=given("user")), organization=given("organization")
    ).select_related("user")
)
WARNED_DAYS = 7
"""A wallet runs low when it has less than the recent spend of so many days."""


@dataclass(frozen=True)
class BudgetState:
    """A budget with what is committed of it this month, in minor units."""

    budget: Budget
    charged_minor: int
    held_minor: int
    currency: str

    @property
    def committed_minor(self) -> int:
        """What counts."""
        return self.charged_minor + self.held_minor

    @property
    def left_minor(self) -> int:
        """What new orders may still hold; never negative."""
        return max(0, self.budget.amount_minor - self.committed_minor)

    @property
    def fraction(self) -> float:
        """0..1, more where it is passed."""
        return self.committed_minor / self.budget.amount_minor

    @property
    def reached(self) -> int:
        """The highest threshold that is reached, in percent; 0 for none."""
        return max(
            (step for step in THRESHOLDS if self.committed_minor * 100 >= self.budget.amount_minor * step), default=0
        )


def month_start(at: datetime | None = None) -> datetime:
    """The first moment of the month, in the installation's time zone."""
    return timezone.localtime(at).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def set_budget(*, membership: Membership, user: User | None, amount_minor: int | None) -> Budget | None:
    """Set, change or (None) take away the budget of a member, or of the organization. Raises InvalidInput, NoWallet."""
    organization = membership.organization
    if selectors.wallet(organization) is None:
        raise NoWallet
    if user is not None and not organization.memberships.filter(user=user).exists():
        raise InvalidInput(fields={"member": _("Choose a member of your organization.")})
    if amount_minor is not None and not 0 < amount_minor <= MOST_MINOR:
        raise InvalidInput(fields={"amount": _("Give an amount above 0.")})
    with transaction.atomic():
        found = Budget.objects.filter(organization=organization, user=user)
        data = {"member": user.email if user else "", "amount_minor": amount_minor}
        record(organization=organization, actor=membership.user, action="budget.changed", data=data)
        if amount_minor is None:
            found.delete()
            return None
        budget, _made = Budget.objects.update_or_create(
            organization=organization,
            user=user,
            defaults={"amount_minor": amount_minor, "set_by": membership.user},
        )
    return budget


def require_room(*, account: Account, user: User | None, amount_minor: int) -> None:
    """Raise BudgetExceeded where an order of this amount would pass a budget. The caller has locked the wallet."""
    budgets = _MINE.all(organization=account.organization_id, user=user) if amount_minor else []
    for state in _states(budgets, account):
        if state.committed_minor + amount_minor > state.budget.amount_minor:
            raise BudgetExceeded(_refusal(state, amount_minor))


def states(organization: Organization) -> list[BudgetState]:
    """Every budget of an organization with where it stands; its own first."""
    account = selectors.wallet(organization)
    if account is None:
        return []
    budgets = Budget.objects.filter(STANDS, organization=organization).select_related("user")
    return sorted(_states(budgets, account), key=lambda state: (state.budget.user_id is not None, state.budget.pk))


# --- A wallet that runs low -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Balance:
    """How a wallet stands against what is spent lately, in minor units."""

    account: Account
    daily_minor: Decimal
    """What was charged on an average day of late."""

    @property
    def is_low(self) -> bool:
        """Whether it lasts less than a week, at the recent pace. A customer who spends nothing is not warned."""
        return self.daily_minor > 0 and self.account.available_minor < self.daily_minor * WARNED_DAYS

    @property
    def days_left(self) -> int:
        """For how many whole days it lasts; meaningful where something is spent."""
        return int(self.account.available_minor / self.daily_minor) if self.daily_minor else 0


def balance(account: Account) -> Balance:
    """How long a wallet lasts at the recent pace."""
    since = timezone.now() - timedelta(days=SPEND_DAYS)
    spent = account.holds.filter(ended_at__gte=since).aggregate(total=Sum("charged_minor"))["total"] or 0
    return Balance(account, Decimal(spent) / SPEND_DAYS)


# --- The watch: called by beat ----------------------------------------------------------------------------------------


def watch() -> list[BudgetAlert]:
    """Write down every threshold that was reached, once for each budget and month. Gives those that are new.

    Of several that one order reached, all are written and the highest alone is left to be mailed.
    """
    month = month_start().date()
    fresh: list[BudgetAlert] = []
    for budget in Budget.objects.filter(STANDS).select_related("organization", "user").iterator():
        account = selectors.wallet(budget.organization)
        if account is None:
            continue
        state = next(iter(_states([budget], account)))
        fresh += _alerts(state, month)
    return fresh


def watch_balances() -> None:
    """Write down every wallet that runs low, and forget those that have enough again."""
    accounts = Account.objects.filter(kind=Account.Kinds.WALLET).select_related("organization", "warning")
    spenders = Hold.objects.filter(ended_at__gte=timezone.now() - timedelta(days=SPEND_DAYS)).values("account")
    for account in accounts.filter(Q(pk__in=spenders) | Q(warning__isnull=False)).iterator():
        if balance(account).is_low:
            BalanceWarning.objects.bulk_create([BalanceWarning(account=account)], ignore_conflicts=True)
        else:
            BalanceWarning.objects.filter(account=account).delete()


def _alerts(state: BudgetState, month: date) -> list[BudgetAlert]:
    reached = [step for step in THRESHOLDS if step <= state.reached]
    if not reached:
        return []
    with transaction.atomic():
        Budget.objects.select_for_update().get(pk=state.budget.pk)
        known = set(state.budget.alerts.filter(month=month).values_list("percent", flat=True))
        fresh = [
            BudgetAlert(
                budget=state.budget,
                month=month,
                percent=step,
                committed_minor=state.committed_minor,
                mailed_at=None if step == reached[-1] else timezone.now(),
            )
            for step in reached
            if step not in known
        ]
        return BudgetAlert.objects.bulk_create(fresh)


def _states(budgets: QuerySet[Budget] | list[Budget], account: Account) -> Iterable[BudgetState]:
    """What is committed of each budget, read when it is asked for."""
    for budget in budgets:
        holds = account.holds.filter(placed_by=budget.user_id) if budget.user_id else account.holds.all()
        # By the time of the charge: what a run of last month came to this month counts for this month.
        charged = holds.filter(ended_at__gte=month_start()).aggregate(total=Sum("charged_minor"))["total"]
        held = holds.filter(state=Hold.States.HELD).aggregate(total=Sum("amount_minor"))["total"]
        yield BudgetState(budget, charged or 0, held or 0, account.currency)


def _refusal(state: BudgetState, amount_minor: int) -> str:
    figures = {
        "budget": money(state.budget.amount_minor, state.currency),
        "left": money(state.left_minor, state.currency),
        "needed": money(amount_minor, state.currency),
        "member": str(state.budget.user),
    }
    if state.budget.user_id:
        return (
            _(
                "The budget of %(member)s is %(budget)s a month; %(left)s of it is left and this needs %(needed)s."
                " Set a lower ceiling, or ask an owner to raise it."
            )
            % figures
        )
    return (
        _(
            "Your organization's budget is %(budget)s a month; %(left)s of it is left and this needs %(needed)s."
            " Set a lower ceiling, or ask an owner to raise it."
        )
        % figures
    )
