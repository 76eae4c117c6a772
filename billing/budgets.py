"""Monthly budgets of organizations and members, and warnings about low wallets.

A budget limits committed money: the charges of this month plus all open holds. A long run is therefore counted in full
from its start. New orders are checked with the wallet's row locked, so two simultaneous orders cannot both use the last
part of a budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal

from django.db import transaction
from django.db.models import F, Min, Q, QuerySet, Sum
from django.utils import timezone
from django.utils.translation import gettext as _

from billing import selectors
from billing.amounts import money
from billing.costs import month_of
from billing.errors import BudgetExceeded, NoWallet
from billing.models import Account, BalanceWarning, Budget, BudgetAlert, Hold
from billing.pricing import round_minor
from console.accounts.models import Membership, Organization, User
from console.accounts.services import record_audit_event
from console.core.errors import InvalidInput
from console.notifications import services as notifications

THRESHOLDS = (50, 80, 100)
"""Percent of a budget at which the organization is notified."""
MAX_BUDGET_MINOR = 10**12
"""Largest budget: ten billion dollars, above any real one and far below the limit of the 64-bit column."""
SPEND_DAYS = 14
"""Past days over which spend is averaged, fewer for a new customer: two weeks level out weekends."""
IS_ACTIVE = Q(user=None) | Q(user__memberships__organization=F("organization"))
"""Condition for the budgets of organizations (`user` is None) and of current members. The budget of a member who leaves
is kept, and applies again if the member returns."""
LOW_BALANCE_DAYS = 7
"""A wallet is low when it covers less than this many days of recent spend: a week leaves time to pay in."""


@dataclass(frozen=True)
class BudgetState:
    """A budget and the money committed this month, in minor units."""

    budget: Budget
    charged_minor: int
    held_minor: int
    currency: str

    @property
    def committed_minor(self) -> int:
        """Return the money that counts against the budget: charges of this month and open holds."""
        return self.charged_minor + self.held_minor

    @property
    def left_minor(self) -> int:
        """Return the amount that new orders may hold; 0 if the budget is reached or exceeded."""
        return max(0, self.budget.amount_minor - self.committed_minor)

    @property
    def fraction(self) -> float:
        """Return committed / budget; above 1 if the budget is exceeded."""
        return self.committed_minor / self.budget.amount_minor

    @property
    def reached_threshold(self) -> int:
        """Return the highest of THRESHOLDS that is reached; 0 if none."""
        reached = (
            percent for percent in THRESHOLDS if self.committed_minor * 100 >= self.budget.amount_minor * percent
        )
        return max(reached, default=0)


def set_budget(*, membership: Membership, user: User | None, amount_minor: int | None) -> Budget | None:
    """Set the monthly budget of a member, or of the organization if `user` is None. An amount of None removes it.

    `membership` is the member who sets it. Raises InvalidInput, NoWallet.
    """
    organization = membership.organization
    account = selectors.wallet(organization)
    if account is None:
        raise NoWallet
    if user is not None and not organization.memberships.filter(user=user).exists():
        raise InvalidInput(fields={"member": _("Choose a member of your organization.")})
    if amount_minor is not None and not 0 < amount_minor <= MAX_BUDGET_MINOR:
        limits = {"least": money(1, account.currency), "most": money(MAX_BUDGET_MINOR, account.currency)}
        raise InvalidInput(fields={"amount_minor": _("A budget must be between %(least)s and %(most)s.") % limits})
    with transaction.atomic():
        data = {"member": user.email if user else "", "amount_minor": amount_minor}
        record_audit_event(organization=organization, actor=membership.user, action="budget.changed", data=data)
        if amount_minor is None:
            Budget.objects.filter(organization=organization, user=user).delete()
            return None
        budget, _created = Budget.objects.update_or_create(
            organization=organization,
            user=user,
            defaults={"amount_minor": amount_minor, "set_by": membership.user},
        )
    return budget


def require_budget(*, account: Account, user: User | None, amount_minor: int) -> None:
    """Raise BudgetExceeded if an order of `user` would exceed a budget. The caller has locked the wallet."""
    if sentence := refusal(account=account, user=user, amount_minor=amount_minor):
        raise BudgetExceeded(sentence)


def refusal(*, account: Account, user: User | None, amount_minor: int) -> str:
    """Return why a budget refuses an order of this amount, as a message for the user. Empty if no budget refuses it.

    The budgets of the organization and of the user are checked. An order that costs nothing is never refused.
    """
    if not amount_minor:
        return ""
    budgets = Budget.objects.filter(Q(user=None) | Q(user=user), organization=account.organization_id)
    for state in _load_states(budgets.select_related("user"), account):
        if state.committed_minor + amount_minor > state.budget.amount_minor:
            return _refusal_message(state, amount_minor)
    return ""


def states(organization: Organization) -> list[BudgetState]:
    """Return the organization's budgets with their committed money, the organization's own first."""
    account = selectors.wallet(organization)
    return states_of(account) if account else []


def states_of(account: Account) -> list[BudgetState]:
    """Return the budgets of a wallet's organization with their committed money, the organization's own first."""
    budgets = Budget.objects.filter(IS_ACTIVE, organization=account.organization_id).order_by()
    # Not joined, because most organizations have no budgets of members: the query then reads no columns of users.
    budgets = budgets.prefetch_related("user")
    return sorted(_load_states(budgets, account), key=lambda state: (state.budget.user_id is not None, state.budget.pk))


# --- Low wallets ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runway:
    """How long a wallet lasts at its recent daily spend."""

    account: Account
    daily_minor: Decimal
    """Average charges per day in minor units: of the last `SPEND_DAYS` days, or since a new customer's first charge."""

    @property
    def is_low(self) -> bool:
        """Return whether the wallet covers less than `LOW_BALANCE_DAYS` of recent spend.

        False without spend, and if the daily spend is so small that it is shown as 0.
        """
        return round_minor(self.daily_minor) > 0 and self.account.available_minor < self.daily_minor * LOW_BALANCE_DAYS

    @property
    def days_left(self) -> int:
        """Return the number of whole days that the wallet covers; 0 without recent spend."""
        return int(self.account.available_minor / self.daily_minor) if self.daily_minor else 0


def runway_of(account: Account) -> Runway:
    """Return how long the wallet lasts at the spend of the last SPEND_DAYS days.

    For a new customer, average only over the time since the first charge, at least one day, as `costs.forecast` does.
    """
    now = timezone.now()
    since = now - timedelta(days=SPEND_DAYS)
    charged = account.holds.filter(charged_minor__gt=0)
    recent = charged.filter(ended_at__gte=since).aggregate(total=Sum("charged_minor", default=0), first=Min("ended_at"))
    period = timedelta(days=SPEND_DAYS)
    if recent["first"] and not charged.filter(ended_at__lt=since).exists():
        period = max(now - recent["first"], timedelta(days=1))
    return Runway(account, recent["total"] / Decimal(str(period / timedelta(days=1))))


# --- Periodic checks, called by Celery beat ---------------------------------------------------------------------------


def record_alerts() -> list[BudgetAlert]:
    """Record each threshold reached, once per budget and month, and return the new alerts.

    If several thresholds are reached at once, all are recorded, but only the highest is emailed.
    """
    month = month_of().start.date()
    new_alerts: list[BudgetAlert] = []
    for budget in Budget.objects.filter(IS_ACTIVE).select_related("organization", "user").iterator():
        account = selectors.wallet(budget.organization)
        if account is None:
            continue
        (state,) = _load_states([budget], account)
        new_alerts += _record_thresholds(state, month)
    return new_alerts


def record_low_balances() -> None:
    """Create a BalanceWarning for each wallet that became low, and delete the warnings of wallets that are not low."""
    accounts = Account.objects.filter(kind=Account.Kinds.WALLET).select_related("organization", "warning")
    spenders = Hold.objects.filter(ended_at__gte=timezone.now() - timedelta(days=SPEND_DAYS)).values("account")
    # A wallet without recent spend is never low, so it is only looked at if it has an earlier warning to delete.
    for account in accounts.filter(Q(pk__in=spenders) | Q(warning__isnull=False)).iterator():
        if runway_of(account).is_low:
            _warn(account)
        else:
            BalanceWarning.objects.filter(account=account).delete()


@transaction.atomic
def _warn(account: Account) -> None:
    """Create the wallet's warning and notify the organization, unless a warning exists. `emails` sends the email."""
    _warning, is_new = BalanceWarning.objects.get_or_create(account=account)
    if is_new:
        data = {"available_minor": account.available_minor, "currency": account.currency}
        notifications.publish(organization=account.owner, kind="wallet.low", data=data)


def _record_thresholds(state: BudgetState, month: date) -> list[BudgetAlert]:
    """Record the thresholds that a budget reached in a month, and return those that were not recorded before."""
    reached = [percent for percent in THRESHOLDS if percent <= state.reached_threshold]
    if not reached:
        return []
    with transaction.atomic():
        Budget.objects.select_for_update().get(pk=state.budget.pk)  # a concurrent call waits and then finds the alerts
        recorded = set(state.budget.alerts.filter(month=month).values_list("percent", flat=True))
        new_alerts = BudgetAlert.objects.bulk_create(
            BudgetAlert(
                budget=state.budget,
                month=month,
                percent=percent,
                committed_minor=state.committed_minor,
                # `emails` sends only alerts whose `mailed_at` is None: of these, the one of the highest threshold.
                mailed_at=None if percent == reached[-1] else timezone.now(),
            )
            for percent in reached
            if percent not in recorded
        )
        for alert in new_alerts:
            if alert.mailed_at is None:
                data = {"percent": alert.percent, "of": str(state.budget.user or "")}
                notifications.publish(organization=state.budget.organization, kind="budget.reached", data=data)
    return new_alerts


def _load_states(budgets: QuerySet[Budget] | list[Budget], account: Account) -> Iterable[BudgetState]:
    """Yield the state of each budget. A generator, so that `refusal` stops querying at the first exceeded budget."""
    for budget in budgets:
        holds = account.holds.filter(placed_by=budget.user_id) if budget.user_id else account.holds.all()
        # A charge counts in the month in which its hold ended, that is when the run ended.
        charged = holds.filter(ended_at__gte=month_of().start).aggregate(total=Sum("charged_minor", default=0))
        held = holds.filter(state=Hold.States.HELD).aggregate(total=Sum("amount_minor", default=0))
        yield BudgetState(budget, charged["total"], held["total"], account.currency)


def _refusal_message(state: BudgetState, amount_minor: int) -> str:
    """Return why an order of this amount does not fit a budget, and what the user can do."""
    amounts = {
        "budget": money(state.budget.amount_minor, state.currency),
        "left": money(state.left_minor, state.currency),
        "needed": money(amount_minor, state.currency),
        "member": str(state.budget.user),
    }
    if state.budget.user_id:
        return (
            _(
                "The monthly budget of %(member)s is %(budget)s. %(left)s is left, but this order needs "
                "%(needed)s. Set a lower ceiling, or ask an owner to raise the budget."
            )
            % amounts
        )
    return (
        _(
            "Your organization's monthly budget is %(budget)s. %(left)s is left, but this order needs "
            "%(needed)s. Set a lower ceiling, or ask an owner to raise the budget."
        )
        % amounts
    )
