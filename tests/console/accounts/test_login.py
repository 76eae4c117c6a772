"""Sign-up, log-in and its limits. Each test uses other IP addresses, since a rollback does not reset the limits."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock
from uuid import uuid4

import pytest
from allauth.account.models import EmailAddress
from django.contrib.auth.hashers import Argon2PasswordHasher
from django.urls import reverse

from console.accounts import adapter, hashers
from console.accounts.models import User
from console.accounts.roles import Role
from tests.console.accounts.conftest import forwarded_for
from tests.factories.accounts import PASSWORD, UserFactory

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("proxied")]
PASSWORDS = {"password1": "plain horse 9", "password2": "plain horse 9"}
SIGN_UP = PASSWORDS | {"email": "Ada@Example.com", "organization": ""}


def log_in(client, user, password, address):
    form = {"login": user.email, "password": password}
    return client.post(reverse("account_login"), form, **forwarded_for(address)).status_code == 302


def test_sign_up_creates_an_organization_unless_it_fails(client):
    sign_up = lambda **form: client.post(reverse("account_signup"), SIGN_UP | form).status_code
    assert sign_up(organization="x" * 101) == 200
    assert not User.objects.exists()
    for email, organization, name in (("Ada@Example.com", "", "ada"), ("b@example.com", "Engines", "Engines")):
        assert sign_up(email=email, organization=organization) == 302
        membership = User.objects.get(email=email.lower()).memberships.get()
        assert (membership.role, membership.organization.name) == (Role.OWNER, name)
        assert membership.organization.quota
        client.logout()


def test_email_is_in_the_language_of_the_sign_up_until_another_is_chosen(client):
    client.post(reverse("account_signup"), SIGN_UP, headers={"accept-language": "zh-CN,zh;q=0.9"})
    ada = User.objects.get(email="ada@example.com")
    assert ada.language == "zh-hans"
    for wanted, kept in [("en", "en"), ("xx", "en"), ("", "en"), ("zh-hans", "zh-hans")]:
        client.post(reverse("set_language"), {"language": wanted, "next": "/"})
        ada.refresh_from_db()
        assert ada.language == kept
    client.logout()
    answer = client.post(reverse("set_language"), {"language": "zh-hans", "next": "/accounts/login/"})
    assert (answer.url, answer.cookies["django_language"].value) == ("/accounts/login/", "zh-hans")


@pytest.mark.parametrize("path", ["account_reset_password", "account_signup"])
def test_email_links_to_the_configured_address_whatever_host_the_request_names(client, settings, mailoutbox, path):
    settings.TRAINYARD_URL = "https://train.example.com"
    settings.ACCOUNT_EMAIL_VERIFICATION = "mandatory"
    # allauth limits the messages to one address, and other tests use up the limit of SIGN_UP's address.
    email = UserFactory().email if path == "account_reset_password" else "grace@example.com"
    client.post(reverse(path), SIGN_UP | {"email": email}, headers={"host": "127.0.0.1:8000"})
    (message,) = mailoutbox
    assert "127.0.0.1" not in message.body
    assert "https://train.example.com/accounts/" in message.body


def test_sign_up_does_not_reveal_who_has_an_account(client, settings, mailoutbox):
    settings.ACCOUNT_EMAIL_VERIFICATION = "mandatory"
    for sign_up in ("open", "approval"):
        settings.SIGNUP = sign_up
        mailoutbox.clear()
        # New addresses for each rule, since an address gets such a message at most once in three minutes.
        taken, free = (f"{uuid4().hex}@example.com" for _ in range(2))
        UserFactory(email=taken)
        for address in (taken, free):
            answer = client.post(reverse("account_signup"), PASSWORDS | {"email": address})
            assert (answer.status_code, answer.url) == (302, reverse("account_email_verification_sent"))
            assert mailoutbox[-1].to == [address]
        assert "already exists" in " ".join(mailoutbox[0].body.split())


def test_wrong_passwords_block_the_account_from_that_ip_address_alone(client):
    """If the account were blocked everywhere, an attacker could lock its owner out."""
    user = UserFactory()
    assert not any(log_in(client, user, "guess", "203.0.113.9") for _ in range(5))
    assert not log_in(client, user, PASSWORD, "203.0.113.9")  # five are the limit
    assert log_in(client, user, PASSWORD, "203.0.113.10")


def test_a_log_in_and_a_new_password_reset_the_count_of_failures(client, mailoutbox, monkeypatch):
    user, address = UserFactory(), "203.0.113.30"
    assert not any(log_in(client, user, "guess", address) for _ in range(4))
    assert log_in(client, user, PASSWORD, address)
    client.logout()
    assert not log_in(client, user, "guess", address)  # the fifth: without the reset, the next is refused
    assert log_in(client, user, PASSWORD, address)
    client.logout()
    address = "203.0.113.31"  # ten failures of one address would block it for all accounts
    assert not any(log_in(client, user, "guess", address) for _ in range(5))
    client.post(reverse("account_reset_password"), {"email": user.email}, **forwarded_for(address))
    path = re.search(r"/accounts/password/reset/key/\S+", mailoutbox[0].body)[0]
    form = client.get(path, **forwarded_for(address))
    assert client.post(form.url, PASSWORDS, **forwarded_for(address)).status_code == 302
    assert log_in(client, user, "plain horse 9", address)
    client.logout()
    monkeypatch.setattr(adapter, "cache", Mock(incr=Mock(side_effect=ValueError)))  # the count has just expired
    assert log_in(client, user, "plain horse 9", address)


def test_all_addresses_of_an_account_share_its_count_of_failures(client):
    user = UserFactory()
    for email, primary in ((user.email, True), ("second@example.com", False)):
        EmailAddress.objects.create(user=user, email=email, verified=True, primary=primary)
    second = lambda password: log_in(client, SimpleNamespace(email="Second@example.com"), password, "203.0.113.40")
    for _number in range(6):  # a log-in resets the count
        assert second(PASSWORD)
        client.logout()
    assert not any(second("guess") for _ in range(5))
    assert not log_in(client, user, PASSWORD, "203.0.113.40")


def test_an_ip_address_is_blocked_after_wrong_passwords_for_ten_accounts(client):
    assert not any(log_in(client, UserFactory(), "guess", "203.0.113.20") for _ in range(10))
    assert not log_in(client, UserFactory(), PASSWORD, "203.0.113.20")


def test_administrators_log_in_on_the_same_page(client):
    admin = UserFactory(is_staff=True, is_superuser=True)
    answer = client.post("/admin/login/", {"username": admin.email, "password": PASSWORD})
    assert (answer.status_code, answer.url.partition("?")[0]) == (302, reverse("account_login"))
    assert "_auth_user_id" not in client.session
    client.force_login(UserFactory())
    assert client.get("/admin/login/").status_code == 403
    client.force_login(admin)
    assert client.get("/admin/accounts/user/").status_code == 200


def test_a_process_hashes_few_passwords_at_once(monkeypatch):
    running, peak, full = 0, 0, threading.Barrier(hashers.MAX_CONCURRENT_HASHES)
    counting = threading.Lock()

    def encode(self, password, salt):
        nonlocal running, peak
        with counting:
            running += 1
            peak = max(peak, running)
        full.wait(timeout=30)  # until as many calls as are allowed run at once
        with counting:
            running -= 1
        return password

    monkeypatch.setattr(Argon2PasswordHasher, "encode", encode)
    calls = 4 * hashers.MAX_CONCURRENT_HASHES  # a multiple of the limit, so that no call waits in vain for others
    with ThreadPoolExecutor(calls) as pool:
        hashes = [pool.submit(hashers.BoundedArgon2PasswordHasher().encode, "x", "salt") for _ in range(calls)]
    assert [each.result() for each in hashes] == ["x"] * calls
    assert peak == hashers.MAX_CONCURRENT_HASHES
