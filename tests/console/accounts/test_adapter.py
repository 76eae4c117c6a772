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


def test_mail_is_written_in_the_language_of_the_login_until_another_is_chosen(client):
    chinese = {"headers": {"accept-language": "zh-CN,zh;q=0.9"}}
    assert client.post(reverse("account_signup"), FORM | {"organization": ""}, **chinese).status_code == 302
    ada = User.objects.get(email="ada@example.com")
    assert ada.language == "zh-hans"
    for wanted, kept in [("en", "en"), ("xx", "en"), ("", "en"), ("zh-hans", "zh-hans")]:
        assert client.post(reverse("set_language"), {"language": wanted, "next": "/"}).status_code == 302
        ada.refresh_from_db()
        assert ada.language == kept


def test_nobody_in_particular_may_choose_a_language(client):
    answer = client.post(reverse("set_language"), {"language": "zh-hans", "next": "/accounts/login/"})
    assert (answer.status_code, answer.url) == (302, "/accounts/login/")
    assert answer.cookies["django_language"].value == "zh-hans"
    assert client.get(reverse("set_language")).status_code == 405
