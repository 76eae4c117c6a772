import pytest
from django.urls import reverse

from console.accounts.models import User
from console.accounts.roles import Role

pytestmark = pytest.mark.django_db
FORM = {"email": "Ada@Example.com", "password1": "plain horse 9", "password2": "plain horse 9"}


@pytest.mark.parametrize(("given", "name"), [("", "ada"), ("Analytical Engines", "Analytical Engines")])
def test_sign_up_makes_an_organization(client, given, name):
    answer = client.post(reverse("account_signup"), FORM | {"organization": given})
    assert answer.status_code == 302
    membership = User.objects.get(email="ada@example.com").memberships.get()
    assert (membership.role, membership.organization.name) == (Role.OWNER, name)
    assert membership.organization.quota


def test_a_failed_sign_up_leaves_nothing(client):
    client.post(reverse("account_signup"), FORM | {"organization": "x" * 101})
    assert not User.objects.exists()
