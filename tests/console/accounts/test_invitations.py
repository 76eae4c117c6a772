"""Invitations: the owner does not learn whether the address has an account, and nobody joins without accepting."""

import re
from datetime import timedelta

import pytest
from django.core import mail
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from console.accounts import invitations, services
from console.accounts.models import Invitation, Membership, User
from console.accounts.roles import Role
from tests.factories.accounts import UserFactory

pytestmark = pytest.mark.django_db
INVITED = "ada@example.com"
PASSWORDS = {"password1": "plain horse 9", "password2": "plain horse 9"}
API = "/api/v1/organization/invitations/"


@pytest.fixture(autouse=True)
def _addresses_are_verified(settings):
    settings.ACCOUNT_EMAIL_VERIFICATION = "mandatory"


def invite(owner, email=INVITED, role=Role.VIEWER):
    invitation = invitations.invite(organization=owner.organization, email=email, role=role, actor=owner.user)
    assert invitations.send_due() == 1
    return invitation


def mailed_link():
    return re.search(r"http://\S+(/invitations/\S+)", mail.outbox[-1].body)[1]


def test_a_person_with_an_account_accepts(client, owner):
    person = UserFactory()
    invite(owner, person.email.upper())
    page = mailed_link()
    assert "Log in to accept" in client.get(page).text
    assert client.post(f"{page}accept/").url.startswith(reverse("account_login"))
    assert not person.memberships.exists()
    client.force_login(person)
    assert client.post(f"{page}accept/").url == reverse("overview")
    assert (person.memberships.get().organization, person.memberships.get().role) == (owner.organization, Role.VIEWER)
    assert client.get(page).status_code == 404


def test_a_person_without_an_account_joins_by_signing_up_through_the_link(client, owner):
    invite(owner, role=Role.MEMBER)
    sign_up = re.search(r'href="(/accounts/signup/[^"]+)"', client.get(mailed_link()).text)[1]
    form = client.get(sign_up).text
    assert INVITED in form
    assert 'name="organization"' not in form
    client.post(sign_up, PASSWORDS | {"email": "another@example.com"})
    ada = User.objects.get(email=INVITED)  # the invitation's address, not the form's
    assert [(each.organization, each.role) for each in ada.memberships.all()] == [(owner.organization, Role.MEMBER)]
    assert client.get(reverse("overview")).status_code == 200  # the link verified the address


def test_the_owner_cannot_see_whether_the_address_has_an_account(api, owner):
    answers, messages, tomorrow = [], [], timezone.now() + timedelta(days=1)
    for address in (UserFactory(language="en").email, INVITED):
        answer = api(owner).post(API, {"email": address, "role": "viewer"})
        answers.append({**answer.data, "id": 0, "email": "", "created_at": "", "expires_at": ""})
        Invitation.objects.filter(mailed_at=None).update(expires_at=tomorrow)  # both emails name the same time
        invitations.send_due()
        messages.append((mail.outbox[-1].subject, mail.outbox[-1].body.replace(mailed_link(), "")))
        assert mail.outbox[-1].to == [address]
    assert answers[0] == answers[1]
    assert messages[0] == messages[1]
    # Owners know their members, so this may be said.
    assert "email" in api(owner).post(API, {"email": owner.user.email}).data["fields"]


def expire(invitation, _owner):
    Invitation.objects.filter(pk=invitation.pk).update(expires_at=timezone.now() - timedelta(seconds=1))


def revoke(invitation, owner):
    invitations.revoke(invitation=invitation, actor=owner.user)


def decline(_invitation, _owner):
    Client().post(f"{mailed_link()}decline/")


def invite_again(invitation, owner):
    invite(owner, invitation.email)


def accept_and_remove(invitation, _owner):
    joined = invitations.accept(invitation=invitation, user=User.objects.get(email=INVITED))
    services.remove_member(membership=joined, actor=None)


@pytest.mark.parametrize("end", [expire, revoke, decline, invite_again, accept_and_remove])
def test_an_invitation_that_has_ended_cannot_be_accepted(client, owner, end):
    ada = UserFactory(email=INVITED)
    client.force_login(ada)
    invitation, page = invite(owner), mailed_link()
    assert client.get(page).status_code == 200
    end(invitation, owner)
    assert client.get(page).status_code == client.post(f"{page}accept/").status_code == 404
    assert not ada.memberships.exists()


def test_a_sign_up_with_a_forged_token_joins_nothing(client, owner):
    token = invitations.token_of(invite(owner))
    assert invitations.find(token) is not None
    assert invitations.find(token[:-1]) is None
    form = PASSWORDS | {"email": "new@example.com"}
    client.post(f"{reverse('account_signup')}?invitation={token[:-1]}", form)
    assert User.objects.get(email="new@example.com").memberships.get().role == Role.OWNER


def test_another_persons_invitation_cannot_be_accepted(client, owner):
    invite(owner)
    page, other = mailed_link(), UserFactory()
    client.force_login(other)
    assert "To accept, log out" in client.get(page).text
    assert client.post(f"{page}accept/").url == page
    assert not other.memberships.exists()


def test_only_owners_see_and_revoke_open_invitations(client, owner, member):
    invitation = invite(owner)
    client.force_login(member.user)
    assert "Open invitations" not in client.get(reverse("organization")).text

    client.force_login(owner.user)
    assert "Open invitations" in client.get(reverse("organization")).text
    client.post(reverse("organization_invite"), {"email": "second@example.com", "role": "viewer"})
    client.post(reverse("invitation_revoke", args=[invitation.pk]))
    assert [each.email for each in owner.organization.invitations.filter(revoked_at=None)] == ["second@example.com"]


def test_a_user_sends_a_limited_number_of_invitations_a_day(api, owner, stranger, monkeypatch):
    monkeypatch.setattr(invitations, "MAX_PER_DAY", 2)
    second = Membership.objects.create(user=owner.user, organization=stranger.organization, role=Role.OWNER)
    statuses = [
        api(sender).post(API, {"email": f"{number}@example.com"}).status_code
        for number, sender in enumerate((owner, second, owner))
    ]
    assert statuses == [201, 201, 429]
