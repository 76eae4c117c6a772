"""Two-factor authentication with an authenticator app and recovery codes, and the sessions of a person."""

import time

import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal import auth as totp
from allauth.usersessions.models import UserSession
from django.test import Client
from django.urls import reverse

from console.accounts import second_factors, user_agents
from console.accounts.models import AuditEvent
from tests.console.accounts.conftest import forwarded_for
from tests.factories.accounts import PASSWORD, MembershipFactory, UserFactory, logged_in

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("proxied")]


def code_of(secret):
    """Return the code that an authenticator app with this key shows now."""
    return totp.format_hotp_value(totp.hotp_value(secret, int(time.time()) // 30))


@pytest.fixture
def user():
    return MembershipFactory().user


def enter_password(user, address="198.51.100.1", next_page=""):
    """Return a browser that has sent the password, and the answer.

    Limits of log-ins count by IP address, so tests that log in often pass several.
    """
    client = Client()
    query = f"?next={next_page}" if next_page else ""
    form = {"login": user.email, "password": PASSWORD, "next": next_page}
    return client, client.post(reverse("account_login") + query, form, **forwarded_for(address))


def set_up_authenticator_app(user):
    """Set up an authenticator app as the person does. Return the key and the recovery codes."""
    client, _answer = enter_password(user)
    page = client.get(reverse("mfa_activate_totp"), follow=True)
    assert page.redirect_chain  # the log-in alone is not enough: the page asks for the password again
    page = client.post(page.redirect_chain[-1][0], {"password": PASSWORD}, follow=True)
    secret = page.context["form"].secret
    assert client.post(reverse("mfa_activate_totp"), {"code": "000000"}).status_code == 200
    assert not second_factors.is_protected(user)
    answer = client.post(reverse("mfa_activate_totp"), {"code": code_of(secret)})
    assert answer.url == reverse("mfa_view_recovery_codes")
    codes = client.get(answer.url).context["unused_codes"]
    totp_row = Authenticator.objects.get(user=user, type=Authenticator.Type.TOTP)
    assert secret not in str(totp_row.data)  # stored encrypted
    return secret, codes


def test_a_log_in_needs_the_code_and_a_code_works_once(user):
    secret, codes = set_up_authenticator_app(user)
    client, answer = enter_password(user)
    assert answer.url == reverse("mfa_authenticate")
    assert "_auth_user_id" not in client.session
    assert client.get(reverse("organization")).status_code == 302  # the password alone opens nothing
    assert client.post(reverse("mfa_authenticate"), {"code": "12"}).status_code == 200
    code = code_of(secret)  # maybe the code of the set-up, which does not count as used
    assert client.post(reverse("mfa_authenticate"), {"code": code}).status_code == 302
    assert client.get(reverse("organization")).status_code == 200
    second, _answer = enter_password(user)
    assert second.post(reverse("mfa_authenticate"), {"code": code}).status_code == 200  # the same code again
    assert second.post(reverse("mfa_authenticate"), {"code": codes[0]}).status_code == 302
    third, _answer = enter_password(user)
    assert third.post(reverse("mfa_authenticate"), {"code": codes[0]}).status_code == 200
    assert "9 codes are left" in client.get(reverse("security")).content.decode()  # of ten


def test_wrong_codes_are_limited_by_account_across_ip_addresses(user):
    _secret, codes = set_up_authenticator_app(user)
    for number in range(5):  # as many wrong codes as an account may have
        address = f"198.51.100.{number + 10}"
        client, _answer = enter_password(user, address)
        answer = client.post(reverse("mfa_authenticate"), {"code": "000000"}, **forwarded_for(address))
        assert "Incorrect code" in answer.content.decode()
    client, _answer = enter_password(user, "198.51.100.99")
    answer = client.post(reverse("mfa_authenticate"), {"code": codes[0]}, **forwarded_for("198.51.100.99"))
    assert "Too many wrong codes" in answer.content.decode()


def test_the_admin_needs_the_second_factor_too():
    admin = UserFactory(is_staff=True, is_superuser=True)
    _secret, codes = set_up_authenticator_app(admin)
    client, answer = enter_password(admin, next_page="/admin/")
    assert answer.url.startswith(reverse("mfa_authenticate"))
    assert client.get("/admin/").status_code == 302
    assert client.post("/admin/login/", {"username": admin.email, "password": PASSWORD}).status_code == 302
    assert "_auth_user_id" not in client.session
    client.post(reverse("mfa_authenticate"), {"code": codes[0]})
    assert client.get("/admin/").status_code == 200


def test_a_change_of_factors_needs_the_password_again_and_an_administrator_may_reset(user, admin_client):
    client = logged_in(user)
    for name in ("mfa_activate_totp", "mfa_add_webauthn"):
        assert client.get(reverse(name)).url.startswith(reverse("account_reauthenticate"))
    set_up_authenticator_app(user)
    assert "reauthenticate" in client.post(reverse("mfa_deactivate_totp")).url
    form = {"action": "reset_second_factors", "_selected_action": [user.pk]}
    admin_client.post(reverse("admin:accounts_user_changelist"), form)
    assert not Authenticator.objects.filter(user=user).exists()
    reset = AuditEvent.objects.get(action="factors.reset")
    assert (reset.organization, reset.target) == (user.memberships.get().organization, user.email)
    assert enter_password(user)[1].url == "/"


def test_no_code_is_accepted_once_the_key_of_the_installation_is_lost(user, settings):
    _secret, codes = set_up_authenticator_app(user)
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "another", []
    client, _answer = enter_password(user)
    for code in (codes[0], code_of("")):  # "": an undecryptable key must not count as an empty one
        assert client.post(reverse("mfa_authenticate"), {"code": code}).status_code == 200


def test_a_person_ends_only_their_own_other_sessions(user):
    current, _answer = enter_password(user)
    other, _answer = enter_password(user)
    stranger, _answer = enter_password(MembershipFactory().user)
    page = current.get(reverse("security"))
    assert [each["is_current"] for each in page.context["sessions"]] == [False, True]  # the newest is `other`
    foreign = UserSession.objects.exclude(user=user).get()
    assert current.post(reverse("security_end_session", args=[foreign.pk])).status_code == 404
    current.post(reverse("security_end_session", args=[page.context["sessions"][0]["row"].pk]))
    assert other.get(reverse("security")).status_code == 302
    other, _answer = enter_password(user)
    current.post(reverse("security_end_sessions"))
    assert other.get(reverse("security")).status_code == 302
    assert current.get(reverse("security")).status_code == 200
    assert stranger.get(reverse("security")).status_code == 200


def test_a_browser_is_named_by_its_header():
    for header, name in {
        "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/141.0 Safari/537.36": "Chrome, Linux",
        "Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) Version/18.0 Safari/604.1": "Safari, iOS",
        "Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) CriOS/141.0 Mobile Safari/604.1": "Chrome, iOS",
        "Mozilla/5.0 (iPad; CPU OS 18_0 like Mac OS X) FxiOS/143.0 Mobile Safari/605.1": "Firefox, iPadOS",
        "robot/1": "robot/1",
    }.items():
        assert user_agents.name(header) == name
