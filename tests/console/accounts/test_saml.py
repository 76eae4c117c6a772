"""Single sign-on against a SAML identity provider that others wrote, and what a hostile one or a thief may send."""

import json
import shutil
import sys
from datetime import timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest
from allauth.account.models import EmailAddress
from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
from allauth.mfa.totp.internal.auth import TOTP
from allauth.socialaccount.models import SocialAccount
from django.contrib.sessions.models import Session
from django.core.exceptions import ImproperlyConfigured
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from console import sign_in
from console.accounts import sessions
from console.accounts.models import User
from console.accounts.roles import Role
from tests import saml_idp
from tests.factories.accounts import MembershipFactory

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.skipif(
        shutil.which("xmlsec1") is None, reason="The SAML provider signs by xmlsec1: apt-get install xmlsec1."
    ),
]
CONSOLE = "http://testserver"
SHA1 = "http://www.w3.org/2000/09/xmldsig#rsa-sha1"
TRANSIENT = "urn:oasis:names:tc:SAML:2.0:nameid-format:transient"
BOMB = '<?xml version="1.0"?><!DOCTYPE r [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><r>&b;</r>'


@pytest.fixture(scope="module")
def providers(tmp_path_factory):
    """Two providers of one name: ours, and one with another key."""
    return [saml_idp.IdentityProvider(tmp_path_factory.mktemp("saml")) for _ in range(2)]


@pytest.fixture
def idp(settings, providers):
    idp = providers[0]
    saml_idp.configure(settings, idp.certificate, CONSOLE)
    if not idp.knows_console:
        metadata = browser().get(reverse("saml_metadata", args=["acme"])).content.decode()
        assert "validUntil" not in metadata
        assert "SingleLogoutService" not in metadata
        for each in providers:
            each.read_metadata(metadata)
    return idp


def browser():
    return Client(headers={"host": "testserver"})  # allauth asks for this header, which Client leaves out


def fresh_address(domain="example.com"):
    return f"{uuid4().hex}@{domain}"


def start(idp, client, *, process="login", next_page=""):
    """Press the provider's button. Return the request that the browser brings there."""
    answer = client.post(f"{reverse('saml_login', args=['acme'])}?process={process}&next={next_page}")
    assert answer.status_code == 302, answer.content.decode()[-2000:]
    assert answer.url.startswith(f"{saml_idp.SSO_URL}?SAMLRequest=")
    return idp.read_request(answer.url)


def deliver(client, xml, **fields):
    """Bring a response of the provider to the console, and follow it to the page that checks it."""
    form = {"SAMLResponse": saml_idp.encode(xml), "RelayState": ""} | fields
    received = client.post(reverse("saml_acs", args=["acme"]), form)
    assert received.status_code == 302, received.content.decode()[-2000:]
    return client.get(received.url)


def sign_on(idp, email, *, client=None, subject=None, process="login", next_page="", **changes):
    """Go to the provider, log in there as `subject` and come back. Return the browser and the console's answer."""
    client = client or browser()
    request = start(idp, client, process=process, next_page=next_page)
    return client, deliver(client, idp.answer(request, email=email, subject=subject or email, **changes))


def person(client):
    return User.objects.filter(pk=client.session.get("_auth_user_id")).first()


def test_a_stranger_gets_an_account_and_returns_to_it(idp):
    assert "Continue with Acme" in browser().get(reverse("account_login")).content.decode()
    email = fresh_address()
    client, answer = sign_on(idp, email, subject="u-1", next_page="/tokens/")
    assert answer.url == "/tokens/"
    user = person(client)
    assert (user.email, user.memberships.get().role) == (email, Role.OWNER)
    assert not user.has_usable_password()
    assert not EmailAddress.objects.get(user=user).verified
    renamed, _answer = sign_on(idp, fresh_address(), subject="u-1")
    assert person(renamed) == user
    assert SocialAccount.objects.get().provider == saml_idp.ENTITY_ID


def test_an_account_is_found_by_the_subject_alone_and_an_address_of_a_named_domain_is_verified(idp):
    user = MembershipFactory(user__email=fresh_address()).user
    EmailAddress.objects.create(user=user, email=user.email, verified=True, primary=True)
    client, answer = sign_on(idp, user.email)
    assert "connect Acme under Security" in client.get(answer.url).content.decode()
    assert person(client) is None
    assert not SocialAccount.objects.exists()
    email = fresh_address("trusted.example.com")
    sign_on(idp, email)
    assert EmailAddress.objects.get(email=email).verified


def test_single_sign_on_does_not_bypass_a_second_factor(idp):
    email = fresh_address()
    client, _answer = sign_on(idp, email)
    user = person(client)
    TOTP.activate(user, "JBSWY3DPEHPK3PXP")
    code = RecoveryCodes.activate(user).get_unused_codes()[0]
    client, answer = sign_on(idp, email)
    assert answer.url == reverse("mfa_authenticate")
    assert person(client) is None
    client.post(answer.url, {"code": code})
    assert person(client) == user


def without(path, name=None):
    """A change of an assertion: it loses an element, or an attribute of one."""

    def change(assertion):
        element = assertion.find(path, saml_idp.NAMESPACES)
        if name:
            del element.attrib[name]
        else:
            element.getparent().remove(element)

    return change


DATA = ".//saml:SubjectConfirmationData"
PROFILE = {  # what python3-saml lets pass
    "without an audience": (without(".//saml:AudienceRestriction"), "names no audience"),
    "without a recipient": (without(DATA, "Recipient"), "lacks a recipient or an end"),
    "without an end": (without(DATA, "NotOnOrAfter"), "lacks a recipient or an end"),
    "for any request": (without(DATA, "InResponseTo"), "answers another request"),
    "no subject": (without(".//saml:NameID"), "names no subject"),
}
PLACES = ("before", "after", "inside", "extensions", "signature")
HOSTILE = {
    "unsigned": ("not signed", lambda idp, answer: answer(sign_assertion=False)),
    "only the message signed": ("not signed", lambda idp, answer: answer(sign_assertion=False, sign_response=True)),
    "signed with SHA-1": ("Deprecated signature algorithm", lambda idp, answer: answer(sign_alg=SHA1)),
    "address changed": ("Signature validation failed", lambda idp, answer: answer().replace("victim@", "thief@")),
    "subject changed": ("Signature validation failed", lambda idp, answer: answer().replace(">victim<", ">thief<")),
    "for another console": (
        "not a valid audience",
        lambda idp, answer: answer(sp_entity_id="https://other.example.com"),
    ),
    "for another address": ("instead of", lambda idp, answer: answer(destination="https://other.example.com/")),
    "ended": ("expired", lambda idp, answer: answer(release_policy=saml_idp.ended_policy())),
    "of another issuer": ("Invalid issuer", lambda idp, answer: answer(issuer="https://other.example.com")),
    "for another browser": ("Nobody waits", lambda idp, answer: answer(in_response_to="id-of-another")),
    "for no request": ("IdP initiated SSO rejected", lambda idp, answer: answer(in_response_to=None)),
    "for no request, shown as for ours": (
        "answers another request",
        lambda idp, answer: answer(in_response_to=None).replace(" ID=", f' InResponseTo="{answer.request.id}" ID=', 1),
    ),
    "a subject that changes": ("NameID is transient", lambda idp, answer: answer(name_format=TRANSIENT)),
    "encrypted": ("No private key", lambda idp, answer: answer().replace("Assertion", "EncryptedAssertion")),
    "no XML": ("Start tag expected", lambda idp, answer: "hello"),
    "entities": ("DTDForbidden", lambda idp, answer: BOMB),
    **{
        name: (reason, lambda idp, answer, change=change: idp.sign_changed(answer(), change))
        for name, (change, reason) in PROFILE.items()
    },
    **{
        f"wrapped, {place}": (
            "must contain 1 assertion",
            lambda idp, answer, place=place: saml_idp.wrap(answer(), email="thief@example.com", place=place),
        )
        for place in PLACES
    },
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_response_logs_nobody_in(idp, case, caplog):
    (reason, make), client = HOSTILE[case], browser()
    request = start(idp, client)

    def answer(**changes):
        return idp.answer(request, **{"email": "victim@example.com", "subject": "victim"} | changes)

    answer.request = request
    refused = deliver(client, make(idp, answer))
    assert refused.status_code == 401, refused.content.decode()[-500:]
    assert "failed" in refused.content.decode()
    assert reason in caplog.text
    assert person(client) is None
    assert not User.objects.filter(email__in=["victim@example.com", "thief@example.com"]).exists()
    assert not SocialAccount.objects.exists()


def test_a_re_signed_response_is_accepted(idp):
    """What the table changes is why it is refused, not how its assertions are signed."""
    client, email = browser(), fresh_address()
    xml = idp.answer(start(idp, client), email=email, subject=email)
    deliver(client, idp.sign_changed(xml, lambda assertion: None))
    assert person(client).email == email


def test_the_response_of_a_provider_with_another_key_is_refused(idp, providers):
    client, answer = sign_on(providers[1], fresh_address())
    assert (answer.status_code, person(client)) == (401, None)


def test_a_response_is_used_once_and_by_the_browser_that_asked(idp):
    client, thief = browser(), browser()
    request = start(idp, client)
    start(idp, thief)
    xml = idp.answer(request, email=fresh_address(), subject="u-3")
    deliver(client, xml)
    assert person(client)
    client.logout()
    for each in (client, thief):
        assert deliver(each, xml).status_code == 401
        assert person(each) is None
    assert not Session.objects.filter(pk__in=[c.cookies["saml-acs-session"].value for c in (client, thief)]).exists()


def test_a_log_in_that_the_provider_starts_works_once_if_it_is_allowed(idp, settings):
    saml_idp.configure(settings, idp.certificate, CONSOLE, allow_idp_initiated=True)
    request = SimpleNamespace(
        id=None,
        assertion_consumer_service_url=f"{CONSOLE}{reverse('saml_acs', args=['acme'])}",
        issuer=SimpleNamespace(text=f"{CONSOLE}{reverse('saml_metadata', args=['acme'])}"),
    )
    email = fresh_address()
    xml = idp.answer(request, email=email, subject=email)
    client, thief = browser(), browser()
    assert deliver(client, xml, RelayState="https://evil.example.com/").url == "/"
    assert person(client).email == email
    assert deliver(thief, xml).status_code == 401
    assert person(thief) is None
    stolen = idp.answer(start(idp, browser()), email=email, subject=email)
    answered = f' InResponseTo="{idp.read_id(stolen)}"'
    assert deliver(thief, stolen.replace(answered, "", 1)).status_code == 401


def test_the_address_of_responses_limits_what_it_stores_and_there_is_no_single_log_out(idp, settings):
    client, address = browser(), reverse("saml_acs", args=["acme"])
    assert client.get(address).status_code == 405
    assert client.post(reverse("saml_acs", args=["unknown"])).status_code == 404
    assert client.post(address, {"SAMLResponse": "x" * 300_000}).status_code == 413
    assert not Session.objects.exists()
    assert client.get(reverse("saml_sls", args=["acme"])).status_code == 404
    settings.ACCOUNT_RATE_LIMITS = {"saml_response": "1/m/ip"}
    assert [client.post(address, {"SAMLResponse": "x"}).status_code for _ in range(2)] == [302, 429]
    stored = Session.objects.get()
    assert stored.expire_date <= timezone.now() + timedelta(minutes=5)
    Session.objects.update(expire_date=timezone.now())
    sessions.clear_expired()
    assert not Session.objects.exists()


GOOD = {"id": "a", "name": "A", "entity_id": "https://a", "sso_url": "https://a/sso", "certificate": "x"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "`name`"),
        ({"entity_id": "acme"}, "URI"),
        ({"entity_id": f"https://{'a' * 200}"}, "200 characters"),
        ({"sso_url": "http://a/sso"}, "https://"),
        ({"certificate": "MIIB"}, "no X.509 certificate"),
        ({"allow_idp_initiated": "yes"}, "true or false"),
        ({"metadata_url": "https://a"}, "`metadata_url` is not known"),
    ],
)
def test_a_wrong_setting_stops_the_start(fields, message):
    with pytest.raises(ImproperlyConfigured, match=message):
        sign_in.parse_saml_providers(json.dumps([GOOD | fields]), console_url=CONSOLE)


def test_the_start_says_what_to_install_and_the_form_may_lead_to_the_provider(idp, settings, monkeypatch):
    assert sign_in.origins(settings.SAML_PROVIDERS) == ["https://idp.example.com"]
    monkeypatch.setitem(sys.modules, sign_in.SAML_PACKAGE, None)
    with pytest.raises(ImproperlyConfigured, match="Install them"):
        saml_idp.configure(settings, idp.certificate, CONSOLE)
