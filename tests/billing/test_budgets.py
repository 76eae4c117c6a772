"""Budgets: what counts, the hard stop under a race, warnings once a month; wallets that run low; on PostgreSQL."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core import mail
from django.core.mail.backends import locmem
from django.utils import timezone

from billing import budgets, charges, mails
from billing.errors import BudgetExceeded, NoWallet
from billing.models import Account, BalanceWarning, Budget, BudgetAlert, Hold
from billing.pricing import Usage
from console.accounts import services
from console.accounts.errors import InvalidInput
from console.accounts.models import Membership
from console.accounts.roles import Role
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import book, quote, wallet
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


@pytest.fixture
def owner() -> Membership:
    book()
    return MembershipFactory(role=Role.OWNER)


@pytest.fixture
def account(owner: Membership) -> Account:
    """A wallet with 10,000; nodes cost 360 an hour: 1 for 10 seconds."""
    return wallet(owner.organization, balance_minor=10_000)


def offer(account: Account, member: Membership, amount: int):
    return quote(account, member=member, seconds=amount * 10)


def buy(account: Account, member: Membership, amount: int) -> Hold:
    made = offer(account, member, amount)
    return charges.hold(quote=made, reference=f"order:{made.pk}", user=member.user)


def settle(hold: Hold, amount: int) -> None:
    charges.settle(hold=hold, usage=Usage(amount * 10, completed=True), title="A run")


def budget(owner: Membership, amount: int, member: Membership | None = None) -> Budget:
    made = budgets.set_budget(membership=owner, user=member.user if member else None, amount_minor=amount)
    assert made is not None
    return made


def test_charged_and_held_money_counts(owner, account):
    budget(owner, 1000)
    settle(buy(account, owner, 600), 250)
    buy(account, owner, 300)
    (state,) = budgets.states(owner.organization)
    assert (state.charged_minor, state.held_minor, state.left_minor, state.reached) == (250, 300, 450, 50)


def test_the_hard_stop_is_at_the_cent(owner, account):
    budget(owner, 500)
    buy(account, owner, 300)
    with pytest.raises(BudgetExceeded, match=r"\$5\.00 a month; \$2\.00 of it is left and this needs \$2\.01"):
        buy(account, owner, 201)
    buy(account, owner, 200)
    account.refresh_from_db()
    assert account.held_minor == 500


def test_a_refused_order_leaves_nothing_held(owner, account):
    budget(owner, 100)
    with pytest.raises(BudgetExceeded):
        buy(account, owner, 101)
    account.refresh_from_db()
    assert account.held_minor == 0
    assert not Hold.objects.exists()


def test_a_members_budget_is_of_what_the_member_buys_whoever_asked_for_the_quote(owner, account):
    member = MembershipFactory(organization=owner.organization, role=Role.MEMBER)
    budget(owner, 100, member)
    foreign = offer(account, owner, 150)
    with pytest.raises(BudgetExceeded, match=member.user.email):
        charges.hold(quote=foreign, reference="evading", user=member.user)
    charges.hold(quote=foreign, reference="the owner", user=owner.user)
    buy(account, member, 100)
    states = budgets.states(owner.organization)
    assert [(state.budget.user, state.committed_minor) for state in states] == [(member.user, 100)]


def test_last_month_does_not_count_but_what_it_left_held_does(owner, account):
    budget(owner, 1000)
    past = buy(account, owner, 400)
    settle(past, 400)
    Hold.objects.filter(pk=past.pk).update(ended_at=budgets.month_start() - timedelta(seconds=1))
    running = buy(account, owner, 300)
    Hold.objects.filter(pk=running.pk).update(created_at=budgets.month_start() - timedelta(days=3))
    (state,) = budgets.states(owner.organization)
    assert (state.charged_minor, state.held_minor) == (0, 300)


def test_a_free_run_passes_any_budget(owner, account):
    budget(owner, 100)
    buy(account, owner, 100)
    budgets.require_room(account=account, user=owner.user, amount_minor=0)


@pytest.mark.django_db(transaction=True)
def test_two_orders_at_once_can_not_both_take_the_last_room(owner, account):
    budget(owner, 500)
    offers = [offer(account, owner, 300) for _ in range(4)]
    outcomes = together(
        *[lambda made=made: charges.hold(quote=made, reference=str(made.pk), user=owner.user) for made in offers]
    )
    assert [type(error) for error in raised(outcomes)] == [BudgetExceeded] * 3
    account.refresh_from_db()
    assert account.held_minor == 300


def test_setting_changing_and_taking_away(owner, account):
    budget(owner, 500)
    budget(owner, 700)
    assert Budget.objects.get().amount_minor == 700
    assert budgets.set_budget(membership=owner, user=None, amount_minor=None) is None
    assert not Budget.objects.exists()


def test_what_is_refused(owner, account, stranger):
    with pytest.raises(InvalidInput) as refused:
        budgets.set_budget(membership=owner, user=stranger.user, amount_minor=5)
    assert "member" in refused.value.fields
    for amount in (0, -1, budgets.MOST_MINOR + 1):
        with pytest.raises(InvalidInput):
            budgets.set_budget(membership=owner, user=None, amount_minor=amount)
    with pytest.raises(NoWallet):
        budgets.set_budget(membership=stranger, user=None, amount_minor=5)


# Warnings


def test_each_threshold_is_told_once_a_month(owner, account):
    budget(owner, 1000)
    watched = lambda: (budgets.watch(), mails.send_due())[1]
    buy(account, owner, 499)
    assert watched() == 0
    buy(account, owner, 1)
    assert (watched(), watched()) == (1, 0)
    buy(account, owner, 300)
    assert (watched(), watched()) == (1, 0)
    buy(account, owner, 200)
    assert (watched(), watched()) == (1, 0)
    assert [alert.percent for alert in BudgetAlert.objects.order_by("pk")] == [50, 80, 100]
    assert [message.subject.split("] ")[1][:4].strip() for message in mail.outbox] == ["50 %", "80 %", "100"]
    assert "$10.00" in mail.outbox[2].body
    assert "New orders are refused" in mail.outbox[2].body


def test_several_thresholds_at_once_are_one_mail(owner, account):
    budget(owner, 100)
    buy(account, owner, 85)
    assert len(budgets.watch()) == 2
    assert mails.send_due() == 1
    assert "80 %" in mail.outbox[0].subject


def test_a_new_month_tells_again(owner, account):
    budget(owner, 100)
    buy(account, owner, 60)
    budgets.watch()
    BudgetAlert.objects.update(month=budgets.month_start().date() - timedelta(days=1))
    assert [alert.percent for alert in budgets.watch()] == [50]


def test_who_is_told(owner, account):
    paying = MembershipFactory(organization=owner.organization, role=Role.BILLING)
    member = MembershipFactory(organization=owner.organization, role=Role.MEMBER)
    MembershipFactory(organization=owner.organization, role=Role.VIEWER)
    gone = MembershipFactory(organization=owner.organization, role=Role.OWNER)
    gone.user.is_active = False
    gone.user.save()
    budget(owner, 100, member)
    buy(account, member, 100)
    budgets.watch()
    mails.send_due()
    assert set(mail.outbox[0].to) == {owner.user.email, paying.user.email, member.user.email}


def test_a_mail_that_could_not_be_sent_is_sent_by_the_next_sweep(owner, account, monkeypatch):
    budget(owner, 100)
    buy(account, owner, 60)
    budgets.watch()

    def fail(*_args, **_options):
        raise ConnectionRefusedError

    with monkeypatch.context() as patched:
        patched.setattr(locmem.EmailBackend, "send_messages", fail)
        assert mails.send_due() == 0
    assert (mails.send_due(), len(mail.outbox)) == (1, 1)


def test_a_subject_holds_one_line(owner, account):
    owner.organization.name = "Evil\nBcc: victim@example.com"
    owner.organization.save()
    budget(owner, 100)
    buy(account, owner, 60)
    budgets.watch()
    assert mails.send_due() == 1
    assert "\n" not in mail.outbox[0].subject


class TestOfSomebodyWhoLeft:
    """What an organization spends is none of a former member's business; a budget that nobody can use is none."""

    @pytest.fixture
    def leaver(self, owner, account) -> Membership:
        member = MembershipFactory(organization=owner.organization, role=Role.MEMBER)
        budget(owner, 100, member)
        settle(buy(account, member, 60), 60)
        return member

    def leave(self, leaver, owner):
        services.remove_member(membership=leaver, actor=owner.user)

    def test_is_shown_and_watched_no_more(self, owner, leaver):
        self.leave(leaver, owner)
        assert budgets.states(owner.organization) == []
        assert budgets.watch() == []

    def test_tells_nobody_what_was_noticed_before(self, owner, leaver):
        assert len(budgets.watch()) == 1
        self.leave(leaver, owner)
        assert (mails.send_due(), mail.outbox) == (0, [])

    def test_holds_again_when_they_come_back(self, owner, leaver, account):
        self.leave(leaver, owner)
        again = MembershipFactory(organization=owner.organization, user=leaver.user, role=Role.MEMBER)
        (state,) = budgets.states(owner.organization)
        assert state.committed_minor == 60
        with pytest.raises(BudgetExceeded):
            buy(account, again, 41)


@pytest.mark.django_db(transaction=True)
def test_two_watches_at_once_tell_once(owner, account):
    budget(owner, 100)
    buy(account, owner, 60)
    outcomes = together(budgets.watch, budgets.watch, budgets.watch)
    assert not raised(outcomes)
    assert sum(map(len, outcomes)) == 1
    assert sum(together(mails.send_due, mails.send_due)) == 1


# A wallet that runs low


def spend(account: Account, owner: Membership, amount: int, *, days_ago: int = 1) -> None:
    hold = buy(account, owner, amount)
    settle(hold, amount)
    Hold.objects.filter(pk=hold.pk).update(ended_at=timezone.now() - timedelta(days=days_ago))
    account.refresh_from_db()


def test_a_wallet_with_less_than_a_week_of_recent_spend_runs_low(owner, account):
    spend(account, owner, 6600)
    assert (account.available_minor, budgets.balance(account).is_low) == (3400, False)
    spend(account, owner, 100)
    assert (account.available_minor, budgets.balance(account).is_low) == (3300, True)
    assert budgets.balance(account).days_left == 6


def test_what_is_held_is_not_there_to_spend(owner, account):
    spend(account, owner, 6000)
    assert not budgets.balance(account).is_low
    buy(account, owner, 1500)
    account.refresh_from_db()
    assert budgets.balance(account).is_low


def test_a_customer_who_spends_nothing_is_not_warned(owner, account):
    spend(account, owner, 9000, days_ago=budgets.SPEND_DAYS + 1)
    assert not budgets.balance(account).is_low


def test_a_low_wallet_is_told_once_until_it_has_enough_again(owner, account):
    spend(account, owner, 9000)
    budgets.watch_balances()
    budgets.watch_balances()
    assert (mails.send_due(), mails.send_due(), len(mail.outbox)) == (1, 0, 1)
    assert "runs low" in mail.outbox[0].subject
    wallet(owner.organization, balance_minor=9000)
    budgets.watch_balances()
    assert not BalanceWarning.objects.exists()
    account.refresh_from_db()
    spend(account, owner, 8000)
    budgets.watch_balances()
    assert mails.send_due() == 1
