import pytest
from django.contrib.auth.models import AnonymousUser
from django.contrib.sessions.backends.db import SessionStore
from django.test import RequestFactory

from console.accounts import services
from console.accounts.middleware import SESSION_KEY, OrganizationMiddleware
from tests.factories.accounts import MembershipFactory, UserFactory

pytestmark = pytest.mark.django_db


def request_of(user, **session):
    request = RequestFactory().get("/")
    request.user, request.session = user, SessionStore()
    request.session.update(session)
    OrganizationMiddleware(lambda passed: passed)(request)
    return request


def test_nobody_and_the_homeless_have_none(django_assert_num_queries):
    with django_assert_num_queries(0):
        assert request_of(AnonymousUser()).membership is None
    assert request_of(UserFactory()).membership is None


def test_first_membership_unless_another_was_chosen(django_assert_num_queries):
    first = MembershipFactory()
    second = MembershipFactory(user=first.user)
    foreign = MembershipFactory()
    assert request_of(first.user).membership == first
    with django_assert_num_queries(1):
        request = request_of(first.user, **{SESSION_KEY: second.organization_id})
        assert request.membership == second
        assert request.membership.organization == second.organization
        assert request.membership.user == first.user
    for odd in (foreign.organization_id, "7; drop", None, True):
        assert request_of(first.user, **{SESSION_KEY: odd}).membership == first


def test_nothing_is_asked_before_it_is_needed(django_assert_num_queries, owner):
    with django_assert_num_queries(0):
        request_of(owner.user)


def test_a_removed_member_is_out_at_once(client, owner, member):
    client.force_login(member.user)
    assert client.get("/api/v1/whoami/").status_code == 200
    services.remove_member(membership=member, actor=owner.user)
    assert client.get("/api/v1/whoami/").status_code == 403
