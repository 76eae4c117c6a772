"""Administrators' work on money: it goes through services, and the ledger cannot be edited."""

from __future__ import annotations

import re
import uuid
from datetime import timedelta
from decimal import Decimal

import pytest
from django.contrib.admin import site
from django.contrib.auth.models import Permission
from django.urls import reverse
from django.utils import timezone

from billing import credit, events, invoices, ledger, pricebooks, receivables, refunds
from billing.admin.ledger import WriteOffForm
from billing.models import (
    Account,
    BillingPolicy,
    Budget,
    CreditGrant,
    Dispute,
    Hold,
    Invoice,
    NodeSpec,
    PriceBook,
    Quote,
    Receipt,
    Refund,
    StripeEvent,
    TopUp,
    Transaction,
    Voucher,
    WriteOff,
)
from console.accounts.models import AuditEvent
from runtime.backends.slurm.config import SlurmConfig
from tests.billing.paying import balance
from tests.billing.runs import give_credit, issue, run
from tests.factories.accounts import OrganizationFactory, UserFactory
from tests.factories.billing import TopUpFactory, book, paid_top_up, session_event, wallet
from tests.provider import DISPUTED, receive
from tests.rendered import form_of

pytestmark = pytest.mark.django_db


def address(model, page, *arguments):
    return reverse(f"admin:billing_{model}_{page}", args=arguments)


def act(admin, model, action, *rows):
    """Run an action of the admin's list on these rows. Return the page that follows."""
    data = {"action": action, "_selected_action": [row.pk for row in rows]}
    return admin.post(address(model, "changelist"), data, follow=True).text


def assert_locked(admin, row, **data):
    """A row can be shown, but neither changed nor deleted."""
    model = type(row).__name__.lower()
    assert admin.get(address(model, "change", row.pk)).status_code == 200
    assert admin.post(address(model, "change", row.pk), data).status_code == 403
    assert admin.post(address(model, "delete", row.pk), {"post": "yes"}).status_code == 403
    act(admin, model, "delete_selected", row)
    assert type(row).objects.filter(pk=row.pk).exists()


def test_rows_of_money_can_only_be_read(admin, account, provider, rf):
    run(account, 100)
    issue(account)
    paid_top_up(provider, card=DISPUTED)
    request = rf.get("/")
    request.user = admin.user
    for model in (Account, Transaction, Hold, Receipt, Quote, TopUp, StripeEvent, Dispute, Invoice):
        name, row, page = model.__name__.lower(), model.objects.first(), site.get_model_admin(model)
        for answer in (admin.get(address(name, "changelist")), admin.get(address(name, "change", row.pk))):
            assert (name, answer.status_code) == (name, 200)
        permissions = (
            page.has_add_permission(request),
            page.has_change_permission(request, row),
            page.has_delete_permission(request),
        )
        assert (name, permissions) == (name, (False, False, False))
    assert_locked(admin, account, posted_minor=1)
    assert admin.post(address("account", "add"), {}).status_code == 403


def test_a_grant_moves_money_once(admin):
    organization, add = OrganizationFactory(), address("creditgrant", "add")
    (key,) = re.findall(r'<input type="hidden" name="key" value="([^"]+)"', admin.get(add).text)
    data = {"organization": organization.pk, "amount": "7", "reason": "For the outage", "key": key}
    for amount in ("0", "-5", "abc", "1.505", str(10**30)):
        assert admin.post(add, data | {"amount": amount}).status_code == 200  # the form is shown again
    limited = admin.post(add, data | {"amount": "1000000.01"}).text
    assert "The amount must be at most $1,000,000.00." in limited
    assert not Transaction.objects.exists()
    for _ in range(3):  # the administrator clicks more than once
        assert admin.post(add, data).status_code == 302
    assert "already submitted with different values" in admin.post(add, data | {"amount": "8"}).text
    grant = CreditGrant.objects.get()
    assert grant.granted_by == admin.user
    assert_locked(admin, grant, **data | {"amount": "9"})
    event = AuditEvent.objects.get(action="credit.granted")
    assert (event.organization, event.actor, event.target) == (organization, admin.user, f"grant:{grant.pk}")
    assert event.data == {"amount_minor": 700, "currency": "USD", "reason": "For the outage"}
    assert Account.objects.get(organization=organization).posted_minor == 700
    assert Transaction.objects.get().reference == f"grant:{grant.pk}"


class TestPriceBook:
    @pytest.fixture
    def draft(self, db):
        return pricebooks.copy(book=book())

    def form(self, admin, draft):
        """Return the address of the draft's page, its form, and the name of the hourly price's field."""
        page = address("pricebook", "change", draft.pk)
        form = form_of(admin.get(page).text)
        (hourly,) = (name for name, value in form.items() if name.endswith("-amount") and value == ["3.60"])
        return page, form, hourly

    def test_is_edited_in_the_major_unit_published_at_its_date_and_copied(self, admin, draft):
        before = pricebooks.price_rows(draft)
        page, form, hourly = self.form(admin, draft)
        assert admin.post(page, form).status_code == 302
        assert pricebooks.price_rows(draft) == before
        admin.post(page, form | {hourly: ["3.605"]})
        assert Decimal("360.5") in {row.amount for row in pricebooks.price_rows(draft)}
        starts = timezone.now() + timedelta(days=3)
        PriceBook.objects.filter(pk=draft.pk).update(effective_from=starts)
        assert f"{draft} is published." in act(admin, "pricebook", "publish", draft)
        draft.refresh_from_db()
        assert (draft.published_at is not None, draft.effective_from) == (True, starts)
        assert "$3.605" in admin.get(page).text
        assert_locked(admin, draft, name="Cheaper")
        act(admin, "pricebook", "copy", draft)
        assert pricebooks.price_rows(PriceBook.objects.get(published_at=None)) == pricebooks.price_rows(draft)

    def test_asks_about_a_price_that_changes_by_more_than_half(self, admin, draft):
        page, form, name = self.form(admin, draft)
        for hourly, asks in (("1.81", False), ("1.79", True)):  # half of $3.60 is 1.80
            saved = admin.post(page, form | {name: [hourly]}, follow=True).text
            assert ("Large change from the current price" in saved) == asks
        question = act(admin, "pricebook", "publish", draft)
        assert "$3.60 →" in question
        twin = pricebooks.copy(book=PriceBook.objects.exclude(pk=draft.pk).get())  # has the same name
        twin.prices.update(amount=Decimal(1))
        assert act(admin, "pricebook", "publish", draft, twin).count("$3.60 →") == 2
        draft.prices.update(amount=Decimal(2))  # the question was about another price
        for answer, is_published in ((question, False), (act(admin, "pricebook", "publish", draft), True)):
            admin.post(address("pricebook", "changelist"), form_of(answer))
            draft.refresh_from_db()
            assert (draft.published_at is not None) == is_published

    def test_asks_about_a_change_from_the_book_that_it_will_replace(self, admin, draft):
        original, starts = PriceBook.objects.exclude(pk=draft.pk).get(), timezone.now() + timedelta(days=1)
        draft.prices.update(amount=Decimal(1))
        pricebooks.publish(book=draft, effective_from=starts)
        later = pricebooks.copy(book=original)
        PriceBook.objects.filter(pk=later.pk).update(effective_from=starts + timedelta(days=1))
        assert "$0.01 → $3.60" in act(admin, "pricebook", "publish", later)
        later.prices.update(amount=Decimal(1))
        PriceBook.objects.filter(pk=later.pk).update(effective_from=starts - timedelta(days=999))
        assert "$3.60 → $0.01" in act(admin, "pricebook", "publish", later), "a date that has passed counts as now"

    def test_is_previewed_and_compared(self, admin, account):
        run(account, 100, node_spec="small", product="metered")
        draft = pricebooks.copy(book=PriceBook.objects.get())
        draft.prices.update(amount=Decimal(378))  # 5 % more than 360
        assert "With this price book" in admin.get(address("pricebook", "preview", draft.pk)).text
        changes = admin.get(address("pricebook", "changes", draft.pk)).text
        for shown in ("per node and hour, small, every product", "+5.0%"):
            assert shown in changes
        assert "+5.0%" in act(admin, "pricebook", "compare", *PriceBook.objects.all())
        assert "Choose two price books." in act(admin, "pricebook", "compare", draft)


def test_a_node_spec_keeps_what_was_sold_under_its_name(admin):
    book()
    spec = NodeSpec.objects.get()
    changes = {"name": "other", "title": "Renamed", "cpus": "64", "memory_mib": 1, "gpus": 8, "position": 5}
    changes["description"] = ""  # `is_active` is left out, as browsers leave out an unchecked box
    assert admin.get(address("nodespec", "changelist")).status_code == 200
    assert admin.post(address("nodespec", "change", spec.pk), changes).status_code == 302
    spec.refresh_from_db()
    assert (spec.title, spec.position, spec.is_active) == ("Renamed", 5, False)
    assert (spec.name, spec.cpus, spec.memory_mib, spec.gpus) == ("small", 1, 1024, 0)


def test_a_node_spec_on_slurm_has_whole_cores(admin, settings):
    settings.TRAINYARD_CLUSTERS = {"here": None, "hpc": SlurmConfig.from_data("hpc", {})}
    form = {"name": "half", "title": "Half", "memory_mib": 1024, "gpus": 0, "position": 5, "cluster": "hpc"}
    assert "whole number of CPU cores" in admin.post(address("nodespec", "add"), {**form, "cpus": "1.5"}).text
    assert admin.post(address("nodespec", "add"), {**form, "cpus": "2"}).status_code == 302
    elsewhere = {**form, "name": "b", "cpus": "1.5", "cluster": ""}
    assert admin.post(address("nodespec", "add"), elsewhere).status_code == 302
    spec = NodeSpec.objects.get(name="b")
    assert "whole number of CPU cores" in admin.post(address("nodespec", "change", spec.pk), form).text


def test_an_event_that_is_processed_again_credits_once(admin):
    top_up = TopUpFactory(session_id="cs_typo")
    stored = receive(session_event(top_up, id="cs_right"))
    events.apply(event_pk=stored.pk)  # quarantined: our row names another session
    top_up.session_id = "cs_right"
    top_up.save()
    events.apply(event_pk=stored.pk)  # workers leave a quarantined event alone
    assert balance(top_up) == 0
    for _ in range(3):
        act(admin, "stripeevent", "apply_again", stored)
    stored.refresh_from_db()
    assert (stored.state, balance(top_up)) == (StripeEvent.States.APPLIED, 5000)


def test_a_refund_is_limited_and_made_once_and_retried_if_the_provider_does_not_answer(admin, provider):
    top_up, key = paid_top_up(provider), str(uuid.uuid4())

    def add(**changes):
        form = {"top_up": top_up.pk, "amount": "20.00", "reason": "Asked for", "key": key} | changes
        return admin.post(address("refund", "add"), form, follow=True).text

    assert "at most $50.00" in add(amount="50.01")
    assert not Refund.objects.exists()
    for _ in range(3):
        add()
    refund = Refund.objects.get()
    assert (refund.state, refund.requested_by, refund.amount_minor) == ("succeeded", admin.user, 2000)
    assert provider.held() == 3000
    assert "Refund up to $30.00" in admin.get(address("topup", "change", top_up.pk)).text
    assert "already submitted with different values" in add(amount="1")
    assert_locked(admin, refund)
    assert Refund.objects.get().amount_minor == 2000
    with provider.network_failing():
        assert "retried every minute" in add(amount="5", key=str(uuid.uuid4()))
    assert Refund.objects.get(amount_minor=500).state == Refund.States.CREATED


def test_a_write_off_is_limited_and_made_once_also_if_another_administrator_is_faster(admin, monkeypatch):
    account = wallet()
    receivables.withdraw(account=account, amount_minor=3000, reference="out", kind="dispute", description="Taken back")
    debt = ledger.receivable_account(account)
    other, clean = UserFactory(is_superuser=True), WriteOffForm.clean

    def form(amount):
        values = {"account": debt.pk, "amount": amount, "reason": "The company closed"}
        return form_of(admin.get(address("writeoff", "add")).text) | values

    def add(amount):
        return admin.post(address("writeoff", "add"), form(amount))

    chinese = admin.get(address("writeoff", "add"), headers={"Accept-Language": "zh-hans"})
    assert f"{account.organization} · 应收款 · USD" in chinese.text

    def clean_slowly(checked_form):
        """Check the form. Meanwhile another administrator writes 2000 off."""
        data = clean(checked_form)
        receivables.write_off(account=debt, amount_minor=2000, reason="The other one", user=other)
        return data

    assert "at most $30.00" in add("30.01").text
    with monkeypatch.context() as patched:
        patched.setattr(WriteOffForm, "clean", clean_slowly)
        add("30")
    assert "off in the meantime" in admin.get(address("writeoff", "changelist")).text  # the refusal, as a message
    assert WriteOff.objects.get().written_by == other
    assert "Write off up to $10.00" in admin.get(address("account", "change", debt.pk)).text
    twice = form("4")
    for _ in range(2):
        assert admin.post(address("writeoff", "add"), twice).status_code == 302
    assert WriteOff.objects.get(written_by=admin.user).amount_minor == 400
    assert add("6").status_code == 302
    row = WriteOff.objects.filter(written_by=admin.user).first()
    assert (row.amount_minor, row.reason) == (600, "The company closed")
    debt.refresh_from_db()
    assert debt.posted_minor == 0
    assert add("10").status_code == 200  # refused: the form offers only accounts that owe something
    assert_locked(admin, row, amount_minor=1)
    assert WriteOff.objects.count() == 3
    assert "Nothing is owed on this account." in admin.get(address("account", "change", debt.pk)).text


MINOR = re.compile(r"minor unit|\bminor\b", re.IGNORECASE)


def test_amounts_are_shown_and_typed_in_the_major_unit(admin, provider):
    """Every list and page that shows an amount, and every form in which an amount is typed."""
    shown, typed = "$50.00", "0.05"
    account = wallet()
    grant = give_credit(account, 5000)
    # A used voucher, since its page shows the amount as text. The page of an unused voucher has a field instead.
    voucher = Voucher.objects.create(code="SUMMER", reason="x", amount_minor=5000, currency="USD", uses=1)
    budget = Budget.objects.create(organization=account.organization, amount_minor=5000)
    top_up = paid_top_up(provider)
    refund = refunds.refund(top_up=top_up, amount_minor=5000, reason="Asked for", user=admin.user)
    for row in (account, grant, voucher, budget, top_up, refund):
        model = type(row).__name__.lower()
        for page in (admin.get(address(model, "changelist")), admin.get(address(model, "change", row.pk))):
            assert shown in page.text, model
            assert MINOR.findall(re.sub(r"<[^>]*>", "", page.text)) == [], model  # in what people see, not in tags
    form = form_of(admin.get(address("creditgrant", "add")).text)
    changes = {"organization": account.organization.pk, "amount": typed, "reason": "Five of the smallest"}
    admin.post(address("creditgrant", "add"), form | changes)
    assert CreditGrant.objects.get(reason="Five of the smallest").amount_minor == 5
    policy = form_of(admin.get(address("billingpolicy", "add")).text)
    assert "Enter 0 or more." in admin.post(address("billingpolicy", "add"), policy | {"amount": "-1"}).text
    assert admin.post(address("billingpolicy", "add"), policy | {"amount": typed}).status_code == 302
    assert BillingPolicy.objects.get().trial_credit_minor == 5
    assert admin.get(address("billingpolicy", "add")).status_code == 403  # there can be only one policy
    assert admin.get(address("billingpolicy", "change", 1)).status_code == 200


def test_a_voucher_gets_a_code_and_the_wallets_spelling_of_its_currency_and_keeps_both(admin, account):
    form = {"reason": "Welcome", "amount": "5", "currency": "usd", "max_uses": 3, "max_uses_each": 1, "is_active": "on"}
    past = {"code": "", "expires_at_0": "2020-01-01", "expires_at_1": "00:00"}
    assert "Choose a time in the future." in admin.post(address("voucher", "add"), form | past).content.decode()
    assert admin.post(address("voucher", "add"), form | {"code": ""}).status_code == 302
    voucher = Voucher.objects.get()
    code = voucher.code
    assert (len(code), voucher.created_by) == (16, admin.user)
    assert credit.redeem(account=account, code=code, user=admin.user).amount_minor == 500
    events = AuditEvent.objects.filter(actor=admin.user, data__amount_minor=500, data__currency="USD").order_by("pk")
    assert [(event.action, event.organization) for event in events] == [
        ("voucher.created", None), ("credit.redeemed", account.organization),
    ]  # fmt: skip
    changes = {"code": "WINTER", "amount": "0.01", "reason": "Now so"}
    no_grants = {"grants-TOTAL_FORMS": 0, "grants-INITIAL_FORMS": 0}  # the page lists a voucher's grants
    admin.post(address("voucher", "change", voucher.pk), form | changes | no_grants)
    voucher.refresh_from_db()
    assert (voucher.code, voucher.amount_minor, voucher.reason) == (code, 500, "Now so")
    Voucher.objects.update(uses=2)
    answer = admin.post(address("voucher", "change", voucher.pk), form | no_grants | {"max_uses": 1})
    assert answer.context["adminform"].form.errors.keys() == {"max_uses"}
    assert admin.post(address("voucher", "delete", voucher.pk), {"post": "yes"}).status_code == 403
    act(admin, "voucher", "end", voucher)
    voucher.refresh_from_db()
    assert not voucher.is_active


def test_a_credit_note_moves_money_once_and_takes_an_amount_a_reason_and_a_permission_of_its_own(
    admin, account, monkeypatch
):
    run(account, 100)
    run(account, 50, "#2 other.py")
    invoice = issue(account)
    page, line = address("invoice", "correct", invoice.pk), f"line-{invoice.lines.first().pk}"

    def correct(amount, reason="A slip", *, notes_seen=0):
        return admin.post(page, {"notes_seen": notes_seen, line: amount, "reason": reason}, follow=True)

    form = admin.get(page).text
    for shown in ("$1.00", "$0.50", '<input type="hidden" name="notes_seen" value="0">'):
        assert shown in form
    for amount, reason in (("2", "A slip"), ("NaN", "A slip"), ("0.001", "A slip"), ("1", " "), ("", "x")):
        assert 'role="alert"' in correct(amount, reason).text, (amount, reason)
    assert "The amount of line 1 must be at most $1.00." in correct("2").text
    assert not Invoice.objects.filter(kind="note").exists()
    answer = correct("0.4")
    note = Invoice.objects.get(kind="note")
    assert f"{note.number} was issued." in answer.text
    assert (note.total_minor, note.reason, note.issued_by) == (-40, "A slip", admin.user.email)
    assert "Another credit note was issued in the meantime" in correct("0.4").text
    correctable_lines = invoices.correctable_lines

    def lines_that_are_outdated_at_once(invoice):
        lines = correctable_lines(invoice)
        invoices.correct(invoice=invoice, amounts={invoice.lines.first().pk: 1}, reason="Faster", user=None)
        return lines

    monkeypatch.setattr(invoices, "correctable_lines", lines_that_are_outdated_at_once)
    # The form has not seen the note that was issued while its lines were read, so its submission would be refused.
    assert '<input type="hidden" name="notes_seen" value="1">' in admin.get(page).text
    reader = UserFactory(is_staff=True)
    reader.user_permissions.add(Permission.objects.get(codename="view_invoice"))
    admin.force_login(reader)
    assert admin.get(address("invoice", "change", invoice.pk)).status_code == 200
    assert correct("0.4", notes_seen=1).status_code == 403
    assert Invoice.objects.filter(kind="note").count() == 2
    account.refresh_from_db()
    assert account.posted_minor == 10_000 - 150 + 40 + 1
