import pytest

from console.accounts.models import ApiToken
from tests.factories.accounts import UserFactory

pytestmark = pytest.mark.django_db


def test_a_token_is_shown_once_and_revoked(api, owner):
    client = api(owner)
    made = client.post("/api/v1/tokens/", {"name": "laptop"})
    assert made.status_code == 201
    secret = made.data["secret"]
    listed = client.get("/api/v1/tokens/")
    assert listed.data["results"][0]["name"] == "laptop"
    assert secret not in listed.content.decode()
    assert client.delete(f"/api/v1/tokens/{made.data['id']}/").status_code == 204
    assert client.delete(f"/api/v1/tokens/{made.data['id']}/").status_code == 404
    assert ApiToken.objects.get(pk=made.data["id"]).revoked_at
    answer = client.get("/api/v1/whoami/", headers={"Authorization": f"Token {secret}"})
    assert answer.status_code == 200  # the client's own header is the one sent
    client.credentials(HTTP_AUTHORIZATION=f"Token {secret}")
    assert client.get("/api/v1/whoami/").status_code == 401


@pytest.mark.parametrize("body", [{}, {"name": ""}, {"name": "x" * 101}, {"name": None}, []])
def test_a_token_needs_a_name(api, owner, body):
    answer = api(owner).post("/api/v1/tokens/", body)
    assert (answer.status_code, answer.data["code"]) == (400, "invalid")


def test_malformed_json(api, owner):
    answer = api(owner).post("/api/v1/tokens/", "{", content_type="application/json")
    assert (answer.status_code, answer.data["code"]) == (400, "malformed")


def test_members_come_change_and_go(api, owner):
    client, person = api(owner), UserFactory()
    added = client.post("/api/v1/organization/members/", {"email": person.email})
    assert (added.status_code, added.data["role"]) == (201, "member")
    path = f"/api/v1/organization/members/{added.data['id']}/"
    assert client.patch(path, {"role": "billing"}).data["role"] == "billing"
    assert client.patch(path, {"role": "emperor"}).data["fields"]["role"]
    assert client.patch(path, {}).data["fields"]["role"]
    emails = [one["email"] for one in client.get("/api/v1/organization/members/").data["results"]]
    assert emails == [owner.user.email, person.email]
    assert client.delete(path).status_code == 204
    assert client.delete(path).status_code == 404


def test_the_last_owner_is_told_why(api, owner):
    answer = api(owner).delete(f"/api/v1/organization/members/{owner.pk}/")
    assert (answer.status_code, answer.data["code"]) == (409, "last_owner")
    assert "owner" in answer.data["message"]


def test_renaming_keeps_the_short_name(api, owner):
    slug = owner.organization.slug
    answer = api(owner).patch("/api/v1/organization/", {"name": "New name", "slug": "stolen"})
    assert (answer.data["name"], answer.data["slug"]) == ("New name", slug)
    assert answer.data["service_active"] is False
