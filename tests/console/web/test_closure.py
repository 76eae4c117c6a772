"""The pages that close an organization and delete an account."""

import pytest

from console.accounts.models import Closure, User
from console.accounts.roles import Role
from tests.factories.accounts import PASSWORD, MembershipFactory, logged_in

pytestmark = pytest.mark.django_db


def test_an_owner_starts_and_stops_the_closure_of_the_organization_and_every_member_sees_it(
    owner_page, customer, browser
):
    organization = customer.membership.organization
    assert b"stops at once" in owner_page.get("/organization/close/").content
    assert b"to confirm" in owner_page.post("/organization/close/", {"confirmation": "another"}).content
    owner_page.post("/organization/close/", {"confirmation": organization.slug})
    assert Closure.objects.get().requested_by == customer.membership.user
    viewer = browser(MembershipFactory(organization=organization, role=Role.VIEWER))
    assert b"closes on" in viewer.get("/wallet/").content
    assert b"Keep the organization" in owner_page.get("/organization/close/").content
    owner_page.post("/organization/close/withdraw/")
    assert not Closure.objects.exists()


def test_the_page_names_what_prevents_the_closure_in_place_of_the_form(owner_page, customer):
    customer.started()
    page = owner_page.get("/organization/close/").content
    assert b"1 job is open" in page
    assert b'name="confirmation"' not in page


def test_a_person_deletes_their_own_account_with_the_password():
    person = MembershipFactory(role=Role.MEMBER).user
    client = logged_in(person)
    asked = client.get("/security/delete/")
    assert asked.status_code == 302
    assert "reauthenticate" in asked.url
    client.post(asked.url, {"password": PASSWORD})
    assert b"to confirm" in client.post("/security/delete/", {"email": "another@example.com"}).content
    assert client.post("/security/delete/", {"email": person.email.upper()}).url == "/accounts/login/"
    assert not User.objects.exists()
