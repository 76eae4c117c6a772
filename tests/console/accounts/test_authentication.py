"""A request's user and organization, from an API token or a session, and the changes that end a running request."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import AnonymousUser
from django.contrib.sessions.backends.db import SessionStore
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.utils import timezone
from rest_framework.authentication import SessionAuthentication
from rest_framework.request import Request

from console.accounts import service_accounts, services
from console.accounts.access import is_still_allowed
from console.accounts.authentication import TokenAuthentication
from console.accounts.middleware import ORGANIZATION_SESSION_KEY, OrganizationMiddleware
from console.accounts.models import ApiToken, AuditEvent, Membership
from console.accounts.roles import Capability, Role
from tests.factories.accounts import MembershipFactory, UserFactory, logged_in

pytestmark = pytest.mark.django_db
WHOAMI = "/api/v1/whoami/"


def test_a_token_acts_for_its_member(client, member):
    _, secret = services.create_token(membership=member, name="ci")
    for scheme in ("Token", "Bearer"):
        answer = client.get(WHOAMI, headers={"Authorization": f"{scheme} {secret}"}).json()
        assert answer["email"] == member.user.email
        assert answer["organization"]["id"] == member.organization_id
        assert answer["capabilities"] == ["run", "store", "view"]


def test_an_invalid_token_is_refused_even_beside_a_session(client, owner):
    client.force_login(owner.user)
    for header in ("Token", "Token ty_wrong", "Token two words", "Token gr\xfcn"):
        answer = client.get(WHOAMI, headers={"Authorization": header})
        assert (answer.status_code, answer.json()["code"]) == (401, "authentication_failed"), header


def test_a_token_is_shown_once_stored_as_a_hash_and_revoked_once(api, owner):
    client = api(owner)
    created = client.post("/api/v1/tokens/", {"name": "laptop"}).data
    assert created["secret"] not in client.get("/api/v1/tokens/").text
    row = ApiToken.objects.get(pk=created["id"])
    assert created["secret"] not in str(row.__dict__)
    assert created["secret"].startswith(row.prefix)
    client.credentials(HTTP_AUTHORIZATION=f"Token {created['secret']}")
    assert client.delete(f"/api/v1/tokens/{row.pk}/").status_code == 204
    assert client.get(WHOAMI).status_code == 401
    assert api(owner).delete(f"/api/v1/tokens/{row.pk}/").status_code == 404
    services.revoke_token(token=row, actor=owner.user)  # as a request does that read the row before it was revoked
    assert AuditEvent.objects.filter(action="token.revoked").count() == 1


def test_the_time_of_last_use_is_stored_once_a_minute(api, owner, django_assert_num_queries):
    client = api(owner)
    client.get(WHOAMI)
    first = ApiToken.objects.get().last_used_at
    assert first is not None
    with django_assert_num_queries(2):  # the token with its member, and whether the service is active
        client.get(WHOAMI)
    assert ApiToken.objects.get().last_used_at == first
    ApiToken.objects.update(last_used_at=timezone.now() - timedelta(seconds=61))
    client.get(WHOAMI)
    assert ApiToken.objects.get().last_used_at >= first


def client_with_created_token(api, answer):
    """Return a client with the token that a request has created."""
    client = api(None)
    client.credentials(HTTP_AUTHORIZATION=f"Token {answer.data['secret']}")
    return client


def test_a_token_does_what_its_scopes_and_its_role_allow(api, owner):
    made = api(owner).post("/api/v1/tokens/", {"name": "ci", "scopes": ["store"]})
    assert made.data["scopes"] == ["store", "view"]
    client = client_with_created_token(api, made)
    assert client.get(WHOAMI).data["capabilities"] == ["store", "view"]
    assert client.post("/api/v1/datasets/", {"name": "ours"}).status_code == 201
    for path, body in (("organization/invitations/", {"email": "a@example.com"}), ("wallet/top-ups/", {})):
        assert client.post(f"/api/v1/{path}", body).data["code"] == "not_allowed"
    assert client.patch("/api/v1/organization/", {"name": "Mine"}).status_code == 403
    MembershipFactory(organization=owner.organization)  # a second owner, since the last one keeps that role
    services.change_role(membership=owner, role=Role.VIEWER, actor=None)
    assert client.post("/api/v1/datasets/", {"name": "more"}).status_code == 403


def test_a_new_token_may_do_no_more_and_lives_no_longer_than_the_token_or_role_that_creates_it(api, owner):
    made = api(owner).post("/api/v1/tokens/", {"name": "ci", "scopes": ["run"], "days": 7})
    client = client_with_created_token(api, made)
    refused = client.post("/api/v1/tokens/", {"name": "x", "scopes": ["run", "manage"]})
    assert (refused.status_code, set(refused.data["fields"])) == (400, {"scopes"})
    for wanted in ({}, {"scopes": None}, {"scopes": ["run"]}, {"scopes": []}):
        child = client.post("/api/v1/tokens/", {"name": "x", "days": 900} | wanted)
        assert set(child.data["scopes"]) <= {"run", "view"}
        assert child.data["expires_at"] == made.data["expires_at"]
        assert set(client_with_created_token(api, child).get(WHOAMI).data["capabilities"]) <= {"run", "view"}
    viewer = MembershipFactory(organization=owner.organization, role=Role.VIEWER)
    for asking, body in (
        (viewer, {"scopes": ["store"]}), (owner, {"scopes": ["root"]}), (owner, {"scopes": "run"}),
        (owner, {"days": 0}), (owner, {"days": 10**9}),
    ):  # fmt: skip
        assert api(asking).post("/api/v1/tokens/", {"name": "x"} | body).status_code == 400, body


def test_a_token_neither_grants_nor_takes_a_role_that_may_do_more_than_the_token(api, owner, member):
    viewer = MembershipFactory(organization=owner.organization, role=Role.VIEWER)
    robots = [service_accounts.create(actor=owner, name=role, role=role) for role in (Role.MEMBER, Role.VIEWER)]
    made = api(owner).post("/api/v1/tokens/", {"name": "ci", "scopes": ["manage"]})
    client = client_with_created_token(api, made)
    change_role = lambda role: client.patch(f"/api/v1/organization/members/{viewer.pk}/", {"role": role})
    invite = lambda role: client.post("/api/v1/organization/invitations/", {"email": "a@example.com", "role": role})
    for grant, status in ((change_role, 200), (invite, 201)):
        for role in ("owner", "member", "billing"):
            refused = grant(role)
            assert (refused.status_code, set(refused.data["fields"])) == (400, {"role"}), role
        assert grant("viewer").status_code == status
    invited = [
        api(owner).post("/api/v1/organization/invitations/", {"email": f"{role}@example.com", "role": role}).data["id"]
        for role in ("member", "viewer")
    ]
    for path, (more, same), method, body in (
        ("organization/members", (member.pk, viewer.pk), "patch", {"role": "viewer"}),
        ("organization/members", (owner.pk, viewer.pk), "delete", {}),
        ("organization/invitations", invited, "delete", {}),
        ("service-accounts", [robot.pk for robot in robots], "patch", {"is_disabled": True}),
        ("service-accounts", [robot.pk for robot in robots], "delete", {}),
    ):
        statuses = [getattr(client, method)(f"/api/v1/{path}/{pk}/", body).status_code for pk in (more, same)]
        assert statuses == [403, 200 if method == "patch" else 204], (path, method)


def test_a_token_revokes_itself_and_tokens_that_may_do_no_more(api, owner):
    create = lambda scopes: api(owner).post("/api/v1/tokens/", {"name": "ci", "scopes": scopes})
    used = create(["run"])
    client = client_with_created_token(api, used)
    for scopes, status in ((None, 403), (["pay"], 403), (["view"], 204)):
        assert client.delete(f"/api/v1/tokens/{create(scopes).data['id']}/").status_code == status, scopes
    assert client.delete(f"/api/v1/tokens/{used.data['id']}/").status_code == 204


def test_a_token_revokes_no_token_of_a_service_account_that_may_do_more(api, owner):
    account = service_accounts.create(actor=owner, name="robot", role=Role.MEMBER)
    token, _secret = service_accounts.create_token(account=account, actor=owner, name="ci")
    path = f"/api/v1/service-accounts/{account.pk}/tokens/{token.pk}/"
    limited = client_with_created_token(api, api(owner).post("/api/v1/tokens/", {"name": "x", "scopes": ["manage"]}))
    assert (limited.delete(path).status_code, api(owner).delete(path).status_code) == (403, 204)


def test_a_token_is_refused_while_its_user_is_inactive_and_once_it_has_expired(api, owner, client):
    made = api(owner).post("/api/v1/tokens/", {"name": "ci", "days": 1})
    token = client_with_created_token(api, made)
    statuses = [token.get(WHOAMI).status_code]
    for is_active in (False, True):
        type(owner.user).objects.update(is_active=is_active)
        statuses.append(token.get(WHOAMI).status_code)
    ApiToken.objects.filter(pk=made.data["id"]).update(expires_at=timezone.now())
    assert [*statuses, token.get(WHOAMI).status_code] == [200, 401, 200, 401]
    client.force_login(owner.user)
    assert "Expired" in client.get("/tokens/").text


def test_the_page_creates_a_token_with_the_chosen_scopes_shows_it_once_and_revokes_it(client, owner):
    client.force_login(owner.user)
    create = lambda scope: client.post("/tokens/", {"name": "page", "scopes": [scope], "days": "30"}).text
    assert "data-copy=" in create("run")
    token = ApiToken.objects.get()
    assert (token.scopes, token.expires_at is not None) == (["run", "view"], True)
    create("root")  # no such scope, so this creates no token
    assert "data-copy=" not in client.get("/tokens/").text
    client.post(f"/tokens/{token.pk}/revoke/")
    assert ApiToken.objects.get().revoked_at


def test_a_session_needs_the_csrf_token_to_change_anything(owner):
    client = Client(enforce_csrf_checks=True)
    client.force_login(owner.user)
    assert client.get(WHOAMI).status_code == 200
    answer = client.post("/api/v1/tokens/", {"name": "x"}, content_type="application/json")
    assert (answer.status_code, answer.json()["code"]) == (403, "not_allowed")


def request_of(user, **session):
    """Return a request as the middleware leaves it, with these values in its session."""
    request = RequestFactory().get("/")
    request.user, request.session = user, SessionStore()
    request.session.update(session)
    OrganizationMiddleware(lambda _request: HttpResponse())(request)
    return request


def test_the_first_membership_is_used_unless_another_is_chosen_or_there_is_none(django_assert_num_queries):
    first = MembershipFactory()
    with django_assert_num_queries(0):
        assert request_of(AnonymousUser()).membership is None
        request_of(first.user)  # the memberships are read on first use, not here
    assert request_of(UserFactory()).membership is None
    second, foreign = MembershipFactory(user=first.user), MembershipFactory()
    assert request_of(first.user).membership == first
    with django_assert_num_queries(1):
        request = request_of(first.user, **{ORGANIZATION_SESSION_KEY: second.organization_id})
        assert (request.membership.organization, request.membership.user) == (second.organization, first.user)
        assert request.memberships == [first, second]
    for invalid in (foreign.organization_id, "7; drop", None, True):  # then the first is used
        assert request_of(first.user, **{ORGANIZATION_SESSION_KEY: invalid}).membership == first


def request_by_session(membership):
    """Return a request of the API framework with the session of a logged-in browser, and the browser."""
    client = logged_in(membership.user)
    request = RequestFactory().get("/")
    request.user, request.session = membership.user, client.session
    OrganizationMiddleware(lambda passed: passed)(request)
    return Request(request, authenticators=[SessionAuthentication()]), client


def request_by_token(membership):
    """Return a request of the API framework with a token. There is no browser."""
    _, secret = services.create_token(membership=membership, name="test")
    request = RequestFactory().get("/", headers={"authorization": f"Token {secret}"})
    return Request(request, authenticators=[TokenAuthentication()]), None


def log_out(_member, client):
    client.logout()


def log_in_as_another(_member, client):
    client.force_login(UserFactory())


def revoke(member, _client):
    services.revoke_token(token=ApiToken.objects.get(membership=member), actor=None)


def expire(member, _client):
    ApiToken.objects.filter(membership=member).update(expires_at=timezone.now())


def change_password(member, _client):
    member.user.set_password("another horse 9")
    member.user.save()


def deactivate(member, _client):
    type(member.user).objects.filter(pk=member.user_id).update(is_active=False)


def demote(member, _client):
    Membership.objects.filter(pk=member.pk).update(role=Role.VIEWER)


def remove(member, _client):
    services.remove_member(membership=member, actor=None)


@pytest.mark.parametrize(
    ("make_request", "end_access"),
    [
        *(
            (request_by_session, end)
            for end in (log_out, log_in_as_another, change_password, deactivate, demote, remove)
        ),
        *((request_by_token, end) for end in (revoke, expire, deactivate, demote, remove)),
    ],
)
def test_a_running_request_loses_its_permission_when_access_ends(make_request, end_access, member):
    request, client = make_request(member)
    assert request.user == member.user
    assert is_still_allowed(request, Capability.RUN)
    end_access(Membership.objects.get(pk=member.pk), client)
    assert not is_still_allowed(request, Capability.RUN)
    assert is_still_allowed(request, Capability.VIEW) is (end_access is demote)  # a viewer may still view
