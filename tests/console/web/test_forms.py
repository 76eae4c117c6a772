"""What people send: errors stand at their fields, good input does what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client
from django.urls import reverse

from billing.models import TopUp
from console.accounts.models import ApiToken, Membership
from console.accounts.roles import Role
from console.accounts.services import is_active
from jobs.models import Job, Order
from storage.models import Dataset
from tests.factories.accounts import MembershipFactory, UserFactory
from tests.factories.jobs import Customer
from tests.fakes import FakeBackend

TOUCHED = "product,framework,image,workspace,code_path,lr,epochs,nodes,ceiling_minor,max_seconds"


def _text(answer: object) -> str:
    return str(answer.content.decode())  # type: ignore[attr-defined]


def test_activation_asks_for_the_terms(owner: Membership, browser: Callable[[Membership], Client]) -> None:
    client = browser(owner)
    assert "Accept the terms to activate the service." in _text(client.post(reverse("activation"), {}))
    assert not is_active(owner.organization)
    assert client.post(reverse("activation"), {"accept_terms": "on"}).status_code == 302
    assert is_active(owner.organization)
    assert client.post(reverse("activation_deactivate")).status_code == 302
    assert not is_active(owner.organization)


def test_only_an_owner_activates(owner: Membership, browser: Callable[[Membership], Client]) -> None:
    client = browser(MembershipFactory(role=Role.MEMBER, organization=owner.organization))
    assert client.post(reverse("activation"), {"accept_terms": "on"}).status_code == 403


def test_a_dataset_is_named_well(owner_page: Client) -> None:
    answer = owner_page.post(reverse("dataset_new"), {"name": "Not A Name"})
    assert "lower-case letters" in _text(answer)
    assert owner_page.post(reverse("dataset_new"), {"name": "digits"}).status_code == 302
    assert "This name is taken" in _text(owner_page.post(reverse("dataset_new"), {"name": "digits"}))
    assert owner_page.post(reverse("dataset_delete", args=["digits"])).status_code == 302
    assert Dataset.objects.get().deleted_at is not None


def test_an_image_needs_a_reference(owner_page: Client) -> None:
    form = {"name": "ours", "title": "Ours", "reference": "nonsense", "frameworks": ["pytorch"]}
    assert "registry.example.com/team/train:1.2" in _text(owner_page.post(reverse("image_new"), form))
    form["reference"] = "registry.example.com/team/train:1"
    assert owner_page.post(reverse("image_new"), form).status_code == 302


def test_files_of_a_workspace(customer: Customer, owner_page: Client) -> None:
    entry = reverse("workspace_new_entry", args=["main"])
    assert owner_page.post(entry, {"folder": "", "name": "notes", "kind": "folder"}).status_code == 302
    asked = owner_page.post(entry, {"folder": "notes", "name": "a.md", "kind": "file"})
    assert asked["Location"] == reverse("workspace_file", args=["main", "notes/a.md"]) + "?new=1"
    saved = owner_page.post(
        reverse("workspace_save", args=["main", "notes/a.md"]), {"text": "\r\nhi\r\n"}, content_type="application/json"
    )
    assert saved.json() == {"message": "Saved."}
    assert (customer.folder / "notes/a.md").read_bytes() == b"\r\nhi\r\n"
    owner_page.post(reverse("workspace_move", args=["main"]), {"source": "notes/a.md", "target": "b.md"})
    assert (customer.folder / "b.md").exists()
    owner_page.post(reverse("workspace_delete_entry", args=["main"]), {"path": "b.md"})
    assert not (customer.folder / "b.md").exists()


@pytest.mark.parametrize("path", ["../secret", "a/../../secret"])
def test_a_path_that_leaves_the_workspace_is_refused(owner_page: Client, customer: Customer, path: str) -> None:
    moved = owner_page.post(
        reverse("workspace_move", args=["main"]), {"source": "train.py", "target": path}, follow=True
    )
    assert "leaves the workspace" in _text(moved)
    assert (customer.folder / "train.py").exists()


def test_a_file_that_is_no_text_is_not_edited(owner_page: Client, customer: Customer) -> None:
    (customer.folder / "weights.bin").write_bytes(b"\0\1")
    answer = owner_page.get(reverse("workspace_file", args=["main", "weights.bin"]))
    assert "This file is not text" in _text(answer)
    assert "editor.js" not in _text(answer)


@pytest.mark.parametrize("amount", ["", "abc", "1.999", "NaN", "0.01"])
def test_a_top_up_of_no_good_amount(owner_page: Client, amount: str) -> None:
    answer = owner_page.post(reverse("top_up"), {"amount": amount})
    assert answer.status_code == 422
    assert "invalid-feedback" in _text(answer)
    assert not TopUp.objects.exists()


def test_a_quote_and_its_errors(customer: Customer, owner_page: Client) -> None:
    form = customer.form(touched=TOUCHED, lr="abc", max_time="soon")
    answer = _text(owner_page.post(reverse("training_quote"), form))
    assert "Give the learning rate as a number" in answer
    assert "Give a number, or leave it empty." in answer
    assert 'id="error-epochs" role="alert" hx-swap-oob="true"></div>' in answer
    priced = _text(owner_page.post(reverse("training_quote"), customer.form(touched=TOUCHED, max_time="30")))
    assert "data-ceiling" in priced
    assert 'id="error-lr" role="alert" hx-swap-oob="true"></div>' in priced


@pytest.mark.parametrize("typed", ["1e999999", "1e900000", "-1e999999", "NaN", "9" * 5000, "1,000"])
def test_a_limit_of_no_good_number(customer: Customer, owner_page: Client, typed: str) -> None:
    form = customer.form(touched="max_seconds,ceiling_minor", max_time="" if "," in typed else typed, ceiling=typed)
    assert "Give a number, or leave it empty." in _text(owner_page.post(reverse("training_quote"), form))


def test_a_number_of_a_row_that_is_none(customer: Customer, owner_page: Client) -> None:
    endless = "9" * 5000
    assert owner_page.post(reverse("training_quote"), customer.form(rerun_of=endless)).status_code == 200
    assert owner_page.get(reverse("training_new"), {"rerun": endless}).status_code == 200
    assert owner_page.post(reverse("organization_switch"), {"organization": endless}).status_code == 404


def test_fields_not_reached_yet_are_listed_instead_of_marked(customer: Customer, owner_page: Client) -> None:
    answer = _text(owner_page.post(reverse("training_quote"), customer.form(touched="", code_path="")))
    assert "Still needed" in answer
    assert 'id="error-code_path" role="alert" hx-swap-oob="true"></div>' in answer


def test_the_same_card_sent_twice_buys_once(customer: Customer, owner_page: Client) -> None:
    sent = {"quote": str(customer.quote().pk), "idempotency_key": "one-card"}
    first = owner_page.post(reverse("training_order"), sent)
    second = owner_page.post(reverse("training_order"), sent)
    job = Job.objects.get()
    assert first["HX-Redirect"] == second["HX-Redirect"] == reverse("job_detail", args=[job.pk])
    assert Order.objects.count() == 1


@pytest.mark.parametrize("key", ["\0", "one\0card", "k" * 5000])
def test_a_key_that_no_card_of_ours_has(customer: Customer, owner_page: Client, key: str) -> None:
    sent = {"quote": str(customer.quote().pk), "idempotency_key": key}
    assert "HX-Redirect" in owner_page.post(reverse("training_order"), sent)
    assert Order.objects.count() == 1


def test_a_wallet_too_small_leads_to_the_top_up(
    db: None, backend: FakeBackend, browser: Callable[[Membership], Client]
) -> None:
    poor = Customer(backend, balance_minor=10)
    client = browser(poor.membership)
    answer = _text(
        client.post(reverse("training_quote"), poor.form(touched=TOUCHED, max_time="1", max_time_unit="hours"))
    )
    # Two nodes for an hour at 0.90, less what is there, would be 170: the least top-up is more.
    assert reverse("wallet") + "?amount=500#top-up" in answer
    assert 'id="buy"' not in answer
    sent = {"quote": str(poor.quote().pk), "idempotency_key": "too-poor"}
    assert "alert-danger" in _text(client.post(reverse("training_order"), sent))
    assert 'value="5.00"' in _text(client.get(reverse("wallet"), {"amount": "170"}))  # the least top-up there is
    assert 'value="71.70"' in _text(client.get(reverse("wallet"), {"amount": "7170"}))


def test_a_rerun_fills_the_form(done: Job, owner_page: Client) -> None:
    answer = _text(owner_page.get(reverse("training_new"), {"rerun": done.pk}))
    assert 'name="epochs" inputmode="numeric" value="10"' in answer
    assert f'name="rerun_of" value="{done.pk}"' in answer


def test_cancelling_a_waiting_job(customer: Customer, owner_page: Client) -> None:
    job = customer.job()
    answer = owner_page.post(reverse("job_cancel", args=[job.pk]), follow=True)
    job.refresh_from_db()
    assert job.state == "cancelled"
    assert "The run was cancelled." in _text(answer)


def test_members_and_roles(owner_page: Client, customer: Customer) -> None:
    person = UserFactory()
    form = {"email": "nobody@example.com", "role": "member"}
    assert "Nobody has signed up" in _text(owner_page.post(reverse("organization_member_add"), form))
    owner_page.post(reverse("organization_member_add"), form | {"email": person.email})
    added = customer.organization.memberships.get(user=person)
    owner_page.post(reverse("organization_member_role", args=[added.pk]), {"role": "viewer"})
    added.refresh_from_db()
    assert added.role == Role.VIEWER
    owner_page.post(reverse("organization_member_remove", args=[added.pk]))
    assert not customer.organization.memberships.filter(user=person).exists()
    answer = owner_page.post(reverse("organization_member_remove", args=[customer.membership.pk]), follow=True)
    assert "An organization needs an owner" in _text(answer)


def test_a_member_of_another_organization_is_not_reached(owner_page: Client, stranger: Membership) -> None:
    assert owner_page.post(reverse("organization_member_remove", args=[stranger.pk])).status_code == 404
    assert (
        owner_page.post(reverse("organization_switch"), {"organization": stranger.organization_id}).status_code == 404
    )


def test_switching_the_organization(owner_page: Client, customer: Customer) -> None:
    second = MembershipFactory(user=customer.membership.user, role=Role.VIEWER)
    owner_page.post(reverse("organization_switch"), {"organization": second.organization_id})
    assert owner_page.get(reverse("dataset_new")).status_code == 403


def test_a_token_is_shown_once(owner_page: Client) -> None:
    answer = _text(owner_page.post(reverse("tokens"), {"name": "laptop"}))
    token = ApiToken.objects.get()
    assert answer.count("ty_") >= 2
    assert "data-copy=" in answer
    assert "data-copy=" not in _text(owner_page.get(reverse("tokens")))
    owner_page.post(reverse("token_revoke", args=[token.pk]))
    token.refresh_from_db()
    assert token.revoked_at is not None
