"""Closing an organization after its notice period: nothing is lost, paid twice or kept, whenever a process is killed.

`broken(BROKEN_BOOKS)` checks the ledger by SQL. `both_sides_agree` compares it with the payment provider, and
`provider.held()` is the money that the provider still holds for the console.
"""

from __future__ import annotations

from datetime import date, timedelta
from unittest.mock import Mock

import pytest
from django.db import connection, transaction
from django.utils import timezone

from billing import credit, customers, gateway, invoices, payments, refunds, storage_charges
from billing.errors import PaymentUnavailable
from billing.models import Account, CreditGrant, Dispute, Invoice, PaymentCustomer, Refund, TopUp
from billing.sandbox import checkout
from console.accounts import services
from console.accounts.models import ApiToken, AuditEvent, Closure, Membership, Quota
from console.accounts.roles import Capability, Role
from console.core.errors import InvalidInput, NotAllowed, OrganizationClosing
from jobs import closure
from jobs.models import ScriptSnapshot
from jobs.sweeps import progress
from jobs.sweeps.purchase import stop_sweep
from storage.models import Dataset, Secret, Workspace
from tests.billing.paying import both_sides_agree
from tests.books import BROKEN_BOOKS, broken
from tests.crashes import crash_at
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import book, wallet
from tests.factories.storage import DatasetFactory
from tests.provider import GOOD, REFUND_FAILS
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


@pytest.fixture
def member():
    """The owner of an organization with an active service."""
    book()
    member = MembershipFactory()
    services.activate_service(membership=member, accept_terms=True)
    return member


def pay(provider, member, amount_minor=5000, *, card=GOOD):
    """Pay into the member's wallet as at the provider's page."""
    account = wallet(member.organization)
    top_up = payments.start_top_up(account=account, amount_minor=amount_minor, user=member.user)
    provider.pay(top_up.session_id, card)
    provider.deliver()
    return top_up


def grant(member, amount_minor=700):
    credit_grant = CreditGrant(organization=member.organization, amount_minor=amount_minor, reason="test")
    credit.grant(credit_grant=credit_grant, user=None, account=wallet(member.organization))


def request(member):
    return closure.request(membership=member, confirmation=member.organization.slug)


def end_notice():
    """Let the time between the request and the closing be over."""
    Closure.objects.update(ends_at=timezone.now() - timedelta(seconds=1))


def balance(member):
    return wallet(member.organization).posted_minor


def test_closing_pays_back_what_was_paid_in_and_deletes_the_rest(provider, member, mailoutbox):
    pay(provider, member, 5000)
    pay(provider, member, 3000)
    refunds.refund(top_up=TopUp.objects.get(amount_minor=3000), amount_minor=1000, reason="Asked", user=member.user)
    grant(member)
    DatasetFactory(organization=member.organization)
    ScriptSnapshot.objects.create(organization=member.organization, sha256="0" * 64, size_bytes=5, content=b"x = 1")
    token, _secret = services.create_token(membership=member, name="ci")
    assert closure.payable_minor(member.organization) == 7000  # what was paid in and not refunded, without the credit
    request(member)
    assert not services.is_active(member.organization)
    assert [closure.announce(), closure.announce()] == [1, 0]
    assert member.user.email in mailoutbox[0].to
    assert closure.complete_due() == 0, "the notice is not over"
    assert Closure.objects.get().closed_at is None
    end_notice()
    assert [closure.complete_due(), closure.complete_due()] == [1, 0]
    assert balance(member) == 0
    assert both_sides_agree(provider)
    assert provider.held() == 0
    assert not Dataset.objects.filter(deleted_at=None).exists()
    assert not Workspace.objects.filter(removed_at=None).exists()
    assert ScriptSnapshot.objects.get().content is None
    assert not Membership.objects.exists()
    assert not ApiToken.objects.filter(pk=token.pk).exists()
    assert AuditEvent.objects.filter(action="organization.closed").count() == 1
    assert broken(BROKEN_BOOKS) == {}


def test_closing_is_withdrawn_until_the_notice_is_over(provider, member):
    pay(provider, member)
    with pytest.raises(InvalidInput):
        closure.request(membership=member, confirmation="another")
    for act in (request, lambda membership: closure.withdraw(membership=membership)):
        with pytest.raises(NotAllowed):  # only owners may
            act(MembershipFactory(organization=member.organization, role=Role.BILLING))
    limited = Membership.objects.get(pk=member.pk)
    limited.scopes = frozenset({Capability.VIEW, Capability.MANAGE})
    with pytest.raises(NotAllowed):  # a token with these scopes would take from owners what it may not do itself
        request(limited)
    request(member)
    for act in (
        lambda: pay(provider, member),
        lambda: services.activate_service(membership=member, accept_terms=True),
        lambda: credit.redeem(account=wallet(member.organization), code="WELCOME25", user=member.user),
    ):
        with pytest.raises(OrganizationClosing):
            act()
    for _idempotent in range(2):
        closure.withdraw(membership=member)
    assert (Closure.objects.count(), balance(member)) == (0, 5000)
    services.activate_service(membership=member, accept_terms=True)
    request(member)
    end_notice()
    with pytest.raises(OrganizationClosing):
        closure.withdraw(membership=member)


def test_closing_is_refused_while_a_sweep_is_open(sweeper, customer):
    sweep = sweeper.buy()
    stop_sweep(membership=customer.membership, sweep=sweep)
    assert "A sweep is open" in " ".join(closure.obstacles(customer.organization))
    for _ in range(2):  # the first cancels the jobs of the trials, the second records their ends and ends the sweep
        progress.advance(sweep_pk=sweep.pk)
    assert closure.obstacles(customer.organization) == []


def test_closing_is_refused_while_a_bank_disputes_a_payment_and_waits_for_a_later_dispute(provider, member):
    top_up = pay(provider, member)
    dispute = Dispute(top_up=top_up, dispute_id="dp_1", amount_minor=5000, reason="fraud", opened_at=timezone.now())
    dispute.save()
    with pytest.raises(OrganizationClosing, match="disputes"):
        request(member)
    dispute.delete()
    request(member)
    dispute.save()
    end_notice()
    assert closure.complete_due() == 0
    assert "disputes" in Closure.objects.get().problem
    assert balance(member) == 5000
    dispute.delete()
    assert closure.complete_due() == 1
    assert Closure.objects.get().problem == ""


@pytest.mark.usefixtures("provider")
def test_closing_closes_open_payment_pages_and_pays_back_what_arrives_later(member):
    account = wallet(member.organization)
    page = payments.start_top_up(account=account, amount_minor=5000, user=member.user)
    request(member)
    page.refresh_from_db()
    assert page.state == TopUp.States.EXPIRED
    # The provider took a payment although the page was closed, and reports it after the end.
    end_notice()
    assert closure.complete_due() == 1
    late = TopUp.objects.create(
        account=account, amount_minor=900, currency="USD", state=TopUp.States.PENDING, created_by=member.user
    )
    payments.credit_top_up(late, intent="pi_late", at=None)
    assert closure.accounts_to_pay_back() == [account]
    closure.complete_due()
    assert Refund.objects.get().top_up == late


def test_no_card_is_saved_after_the_closing_and_payments_that_arrive_then_go_back_once(provider, member, monkeypatch):
    account = wallet(member.organization)
    setup_id = customers.create_card_page(account=account, email="a@example.com").rsplit("/", 1)[1]
    with provider.network_failing("after"), pytest.raises(PaymentUnavailable):  # the page exists, without an answer
        payments.start_top_up(account=account, amount_minor=900, user=member.user)
    (unknown_id,) = [each for each in gateway.open_pages(PaymentCustomer.objects.get().customer_id) if each != setup_id]
    request(member)
    with pytest.raises(OrganizationClosing):
        customers.create_card_page(account=account, email="a@example.com")
    for session_id in (setup_id, unknown_id):
        assert provider.pay(session_id) == checkout.EXPIRED
    end_notice()
    assert closure.complete_due() == 1
    # A page that was being created when the closing was requested, and is paid after its end.
    monkeypatch.setattr(services, "require_open", lambda **_options: None)
    late = payments.start_top_up(account=account, amount_minor=700, user=member.user)
    provider.pay(late.session_id)
    events = provider.fresh()
    for _again in range(2):
        provider.deliver(*reversed(events))
    with monkeypatch.context() as patch:
        patch.setattr(refunds, "pay_back", Mock(side_effect=RuntimeError))
        closure.complete_due()  # one wallet must not keep the others waiting
    assert closure.accounts_to_pay_back() == [account]
    for _again in range(2):
        closure.complete_due()
        provider.deliver()
    assert Refund.objects.get().amount_minor == 700
    assert (balance(member), provider.held()) == (0, 0)
    assert both_sides_agree(provider)
    assert broken(BROKEN_BOOKS) == {}


def test_a_refund_that_fails_is_tried_again_and_then_left_to_an_administrator(provider, member):
    pay(provider, member, card=REFUND_FAILS)
    request(member)
    end_notice()
    for tries in range(1, refunds.MAX_FAILURES + 3):  # two rounds after the last try
        closure.complete_due()
        provider.deliver()  # the bank's answer comes later: the money returns to the wallet
        closure.complete_due()  # and is not sent again at once
        assert Refund.objects.count() == min(tries, refunds.MAX_FAILURES)
        assert balance(member) == 5000
        Refund.objects.update(ended_at=timezone.now() - refunds.RETRY_AFTER)  # so that it is sent again
    assert closure.accounts_to_pay_back() == [wallet(member.organization)]
    assert both_sides_agree(provider)
    assert broken(BROKEN_BOOKS) == {}


@pytest.mark.django_db(transaction=True)
def test_closing_may_be_killed_before_any_statement(provider, member):
    pay(provider, member, 5000)
    pay(provider, member, 3000)
    grant(member)
    Secret.objects.create(organization=member.organization, name="KEY", encrypted=b"x")
    request(member)
    end_notice()
    step = 1
    while crash_at(step, closure.complete_due):
        step += 1
        assert broken(BROKEN_BOOKS) == {}
    refunds.submit_waiting()  # a periodic task calls both again
    closure.complete_due()
    assert step > 20, "too few statements were interrupted"
    assert (balance(member), Closure.objects.get().problem) == (0, "")
    assert both_sides_agree(provider)
    assert provider.held() == 0
    assert sum(Refund.objects.values_list("amount_minor", flat=True)) == 8000
    assert (Membership.objects.count(), Secret.objects.count()) == (0, 0)


@pytest.mark.django_db(transaction=True)
def test_closing_happens_once_when_several_ask_at_once(provider, member):
    pay(provider, member, 5000)
    assert raised(together(*[lambda: request(member)] * 3)) == []
    assert AuditEvent.objects.filter(action="organization.closure_requested").count() == 1
    end_notice()
    together(*[closure.complete_due] * 3)
    assert Refund.objects.get().amount_minor == 5000
    assert balance(member) == 0
    assert AuditEvent.objects.filter(action="organization.closed").count() == 1
    assert not Account.objects.filter(posted_minor__lt=0, kind=Account.Kinds.WALLET).exists()
    assert Quota.objects.get().max_storage_bytes == 0, "an upload in progress could still store files"


@pytest.mark.django_db(transaction=True)
def test_a_request_locks_the_series_of_invoices_before_any_account(provider, member, monkeypatch):
    """To issue an invoice holds the series and waits for accounts, so the other order can deadlock."""
    book(storage="300")
    account = wallet(member.organization)
    storage_charges.charge_day(account=account, day=date(2026, 6, 30), size_bytes=40 * storage_charges.GB)
    pay(provider, member)
    issue = invoices.issue

    @transaction.atomic
    def lock_accounts():
        return list(Account.objects.select_for_update(nowait=True))

    def checked_issue(**options):
        assert raised(together(lock_accounts)) == []
        return issue(**options)

    monkeypatch.setattr(invoices, "issue", checked_issue)
    request(member)
    assert Invoice.objects.get().total_minor == 300


@pytest.mark.django_db(transaction=True)
def test_an_organization_that_is_locked_for_its_closing_can_still_be_referenced(member):
    """A charge holds the wallet, for which the closing waits, and inserts rows that reference the organization."""

    def grant_without_waiting():
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '200ms'")
        grant(member)

    with transaction.atomic():
        services.lock(member.organization)
        assert raised(together(grant_without_waiting)) == []
