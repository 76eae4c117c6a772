from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from console.accounts import services
from console.accounts.models import ApiToken

pytestmark = pytest.mark.django_db
WHOAMI = "/api/v1/whoami/"


def test_a_token_acts_for_its_member(api, member):
    answer = api(member).get(WHOAMI)
    assert answer.status_code == 200
    assert answer.data["email"] == member.user.email
    assert answer.data["organization"]["id"] == member.organization_id
    assert answer.data["capabilities"] == ["run", "store", "view"]


def test_bearer_is_understood_too(client, owner):
    _, secret = services.create_token(membership=owner, name="ci")
    assert client.get(WHOAMI, headers={"Authorization": f"Bearer {secret}"}).status_code == 200


@pytest.mark.parametrize("header", ["Token", "Token ty_wrong", "Token two words", "Token gr\xfcn"])
def test_wrong_tokens_are_refused_even_beside_a_session(client, owner, header):
    client.force_login(owner.user)
    answer = client.get(WHOAMI, headers={"Authorization": header})
    assert answer.status_code == 401
    assert answer["WWW-Authenticate"].startswith("Token")
    assert answer.json()["code"] == "authentication_failed"


def test_nobody_is_told_how_to_authenticate(client, db):
    answer = client.get(WHOAMI)
    assert answer.status_code == 401
    assert answer["WWW-Authenticate"] == 'Token realm="trainyard"'
    assert answer.json() == {
        "code": "not_authenticated",
        "message": "Log in, or send an API token: Authorization: Token ty_...",
    }


def test_revoked_tokens_and_inactive_people_are_out(api, owner):
    client = api(owner)
    owner.user.is_active = False
    owner.user.save()
    assert client.get(WHOAMI).status_code == 401
    owner.user.is_active = True
    owner.user.save()
    assert client.get(WHOAMI).status_code == 200
    services.revoke_token(token=ApiToken.objects.get(), actor=None)
    assert client.get(WHOAMI).status_code == 401


def test_use_is_noted_once_a_minute(api, owner, django_assert_num_queries):
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


def test_a_session_needs_the_csrf_token_to_change_things(owner):
    client = Client(enforce_csrf_checks=True)
    client.force_login(owner.user)
    assert client.get(WHOAMI).status_code == 200
    answer = client.post("/api/v1/tokens/", {"name": "x"}, content_type="application/json")
    assert answer.status_code == 403
    assert answer.json()["code"] == "not_allowed"
    assert "CSRF" in answer.json()["message"]
