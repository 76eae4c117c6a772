"""Who may sign up: closed sign-up, mail domains, approval and captcha; and the rate limits of log-in and API."""

import itertools

import pytest
import redis
from django import forms
from django.test import Client
from django.urls import reverse

from console.accounts import invitations, throttling
from console.accounts.models import User
from tests.console.accounts.conftest import forwarded_for
from tests.factories.accounts import MembershipFactory

pytestmark = pytest.mark.django_db
PASSWORD = "plain horse 9"
HOSTS = itertools.count(1)


def sign_up(email, query="", **more):
    """Return a new browser that has sent the sign-up form, and the answer."""
    client = Client(REMOTE_ADDR=f"10.9.8.{next(HOSTS)}")  # rate limits by IP address outlive a test
    form = {"email": email, "organization": "", "password1": PASSWORD, "password2": PASSWORD} | more
    return client, client.post(reverse("account_signup") + query, form)


def invitation_query(owner, email):
    invitation = invitations.invite(organization=owner.organization, email=email, role="viewer", actor=owner.user)
    return f"?invitation={invitations.token_of(invitation)}"


def test_closed_sign_up_accepts_only_invited_people(settings, owner):
    settings.SIGNUP = "closed"
    assert "Sign-up is closed" in sign_up("eve@example.com")[1].text
    assert "Sign-up is closed" in sign_up("eve@example.com", "?invitation=forged")[1].text
    query = invitation_query(owner, "bob@example.com")
    assert sign_up("eve@example.com", query)[1].status_code == 302  # the address is the invitation's
    assert set(User.objects.exclude(pk=owner.user.pk).values_list("email", flat=True)) == {"bob@example.com"}
    assert "Sign-up is closed" in sign_up("eve@example.com", query)[1].text  # Bob used the invitation


def test_mail_domains_are_compared_as_a_whole(settings, owner):
    settings.SIGNUP_EMAIL_DOMAINS = ["example.com"]
    for address in ("a@evil-example.com", "a@example.com.evil.org", "a@sub.example.com"):
        assert "Use an address of: example.com." in sign_up(address)[1].text
    assert sign_up("Ada@EXAMPLE.com")[1].status_code == 302
    assert sign_up("", invitation_query(owner, "bob@elsewhere.org"))[1].status_code == 302  # invited


def test_an_account_waits_for_approval_wherever_it_logs_in(settings, owner, admin_client, mailoutbox):
    settings.SIGNUP = "approval"
    client, answer = sign_up("ada@example.com")
    assert answer.url == reverse("account_approval")
    log_in = {"login": "ada@example.com", "password": PASSWORD}
    assert client.post(reverse("account_login"), log_in).url == reverse("account_approval")
    assert client.get(reverse("organization")).status_code == 302
    assert "_auth_user_id" not in client.session
    user = User.objects.get(email="ada@example.com")
    form = {"action": "approve", "_selected_action": [user.pk]}
    for _twice in range(2):
        admin_client.post(reverse("admin:accounts_user_changelist"), form)
    (mail,) = [each for each in mailoutbox if "approved" in each.subject]
    assert mail.to == [user.email]
    assert client.post(reverse("account_login"), log_in).url == "/"
    invited, answer = sign_up("", invitation_query(owner, "bob@example.com"))
    assert "_auth_user_id" in invited.session  # an invitation needs no approval


class Captcha(forms.CharField):
    """An operator's captcha field, which accepts 4."""

    def clean(self, value):
        if value != "4":
            raise forms.ValidationError("Wrong.")
        return value


def test_the_captcha_field_of_the_operator_decides(settings):
    settings.SIGNUP_CAPTCHA_FIELD = f"{__name__}.Captcha"
    for guess in ({}, {"captcha": "5"}):
        assert sign_up("ada@example.com", **guess)[1].status_code == 200
    assert sign_up("ada@example.com", captcha="4")[1].status_code == 302


@pytest.mark.usefixtures("proxied")
def test_log_in_above_the_limit_says_when_to_retry():
    client, wrong = Client(), {"login": "nobody@example.com", "password": "x"}
    # allauth allows an IP address 30 log-ins a minute.
    answers = [client.post(reverse("account_login"), wrong, **forwarded_for("203.0.113.77")) for _ in range(31)]
    assert [answer.status_code for answer in (answers[0], answers[-1])] == [200, 429]
    assert answers[-1]["Retry-After"] == "60"


def test_the_api_limits_each_token_and_says_when_to_retry(api, owner, settings, monkeypatch):
    settings.API_REQUESTS_PER_MINUTE = 2
    client, other = api(owner), api(MembershipFactory(organization=owner.organization))
    # A new minute may begin between two requests, but at least three of the five fall into the same minute.
    answers = [client.get("/api/v1/whoami/") for _ in range(5)]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert (refused.status_code, refused.data["code"]) == (429, "throttled")
    assert 1 <= int(refused["Retry-After"]) <= 61  # until the next minute, and a second more
    assert other.get("/api/v1/whoami/").status_code == 200

    def away(*_arguments):
        raise redis.ConnectionError

    monkeypatch.setattr(throttling.cache, "add", away)
    assert [client.get("/api/v1/whoami/").status_code for _ in range(5)] == [200] * 5, "no limit without Redis"
