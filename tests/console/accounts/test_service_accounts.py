"""Service accounts: accounts of programs, which act within their role and scopes and cannot log in."""

import pytest
from django.contrib.auth import authenticate
from django.core import mail
from django.utils import timezone
from rest_framework.test import APIClient

from console.accounts import selectors, service_accounts
from console.accounts.models import ApiToken, AuditEvent, Membership, ServiceAccount, User
from console.accounts.roles import Capability, Role
from console.core.errors import InvalidInput
from tests.factories.accounts import logged_in

pytestmark = pytest.mark.django_db


@pytest.fixture
def robot(owner):
    return service_accounts.create(actor=owner, name="robot", role="member")


def client_of(account, owner, **token):
    """Return a client with a new token of the account."""
    _row, secret = service_accounts.create_token(account=account, actor=owner, name="ci", **token)
    api = APIClient()
    api.credentials(HTTP_AUTHORIZATION=f"Token {secret}")
    return api


def test_a_service_account_acts_within_its_role_and_scopes_and_under_its_name(owner, robot):
    api = client_of(robot, owner)
    answer = api.get("/api/v1/whoami/").data
    assert (answer["role"], answer["capabilities"]) == ("member", ["run", "store", "view"])
    assert api.put("/api/v1/secrets/KEY", {"value": "x"}, format="json").status_code == 201
    event = AuditEvent.objects.get(action="secret.created")
    assert event.actor_name == f"robot@{owner.organization.slug}.service.invalid"
    reader = client_of(robot, owner, scopes=["view"], days=1)
    assert reader.put("/api/v1/secrets/KEY", {"value": "x"}, format="json").status_code == 403
    for path in ("organization/members/1/", "service-accounts/", "organization/invitations/"):
        assert api.delete(f"/api/v1/{path}").status_code in {403, 405}  # 405: a list cannot be deleted
    assert api.post("/api/v1/service-accounts/", {"name": "another"}, format="json").status_code == 403
    ApiToken.objects.update(expires_at=timezone.now())
    assert api.get("/api/v1/whoami/").status_code == 401


def test_a_disabled_or_deleted_service_account_is_refused_and_stays_in_the_audit_log(owner, robot):
    api = client_of(robot, owner)
    api.put("/api/v1/secrets/KEY", {"value": "x"}, format="json")
    for is_disabled, status in ((True, 401), (True, 401), (False, 200)):  # the repeated call changes nothing
        service_accounts.set_disabled(account=robot, actor=owner, is_disabled=is_disabled)
        assert api.get("/api/v1/whoami/").status_code == status
    for _twice in range(2):
        service_accounts.delete(account=robot, actor=owner)
    assert api.get("/api/v1/whoami/").status_code == 401
    assert AuditEvent.objects.get(action="secret.created").actor_name.startswith("robot.deleted-")
    again = service_accounts.create(actor=owner, name="robot", role="viewer")
    assert again.membership.user.email == f"robot@{owner.organization.slug}.service.invalid"
    actions = AuditEvent.objects.filter(action__startswith="service_account.", actor=owner.user).order_by("id")
    assert [event.action.partition(".")[2] for event in actions] == [
        "created", "disabled", "enabled", "deleted", "created",
    ]  # fmt: skip


def test_a_service_account_cannot_log_in_even_with_a_password_or_a_session(robot):
    user = robot.membership.user
    assert not user.has_usable_password()
    user.set_password("a password that somebody set")
    user.save()
    assert authenticate(username=user.email, password="a password that somebody set") is None
    page = logged_in(user)
    assert page.get("/wallet/").status_code == 302
    page.post("/accounts/password/reset/", {"email": user.email})
    assert not any(user.email in message.to and "reset/key" in message.body for message in mail.outbox)


def test_a_service_account_is_not_listed_as_a_member_and_never_counts_as_an_owner(owner, robot):
    assert [each.pk for each in selectors.members(organization=owner.organization)] == [owner.pk]
    with pytest.raises(InvalidInput):
        service_accounts.create(actor=owner, name="boss", role="owner")
    with pytest.raises(InvalidInput):
        service_accounts.change_role(account=robot, actor=owner, role="owner")
    Membership.objects.filter(pk=robot.membership_id).update(role=Role.OWNER)
    assert selectors.owners_count(organization=owner.organization) == 1


@pytest.mark.usefixtures("robot")
def test_an_invalid_name_or_one_that_is_taken_in_the_organization_creates_no_service_account(owner, stranger):
    for name in ("", "-a", "a-", "A", "a b", "a.b", "x" * 41, "robot", "a@b", "a\n"):
        with pytest.raises(InvalidInput):
            service_accounts.create(actor=owner, name=name, role="member")
    assert ServiceAccount.objects.count() == 1
    assert User.objects.filter(is_active=False).count() == 1  # the robot's; a refusal leaves no user behind
    service_accounts.create(actor=stranger, name="robot", role="member")


def test_a_limited_token_creates_no_account_or_token_that_may_do_more(owner, robot):
    payer = service_accounts.create(actor=owner, name="payer", role="billing")
    owner.scopes = frozenset({Capability.MANAGE, Capability.VIEW})  # as after authentication by such a token
    with pytest.raises(InvalidInput):
        service_accounts.create(actor=owner, name="escalated", role="billing")
    with pytest.raises(InvalidInput):
        service_accounts.change_role(account=robot, actor=owner, role="billing")
    with pytest.raises(InvalidInput):
        service_accounts.create_token(account=payer, actor=owner, name="ci", scopes=["pay"])
    token, _secret = service_accounts.create_token(account=payer, actor=owner, name="ci")
    token.membership.scopes = token.scope_set()  # as authentication does
    assert not token.membership.allows(Capability.PAY)


def test_the_pages_create_an_account_and_show_a_token_once(owner):
    page = logged_in(owner.user)
    assert b"small letters" in page.post("/organization/service-accounts/", {"name": "No", "role": "member"}).content
    made = page.post("/organization/service-accounts/", {"name": "robot", "role": "member"})
    assert b"ty_" in page.post(made.url, {"name": "ci", "scopes": ["run"], "days": "30"}).content
    token = ApiToken.objects.get()
    assert (token.scopes, token.membership.service_account.name) == (["run", "view"], "robot")
    assert AuditEvent.objects.get(action="token.created").actor == owner.user
    assert b"Disable" in page.get(made.url).content
    page.post(f"{made.url}state/", {"disabled": "1"})
    assert b"Disabled" in page.get("/organization/service-accounts/").content
    page.post(f"{made.url}tokens/{token.pk}/revoke/")
    token.refresh_from_db()
    assert token.revoked_at
    page.post(f"{made.url}delete/")
    assert not ServiceAccount.objects.exists()
