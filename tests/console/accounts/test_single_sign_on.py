"""Single sign-on at an OpenID Connect provider on this machine, and the rules that also hold for SAML."""

from functools import partial
from importlib import import_module

import httpx
import pytest
from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
from allauth.mfa.totp.internal.auth import TOTP
from allauth.socialaccount.models import SocialAccount
from django.core.exceptions import ImproperlyConfigured
from django.test import Client
from django.urls import reverse

from console import sign_in
from console.accounts import invitations
from console.accounts.models import User
from console.accounts.roles import Role
from tests.console.accounts import conftest
from tests.console.accounts.conftest import NEEDS_XMLSEC, fresh_email, logged_in_user
from tests.factories.accounts import PASSWORD, MembershipFactory

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the provider uses old names of its own libraries
]


@pytest.fixture(scope="module")
def provider():
    # Imported here: it takes most of a second, which each test process would spend.
    with import_module("oidc_provider_mock").run_server_in_thread() as server:
        yield f"http://localhost:{server.server_port}"


@pytest.fixture
def sign_on_openid(settings, provider):
    """A function that logs in at the OpenID Connect provider, which the console trusts: see `sign_on`."""
    text = (
        f'[{{"id": "acme", "name": "Acme", "server_url": "{provider}", "client_id": "trainyard", '
        '"client_secret": "secret", "verified_domains": ["trusted.example.com"]}]'
    )
    apps = sign_in.parse_oidc_providers(text)
    settings.OIDC_PROVIDERS = apps
    settings.SOCIALACCOUNT_PROVIDERS = {"openid_connect": {"OAUTH_PKCE_ENABLED": True, "APPS": apps}}
    return partial(sign_on, provider)


@pytest.fixture
def sign_on_saml(idp):
    """A function that logs in at the SAML provider: see `conftest.sign_on`."""
    return partial(conftest.sign_on, idp)


@pytest.fixture(params=["sign_on_openid", pytest.param("sign_on_saml", marks=NEEDS_XMLSEC)])
def sign_on_either(request):
    """A function that logs in at a provider. A test with it runs once for each protocol."""
    return request.getfixturevalue(request.param)


def sign_on(provider, email, *, client=None, subject=None, verified=True, process="login", next_page="", invitation=""):
    """Go to the provider, log in there as `subject` and come back. Return the browser and the console's answer."""
    client, subject = client or Client(), subject or email
    httpx.put(f"{provider}/users/{subject}", json={"email": email, "email_verified": verified}).raise_for_status()
    login = reverse("openid_connect_login", args=["acme"])
    answer = client.post(f"{login}?process={process}&next={next_page}")
    assert answer.status_code == 302, answer.content.decode()[-2000:]
    assert answer.url.startswith(f"{provider}/oauth2/authorize")
    assert "code_challenge=" in answer.url
    back = httpx.post(answer.url, data={"sub": subject})
    return client, client.get(f"{back.headers['location']}&invitation={invitation}")


def test_a_new_person_gets_an_account_and_finds_it_again_by_the_subject(sign_on_either):
    email = fresh_email()
    client, answer = sign_on_either(email, next_page="/tokens/")
    assert answer.url == "/tokens/"
    user = logged_in_user(client)
    assert (user.email, user.memberships.get().role) == (email, Role.OWNER)
    assert not user.has_usable_password()
    renamed, _answer = sign_on_either(fresh_email(), subject=email)
    assert logged_in_user(renamed) == user
    assert "Continue with Acme" in Client().get(reverse("account_login")).content.decode()


def test_an_account_is_never_found_by_the_address_that_a_provider_states(sign_on_openid):
    user = MembershipFactory(user__email=fresh_email()).user
    EmailAddress.objects.create(user=user, email=user.email, verified=True, primary=True)
    for verified in (True, False):
        client, _answer = sign_on_openid(user.email, verified=verified)
        assert logged_in_user(client) is None
        client.post(reverse("socialaccount_signup"), {"email": user.email, "organization": ""})
        assert logged_in_user(client) is None
        assert not SocialAccount.objects.exists()


def test_an_address_counts_as_verified_only_if_the_provider_says_so_or_is_trusted(sign_on_openid, settings):
    settings.SOCIALACCOUNT_EMAIL_VERIFICATION = settings.ACCOUNT_EMAIL_VERIFICATION = "mandatory"
    for domain, stated, is_verified in (
        ("example.com", True, True),
        ("example.com", False, False),
        ("example.com", "false", False),  # a string, which Python takes for true
        ("trusted.example.com", False, True),
    ):
        email = fresh_email(domain)
        client, answer = sign_on_openid(email, verified=stated)
        assert EmailAddress.objects.get(email=email).verified is is_verified
        assert (logged_in_user(client) is not None) is is_verified
        assert (answer.url == reverse("account_email_verification_sent")) != is_verified


def test_closed_sign_up_by_single_sign_on_needs_an_unused_invitation_for_the_verified_address(
    sign_on_openid, settings, owner, stranger
):
    settings.SIGNUP = "closed"
    email = fresh_email()
    invitation = invitations.invite(organization=owner.organization, email=email, role="viewer", actor=owner.user)
    token = invitations.token_of(invitation)
    for address, verified in ((fresh_email(), True), (email, False)):
        _client, answer = sign_on_openid(address, verified=verified, invitation=token)
        assert "Sign-up is closed" in answer.text
    # As the invitation's page leads there.
    client, _answer = sign_on_openid(email, next_page=reverse("invitation", args=[token]))
    assert [(each.organization, each.role) for each in logged_in_user(client).memberships.all()] == [
        (owner.organization, Role.VIEWER)
    ]
    assert "Sign-up is closed" in sign_on_openid(fresh_email(), invitation=token)[1].text  # it was used
    # A second account at the provider with this address gets a form, since the address is taken.
    again = invitations.invite(organization=stranger.organization, email=email, role="viewer", actor=stranger.user)
    query = f"?invitation={invitations.token_of(again)}"
    client, answer = sign_on_openid(email, subject=fresh_email(), invitation=invitations.token_of(again))
    form = {"email": fresh_email(), "organization": ""}
    assert "Sign-up is closed" in client.post(answer.url + query, form, follow=True).text
    assert not User.objects.filter(email=form["email"]).exists()


def test_a_member_connects_an_account_after_a_confirmation_and_disconnects_it(sign_on_either):
    user, client = MembershipFactory().user, conftest.browser()
    client.force_login(user)
    subject = fresh_email()
    _client, answer = sign_on_either("someone@else.example.com", client=client, subject=subject, process="connect")
    assert answer.url.startswith(reverse("account_reauthenticate"))
    assert not SocialAccount.objects.exists()
    client.post(answer.url, {"password": PASSWORD})
    account = SocialAccount.objects.get(user=user)
    assert "Disconnect" in client.get(reverse("socialaccount_connections")).content.decode()
    assert "Single sign-on" in client.get(reverse("security")).content.decode()
    other, _answer = sign_on_either("someone@else.example.com", subject=subject)
    assert logged_in_user(other) == user
    client.post(reverse("socialaccount_connections"), {"account": account.pk})
    assert not SocialAccount.objects.exists()


def test_single_sign_on_does_not_bypass_a_second_factor(sign_on_either):
    email = fresh_email()
    client, _answer = sign_on_either(email)
    user = logged_in_user(client)
    TOTP.activate(user, "JBSWY3DPEHPK3PXP")
    code = RecoveryCodes.activate(user).get_unused_codes()[0]
    assert Authenticator.objects.filter(user=user).count() == 2  # the app and the recovery codes
    client, answer = sign_on_either(email)
    assert answer.url == reverse("mfa_authenticate")
    assert logged_in_user(client) is None
    client.post(answer.url, {"code": code})
    assert logged_in_user(client) == user


def test_an_answer_without_the_consoles_state_and_a_foreign_next_page_are_refused(sign_on_openid):
    callback = reverse("openid_connect_callback", args=["acme"])
    client = Client()
    assert "failed" in client.get(f"{callback}?code=x&state=y").content.decode()
    assert logged_in_user(client) is None
    _client, answer = sign_on_openid(fresh_email(), next_page="https://evil.example.com/")
    assert answer.url == "/"
    assert Client().get(reverse("openid_connect_login", args=["unknown"])).status_code == 404


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("{}", "JSON list"),
        ('[{"id": "a"}]', "`name`"),
        ('[{"id": "A B", "name": "A", "server_url": "https://a", "client_id": "a", "client_secret": "s"}]', "`id`"),
        ('[{"id": "a", "name": "A", "server_url": "http://a", "client_id": "a", "client_secret": "s"}]', "https://"),
        (
            '[{"id": "a", "name": "A", "server_url": "https://a", "client_id": "a", "client_secret": "s", "x": 1}]',
            "`x`",
        ),
    ],
)
def test_an_invalid_provider_in_the_settings_stops_the_start(text, message):
    with pytest.raises(ImproperlyConfigured, match=message):
        sign_in.parse_oidc_providers(text)
