"""Administrators' work on money: it calls services, and the ledger can't be edited."""

from __future__ import annotations

import re
import uuid
from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from billing import charges, credit, events, ledger, pricebooks, receivables
from billing.admin.ledger import WriteOffForm
from billing.models import (
    Account,
    CreditGrant,
    Dispute,
    NodeSpec,
    PriceBook,
    Refund,
    StripeEvent,
    Transaction,
    WriteOff,
)
from billing.pricing import Usage
from tests.factories.accounts import OrganizationFactory, UserFactory
from tests.factories.billing import NodeSpecFactory, TopUpFactory, book, paid_top_up, quote, session_event, wallet
from tests.provider import DISPUTED, apply, lost, receive

pytestmark = pytest.mark.django_db

READ_ONLY = ["account", "transaction", "hold", "receipt", "quote", "topup", "stripeevent"]


@pytest.fixture
def admin(client):
    user = UserFactory(is_staff=True, is_superuser=True)
    client.force_login(user)
    client.user = user
    return client


@pytest.fixture
def history():
    """One of everything that the ledger can hold."""
    book()
    account = wallet(balance_minor=1000)
    hold = charges.hold(quote=quote(account), reference="order:1")
    charges.settle(hold=hold, usage=Usage(100, completed=True), title="#1")
    apply(session_event(TopUpFactory(account=account)))
    return account


def act(admin, model, action, *rows):
    data = {"action": action, "_selected_action": [row.pk for row in rows]}
    return admin.post(reverse(f"admin:billing_{model}_changelist"), data, follow=True)


@pytest.mark.parametrize("model", [*READ_ONLY, "nodespec", "pricebook", "creditgrant"])
def test_every_list_and_page_is_shown(admin, history, model):
    if model == "creditgrant":
        grant = CreditGrant(organization=history.organization, amount_minor=1, reason="A test")
        credit.grant(credit=grant, user=admin.user, account=history)
    listing = admin.get(reverse(f"admin:billing_{model}_changelist"))
    assert listing.status_code == 200
    row = listing.context["cl"].queryset.first()
    assert row is not None
    assert admin.get(reverse(f"admin:billing_{model}_change", args=[row.pk])).status_code == 200


@pytest.mark.parametrize("model", READ_ONLY)
def test_the_ledger_is_there_to_be_read(admin, history, model):
    row = admin.get(reverse(f"admin:billing_{model}_changelist")).context["cl"].queryset.first()
    assert admin.get(reverse(f"admin:billing_{model}_add")).status_code == 403
    assert admin.post(reverse(f"admin:billing_{model}_add"), {}).status_code == 403
    assert admin.post(reverse(f"admin:billing_{model}_change", args=[row.pk]), {"posted_minor": 1}).status_code == 403
    assert admin.post(reverse(f"admin:billing_{model}_delete", args=[row.pk]), {"post": "yes"}).status_code == 403
    act(admin, model, "delete_selected", row)
    assert type(row).objects.filter(pk=row.pk).exists()


def test_a_grant_moves_money_once(admin):
    organization = OrganizationFactory()
    shown = admin.get(reverse("admin:billing_creditgrant_add")).content.decode()
    (key,) = re.findall(r'<input type="hidden" name="key" value="([^"]+)"', shown)
    data = {"organization": organization.pk, "amount_minor": 700, "reason": "For the outage", "key": key}
    for _ in range(3):  # a click too many
        assert admin.post(reverse("admin:billing_creditgrant_add"), data).status_code == 302
    other = admin.post(reverse("admin:billing_creditgrant_add"), data | {"amount_minor": 800})
    assert "sent before, with other values" in other.content.decode()
    grant = CreditGrant.objects.get()
    assert grant.granted_by == admin.user
    assert Account.objects.get(organization=organization).posted_minor == 700
    assert Transaction.objects.get().reference == f"grant:{grant.pk}"
    again = admin.post(reverse("admin:billing_creditgrant_change", args=[grant.pk]), data | {"amount_minor": 900})
    assert again.status_code == 403
    assert admin.post(reverse("admin:billing_creditgrant_delete", args=[grant.pk]), {"post": "yes"}).status_code == 403
    assert Account.objects.get(organization=organization).posted_minor == 700


@pytest.mark.parametrize("amount", ["0", "-5", "abc", "1.5", str(10**30)])
def test_a_grant_of_no_amount(admin, amount):
    data = {"organization": OrganizationFactory().pk, "amount_minor": amount, "reason": "A slip", "key": uuid.uuid4()}
    assert admin.post(reverse("admin:billing_creditgrant_add"), data).status_code == 200
    assert not CreditGrant.objects.exists()
    assert not Transaction.objects.exists()


class TestPriceBooks:
    def test_publish(self, admin):
        draft = pricebooks.copy(book=book())
        answer = act(admin, "pricebook", "publish", draft)
        assert f"{draft} is published." in answer.content.decode()
        draft.refresh_from_db()
        assert draft.published_at is not None

    def test_publish_from_its_date(self, admin):
        draft = pricebooks.copy(book=book())
        starts = timezone.now() + timedelta(days=3)
        PriceBook.objects.filter(pk=draft.pk).update(effective_from=starts)
        act(admin, "pricebook", "publish", draft)
        draft.refresh_from_db()
        assert (draft.effective_from, draft.published_at is not None) == (starts, True)

    def test_a_refusal_is_told(self, admin):
        draft = pricebooks.copy(book=book())
        NodeSpecFactory(name="unpriced")
        assert "unpriced" in act(admin, "pricebook", "publish", draft).content.decode()
        draft.refresh_from_db()
        assert draft.published_at is None

    def test_copy(self, admin):
        first = book()
        act(admin, "pricebook", "copy", first)
        draft = PriceBook.objects.get(published_at=None)
        assert pricebooks.price_rows(draft) == pricebooks.price_rows(first)

    def test_a_published_book_is_shown_and_not_edited(self, admin):
        made = book()
        address = reverse("admin:billing_pricebook_change", args=[made.pk])
        assert admin.get(address).status_code == 200
        assert admin.post(address, {"name": "Cheaper"}).status_code == 403
        assert admin.post(reverse("admin:billing_pricebook_delete", args=[made.pk]), {"post": "yes"}).status_code == 403
        act(admin, "pricebook", "delete_selected", made)
        made.refresh_from_db()
        assert made.name != "Cheaper"


def test_a_spec_keeps_what_was_sold_under_its_name(admin):
    book()
    spec = NodeSpec.objects.get()
    data = {
        "name": "other",
        "title": "Renamed",
        "cpus": "64",
        "memory_mib": 1,
        "gpus": 8,
        "position": 5,
        "description": "",
    }
    assert admin.post(reverse("admin:billing_nodespec_change", args=[spec.pk]), data).status_code == 302
    spec.refresh_from_db()
    assert (spec.title, spec.position, spec.is_active) == ("Renamed", 5, False)
    assert (spec.name, spec.cpus, spec.memory_mib, spec.gpus) == ("small", 1, 1024, 0)


def test_apply_again_is_safe(admin):
    top_up = TopUpFactory(session_id="cs_typo")
    stored = receive(session_event(top_up, id="cs_right"))
    events.apply(event_pk=stored.pk)
    top_up.session_id = "cs_right"
    top_up.save()
    for _ in range(3):
        assert act(admin, "stripeevent", "apply_again", stored).status_code == 200
    stored.refresh_from_db()
    top_up.account.refresh_from_db()
    assert stored.state == StripeEvent.States.APPLIED
    assert top_up.account.posted_minor == 5000


class TestRefunds:
    def form(self, top_up, amount):
        return {"top_up": top_up.pk, "amount_minor": amount, "reason": "Asked for", "key": str(uuid.uuid4())}

    def test_begin_at_the_top_up(self, admin, provider):
        top_up = paid_top_up(provider)
        page = admin.get(reverse("admin:billing_topup_change", args=[top_up.pk])).content.decode()
        assert "Refund up to $50.00" in page
        address = f"{reverse('admin:billing_refund_add')}?top_up={top_up.pk}&amount_minor=5000"
        assert admin.get(address).status_code == 200

    def test_go_through_the_service(self, admin, provider):
        top_up = paid_top_up(provider)
        admin.post(reverse("admin:billing_refund_add"), self.form(top_up, 2000))
        made = Refund.objects.get()
        assert (made.state, made.requested_by, made.amount_minor) == (Refund.States.SUCCEEDED, admin.user, 2000)
        assert provider.held() == 3000
        assert admin.get(reverse("admin:billing_refund_change", args=[made.pk])).status_code == 200
        assert admin.post(reverse("admin:billing_refund_change", args=[made.pk]), {}).status_code == 403

    def test_sent_twice_are_one(self, admin, provider):
        """A click too many while the provider takes its time."""
        top_up = paid_top_up(provider)
        form = self.form(top_up, 2000)
        for _ in range(3):
            assert admin.post(reverse("admin:billing_refund_add"), form).status_code == 302
        assert provider.held() == 3000
        answer = admin.post(reverse("admin:billing_refund_add"), form | {"amount_minor": 100})
        assert "sent before, with other values" in answer.content.decode()
        assert Refund.objects.get().amount_minor == 2000

    def test_of_too_much_are_refused_at_the_field(self, admin, provider):
        answer = admin.post(reverse("admin:billing_refund_add"), self.form(paid_top_up(provider), 5001))
        assert "At most $50.00" in answer.content.decode()
        assert not Refund.objects.exists()

    def test_say_when_the_provider_did_not_answer(self, admin, provider):
        top_up = paid_top_up(provider)
        provider.wire.before = lost
        answer = admin.post(reverse("admin:billing_refund_add"), self.form(top_up, 2000), follow=True)
        assert "asked again every minute" in answer.content.decode()
        assert Refund.objects.get().state == Refund.States.CREATED


def test_disputes_are_there_to_be_read(admin, provider):
    paid_top_up(provider, card=DISPUTED)
    row = Dispute.objects.get()
    assert admin.get(reverse("admin:billing_dispute_changelist")).status_code == 200
    assert admin.get(reverse("admin:billing_dispute_change", args=[row.pk])).status_code == 200
    assert admin.get(reverse("admin:billing_dispute_add")).status_code == 403


class TestWriteOff:
    @pytest.fixture
    def debt(self):
        account = wallet()
        receivables.take_back(
            account=account, amount_minor=3000, reference="out", kind="dispute", description="Taken back"
        )
        return ledger.receivable_account(account)

    def add(self, admin, debt, **changes):
        data = {"account": debt.pk, "amount_minor": 3000, "reason": "The company is no more"} | changes
        return admin.post(reverse("admin:billing_writeoff_add"), data)

    def test_begins_at_the_debt(self, admin, debt):
        page = admin.get(reverse("admin:billing_account_change", args=[debt.pk])).content.decode()
        link = f"{reverse('admin:billing_writeoff_add')}?account={debt.pk}&amp;amount_minor=3000"
        assert link in page
        assert "Write off up to $30.00" in page
        form = admin.get(link.replace("&amp;", "&")).content.decode()
        assert 'value="3000"' in form

    def test_is_made_once_and_then_only_read(self, admin, debt):
        assert self.add(admin, debt).status_code == 302
        made = WriteOff.objects.get()
        assert (made.amount_minor, made.written_by, made.reason) == (3000, admin.user, "The company is no more")
        debt.refresh_from_db()
        assert debt.posted_minor == 0
        assert self.add(admin, debt).status_code == 200  # nothing is owed any more: no such choice
        change = reverse("admin:billing_writeoff_change", args=[made.pk])
        assert admin.get(change).status_code == 200
        assert admin.post(change, {"amount_minor": 1}).status_code == 403
        assert admin.post(reverse("admin:billing_writeoff_delete", args=[made.pk]), {"post": "yes"}).status_code == 403
        assert WriteOff.objects.count() == 1
        page = admin.get(reverse("admin:billing_account_change", args=[debt.pk])).content.decode()
        assert "Nothing is owed here." in page

    def test_of_more_than_is_owed_is_refused_at_its_field(self, admin, debt):
        answer = self.add(admin, debt, amount_minor=3001)
        assert "At most $30.00 is owed" in answer.content.decode()
        assert not WriteOff.objects.exists()

    def test_that_another_administrator_was_faster_with(self, admin, debt, monkeypatch):
        other = UserFactory(is_superuser=True)
        clean = WriteOffForm.clean

        def meanwhile(form):
            data = clean(form)
            receivables.write_off(account=debt, amount_minor=2000, reason="The other one", user=other)
            return data

        monkeypatch.setattr(WriteOffForm, "clean", meanwhile)
        page = admin.post(
            reverse("admin:billing_writeoff_add"),
            {"account": debt.pk, "amount_minor": 3000, "reason": "Too late"},
            follow=True,
        )
        assert "At most $10.00 is owed" in page.content.decode()
        assert WriteOff.objects.get().written_by == other

    def test_of_staff_without_the_permission(self, client, debt):
        client.force_login(UserFactory(is_staff=True))
        assert client.get(reverse("admin:billing_writeoff_add")).status_code == 403
        assert self.add(client, debt).status_code == 403
        assert not WriteOff.objects.exists()
