"""Periodic tasks: each calls its services, and the check of the books finds errors."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core import mail
from django.db import connection
from django.db.models import F
from django.utils import timezone

from billing import auto_topup, budgets, charges, invoices, payment_emails, reconciliation, refunds, tasks
from billing.models import Account, CreditGrant, Entry, Quote
from billing.quotes import make_extension_quote
from console.observability import heartbeats
from tests.billing.runs import buy, check_constraints, give_credit
from tests.factories.billing import quote

pytestmark = pytest.mark.django_db
CORRECT = {"transactions": 0, "balances": 0, "holds": 0}
"""How many rows of each kind are inconsistent in a ledger without errors."""


def test_move_money_and_write_invoices_call_their_services(monkeypatch):
    called = []
    services = [
        (auto_topup, "run_due"), (refunds, "submit_waiting"), (payment_emails, "send_due"), (invoices, "issue_due"),
    ]  # fmt: skip
    for module, name in services:
        monkeypatch.setattr(module, name, lambda name=name: called.append(name))
    tasks.move_money()
    tasks.write_invoices()
    assert called == [name for _module, name in services]


def test_expire_quotes_deletes_old_ones_that_nobody_bought(account):
    fresh, _stale, bought = (quote(account) for _ in range(3))
    hold = charges.hold(quote=bought, reference="order:1")
    user = bought.created_by
    longer = make_extension_quote(hold=hold, user=user, payload={}, deadline_seconds=4000)  # bought, by `extend`
    charges.extend(hold=hold, quote=longer, idempotency_key="1", user=user)
    long_ago = timezone.now() - timedelta(days=1, seconds=1)  # expired quotes are kept for a day
    Quote.objects.exclude(pk=fresh.pk).update(expires_at=long_ago)
    tasks.expire_quotes()
    assert set(Quote.objects.all()) == {fresh, bought, longer}


def test_watch_money_takes_back_expired_credit_and_mails_budgets_once(owner, account):
    give_credit(account, 50, days=1)
    CreditGrant.objects.update(expires_at=timezone.now())
    budgets.set_budget(membership=owner, user=None, amount_minor=100)
    buy(account, 60, member=owner)  # held, which counts against the budget: past its first threshold, 50 %
    for _ in range(2):
        tasks.watch_money()
    account.refresh_from_db()
    assert account.posted_minor == 10_000  # without the 50 of credit
    assert len(mail.outbox) == 1


@pytest.mark.usefixtures("embedded")  # Redis, for the heartbeat
def test_check_ledger_reports_each_kind_of_inconsistency(account, caplog):
    buy(account, 100)
    heartbeats._next_at.clear()  # else a heartbeat of the last second, of another test, forbids this one
    tasks.check_ledger()
    # The check of the ledger is one for all clusters, so the `part` of its heartbeat is "".
    assert heartbeats.latest(heartbeats.recent(), heartbeats.LEDGER)[""].details == {"wrong": CORRECT}
    rows = Account.objects.filter(pk=account.pk)
    rows.update(posted_minor=F("posted_minor") + 5)
    assert reconciliation.check_ledger() == CORRECT | {"balances": 1}
    assert "The ledger is inconsistent" in caplog.text
    rows.update(held_minor=F("held_minor") - 1)
    assert reconciliation.check_ledger() == CORRECT | {"balances": 1, "holds": 1}
    check_constraints()  # now: at the end of the test, the deferred triggers would find the wrong entry below
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL session_replication_role = replica")  # no trigger fires
        entry = Entry.objects.filter(account=account).latest("id")
        Entry.objects.create(transaction=entry.transaction, account=account, amount_minor=5)  # the balance fits again
        cursor.execute("SET LOCAL session_replication_role = origin")
    assert reconciliation.check_ledger() == CORRECT | {"transactions": 1, "holds": 1}
