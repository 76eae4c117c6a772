"""Budgets: what counts, the limit under a race, warnings once a month; wallets that run low."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest
from django.core import mail
from django.db.models import Q
from django.utils import timezone

from billing import budgets, charges, emails
from billing.costs import month_of
from billing.errors import BudgetExceeded, NoWallet
from billing.models import Account, BalanceWarning, Budget, BudgetAlert, Hold
from console.accounts import services
from console.accounts.models import Membership
from console.accounts.roles import Role
from console.core.errors import InvalidInput
from tests.billing.runs import buy, settle
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import quote, wallet
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


def set_budget(owner: Membership, amount: int | None, member: Membership | None = None) -> Budget | None:
    return budgets.set_budget(membership=owner, user=member.user if member else None, amount_minor=amount)


def send_alerts() -> int:
    """Record the thresholds reached and return how many mails were sent."""
    budgets.record_alerts()
    return emails.send_due()


class TestLimit:
    def test_is_exact_and_a_refused_order_holds_nothing(self, owner, account):
        set_budget(owner, 500)
        buy(account, 300, member=owner)
        with pytest.raises(BudgetExceeded, match=r"\$5\.00\. \$2\.00 is left, but this order needs \$2\.01"):
            buy(account, 201, member=owner)
        assert Hold.objects.count() == 1
        buy(account, 200, member=owner)
        account.refresh_from_db()
        assert account.held_minor == 500
        budgets.require_budget(account=account, user=owner.user, amount_minor=0)  # a free run needs no room

    def test_of_a_member_is_about_what_the_member_buys_whoever_asked_for_the_quote(self, owner, account, member):
        set_budget(owner, 100, member)
        offer = quote(account, member=owner, seconds=1500)  # its ceiling is 150
        with pytest.raises(BudgetExceeded, match=member.user.email):
            charges.hold(quote=offer, reference="evading", user=member.user)
        charges.hold(quote=offer, reference="the owner", user=owner.user)
        buy(account, 100, member=member)
        states = budgets.states(owner.organization)
        assert [(state.budget.user, state.committed_minor) for state in states] == [(member.user, 100)]

    def test_charged_and_held_money_counts_but_no_charge_of_last_month(self, owner, account):
        set_budget(owner, 1000)
        settle(buy(account, 600, member=owner), 250)
        past = buy(account, 400, member=owner)
        settle(past, 400)
        Hold.objects.filter(pk=past.pk).update(ended_at=month_of().start - timedelta(seconds=1))
        running = buy(account, 300, member=owner)
        Hold.objects.filter(pk=running.pk).update(created_at=month_of().start - timedelta(days=3))
        (state,) = budgets.states(owner.organization)
        # 550 of 1000 are past the threshold of 50 percent, but not past the one of 80 percent.
        assert (state.charged_minor, state.held_minor, state.left_minor, state.reached_threshold) == (250, 300, 450, 50)


@pytest.mark.django_db(transaction=True)
def test_orders_at_once_cannot_share_the_last_room_and_workers_at_once_mail_a_threshold_once(owner, account):
    set_budget(owner, 500)
    outcomes = together(*[lambda: buy(account, 300, member=owner)] * 4)
    assert [type(error) for error in raised(outcomes)] == [BudgetExceeded] * 3
    account.refresh_from_db()
    assert account.held_minor == 300
    recorded = together(*[budgets.record_alerts] * 3)
    assert [alert.percent for alerts in recorded for alert in alerts] == [50]
    assert sum(together(emails.send_due, emails.send_due)) == 1


@pytest.mark.usefixtures("account")
def test_an_invalid_budget_is_refused(owner, stranger):
    with pytest.raises(InvalidInput) as refused:
        set_budget(owner, 5, stranger)
    assert "member" in refused.value.fields
    for amount in (0, -1, budgets.MAX_BUDGET_MINOR + 1):
        with pytest.raises(InvalidInput) as refused:
            set_budget(owner, amount)
        assert refused.value.fields == {"amount_minor": "A budget must be between $0.01 and $10,000,000,000.00."}
    with pytest.raises(NoWallet):
        set_budget(stranger, 5)


class TestAlerts:
    def test_mail_each_threshold_once_a_month(self, owner, account):
        set_budget(owner, 1000)
        buy(account, 499, member=owner)
        assert send_alerts() == 0
        for amount in (1, 300, 200):
            buy(account, amount, member=owner)
            assert [send_alerts() for _ in range(2)] == [1, 0]
        assert [alert.percent for alert in BudgetAlert.objects.order_by("pk")] == [50, 80, 100]
        for message, percent in zip(mail.outbox, ("50 %", "80 %", "100"), strict=True):
            assert message.subject.split("] ")[1].startswith(percent)
        assert "$10.00" in mail.outbox[2].body
        assert "New orders are refused" in mail.outbox[2].body
        BudgetAlert.objects.update(month=month_of().start.date() - timedelta(days=1))  # as if of last month
        assert [alert.percent for alert in budgets.record_alerts()] == [50, 80, 100]
        assert emails.send_due() == 1  # for the three at once

    def test_go_to_those_who_pay_and_to_the_member_with_a_subject_of_one_line(self, owner, account, member):
        paying = MembershipFactory(organization=owner.organization, role=Role.BILLING)
        MembershipFactory(organization=owner.organization, role=Role.MEMBER)
        MembershipFactory(organization=owner.organization, role=Role.OWNER, user__is_active=False)
        owner.organization.name = "Evil\nBcc: victim@example.com"
        owner.organization.save()
        set_budget(owner, 100, member)
        buy(account, 100, member=member)
        send_alerts()
        recipients = {to for message in mail.outbox for to in message.to}
        assert recipients == {owner.user.email, paying.user.email, member.user.email}
        assert "\n" not in mail.outbox[0].subject


def test_a_former_members_budget_is_kept_but_hidden_and_sends_no_mail(owner, account, member, monkeypatch):
    """A former member must not learn what the organization spends. The budget applies again after a return."""
    set_budget(owner, 100, member)
    settle(buy(account, 60, member=member), 60)
    assert len(budgets.record_alerts()) == 1
    services.remove_member(membership=member, actor=owner.user)
    assert (budgets.states(owner.organization), budgets.record_alerts()) == ([], [])
    assert (emails.send_due(), mail.outbox) == (0, [])
    with monkeypatch.context() as patch:
        patch.setattr(budgets, "IS_ACTIVE", Q())  # as if the member left after the alerts were listed
        patch.setattr(budgets, "states", lambda _organization: [])
        assert emails.send_due() == 0
    back = MembershipFactory(organization=owner.organization, user=member.user, role=Role.MEMBER)
    (state,) = budgets.states(owner.organization)
    assert state.committed_minor == 60
    with pytest.raises(BudgetExceeded):
        buy(account, 41, member=back)


class TestLowWallet:
    def spend(self, account: Account, amount: int, *, days_ago: int = 1) -> budgets.Runway:
        """Charge a run that ended some days ago. Return how long the wallet lasts at its recent spend."""
        hold = buy(account, amount)
        settle(hold, amount)
        Hold.objects.filter(pk=hold.pk).update(ended_at=timezone.now() - timedelta(days=days_ago))
        account.refresh_from_db()
        return budgets.runway_of(account)

    def test_covers_less_than_a_week_of_recent_spend(self, account):
        assert self.spend(account, 200, days_ago=2).daily_minor.quantize(1) == 100  # of a new customer, in two days
        assert self.spend(account, 800, days_ago=budgets.SPEND_DAYS + 1).daily_minor.quantize(1) == 14  # in two weeks
        Hold.objects.update(ended_at=timezone.now() - timedelta(days=budgets.SPEND_DAYS + 1))
        assert not budgets.runway_of(account).is_low
        assert not self.spend(account, 6000).is_low  # 3000 are left: exactly a week of 6000 in 14 days
        buy(account, 100)  # held money is not available
        runway = self.spend(account, 100)
        # 6100 in the last 14 days are 436 a day, so 2800 last for six days.
        assert (account.available_minor, runway.is_low, runway.days_left) == (2800, True, 6)
        # A run of 5 in two weeks is 0.36 a day, which would be shown as 0.
        assert not budgets.Runway(Account(), Decimal(5) / budgets.SPEND_DAYS).is_low

    def test_is_mailed_once_until_it_is_filled_and_low_again(self, owner, account):
        self.spend(account, 1, days_ago=budgets.SPEND_DAYS + 1)
        self.spend(account, 8999)
        for _ in range(2):
            budgets.record_low_balances()
        assert [emails.send_due() for _ in range(2)] == [1, 0]
        assert "is low" in mail.outbox[0].subject
        wallet(owner.organization, balance_minor=9000)
        budgets.record_low_balances()
        assert not BalanceWarning.objects.exists()
        self.spend(account, 8000)
        budgets.record_low_balances()
        assert emails.send_due() == 1
