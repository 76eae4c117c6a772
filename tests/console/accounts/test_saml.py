"""Single sign-on at a SAML identity provider, which is another project's code, and responses that an attacker sends."""

import json
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
from allauth.account.models import EmailAddress
from allauth.socialaccount.models import SocialAccount
from django.contrib.sessions.models import Session
from django.core.exceptions import ImproperlyConfigured
from django.urls import reverse
from django.utils import timezone

from console import sign_in
from console.accounts import sessions
from console.accounts.models import User
from tests import saml_idp
from tests.console.accounts.conftest import (
    CONSOLE,
    NEEDS_XMLSEC,
    browser,
    deliver,
    fresh_email,
    logged_in_user,
    sign_on,
    start_log_in,
)
from tests.factories.accounts import MembershipFactory

pytestmark = [pytest.mark.django_db, NEEDS_XMLSEC]
SHA1 = "http://www.w3.org/2000/09/xmldsig#rsa-sha1"
TRANSIENT = "urn:oasis:names:tc:SAML:2.0:nameid-format:transient"
ENTITY_BOMB = '<?xml version="1.0"?><!DOCTYPE r [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><r>&b;</r>'


def test_an_account_is_found_by_the_subject_alone_and_an_address_of_a_named_domain_is_verified(idp):
    user = MembershipFactory(user__email=fresh_email()).user
    EmailAddress.objects.create(user=user, email=user.email, verified=True, primary=True)
    client, answer = sign_on(idp, user.email)
    assert "connect Acme under Security" in client.get(answer.url).content.decode()
    assert logged_in_user(client) is None
    assert not SocialAccount.objects.exists()
    for domain in ("example.com", "trusted.example.com"):
        email = fresh_email(domain)
        sign_on(idp, email)
        assert EmailAddress.objects.get(email=email).verified is (domain == "trusted.example.com")
    assert set(SocialAccount.objects.values_list("provider", flat=True)) == {saml_idp.ENTITY_ID}


def without(path, name=None):
    """Return a function that removes an element of an assertion, or only its attribute `name`."""

    def change(assertion):
        element = assertion.find(path, saml_idp.NAMESPACES)
        if name:
            del element.attrib[name]
        else:
            element.getparent().remove(element)

    return change


DATA = ".//saml:SubjectConfirmationData"
PROFILE = {  # rules of the SAML profile that python3-saml does not check; the console does
    "without an audience": (without(".//saml:AudienceRestriction"), "names no audience"),
    "without a recipient": (without(DATA, "Recipient"), "lacks a recipient or an end"),
    "without an end": (without(DATA, "NotOnOrAfter"), "lacks a recipient or an end"),
    "for any request": (without(DATA, "InResponseTo"), "answers another request"),
    "no subject": (without(".//saml:NameID"), "names no subject"),
}
PLACES = ("before", "after", "inside", "extensions", "signature")
"""Where signature wrapping hides the signed assertion, beside a forged one that the console might read."""
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
    "for another browser": ("started no log-in", lambda idp, answer: answer(in_response_to="id-of-another")),
    "for no request": ("IdP initiated SSO rejected", lambda idp, answer: answer(in_response_to=None)),
    "assertion for no request, message for this browser's": (
        "answers another request",
        lambda idp, answer: answer(in_response_to=None).replace(" ID=", f' InResponseTo="{answer.request.id}" ID=', 1),
    ),
    "a subject that changes": ("NameID is transient", lambda idp, answer: answer(name_format=TRANSIENT)),
    "encrypted": ("No private key", lambda idp, answer: answer().replace("Assertion", "EncryptedAssertion")),
    "no XML": ("Start tag expected", lambda idp, answer: "hello"),
    "entities": ("DTDForbidden", lambda idp, answer: ENTITY_BOMB),
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
"""Each case: the reason in the log, and a function that makes the response. `answer(...)` makes a valid one."""


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_response_logs_nobody_in(idp, case, caplog):
    (reason, make), client = HOSTILE[case], browser()
    request = start_log_in(idp, client)

    def answer(**changes):
        return idp.answer(request, **{"email": "victim@example.com", "subject": "victim"} | changes)

    answer.request = request
    refused = deliver(client, make(idp, answer))
    assert refused.status_code == 401, refused.content.decode()[-500:]
    assert "failed" in refused.content.decode()
    assert reason in caplog.text
    assert logged_in_user(client) is None
    assert not User.objects.filter(email__in=["victim@example.com", "thief@example.com"]).exists()
    assert not SocialAccount.objects.exists()


def test_a_re_signed_response_is_accepted_and_one_signed_with_another_key_refused(idp, saml_providers):
    """The cases of PROFILE are refused for their change, not because they were signed again."""
    client, email = browser(), fresh_email()
    xml = idp.answer(start_log_in(idp, client), email=email, subject=email)
    deliver(client, idp.sign_changed(xml, lambda assertion: None))
    assert logged_in_user(client).email == email
    client, answer = sign_on(saml_providers[1], fresh_email())
    assert (answer.status_code, logged_in_user(client)) == (401, None)


def test_a_response_is_used_once_and_by_the_browser_that_asked(idp):
    client, thief = browser(), browser()
    request = start_log_in(idp, client)
    start_log_in(idp, thief)
    xml = idp.answer(request, email=fresh_email(), subject="u-3")
    deliver(client, xml)
    assert logged_in_user(client)
    client.logout()
    for each in (client, thief):
        assert deliver(each, xml).status_code == 401
        assert logged_in_user(each) is None
    # A response is stored in a session of its own, until it is checked.
    assert not Session.objects.filter(pk__in=[c.cookies["saml-acs-session"].value for c in (client, thief)]).exists()


def test_a_log_in_that_the_provider_starts_works_once_if_it_is_allowed(idp, settings):
    saml_idp.configure(settings, idp.certificate, CONSOLE, allow_idp_initiated=True)
    # There is no request. The provider knows these addresses from the console's metadata.
    request = SimpleNamespace(
        id=None,
        assertion_consumer_service_url=f"{CONSOLE}{reverse('saml_acs', args=['acme'])}",
        issuer=SimpleNamespace(text=f"{CONSOLE}{reverse('saml_metadata', args=['acme'])}"),
    )
    email = fresh_email()
    xml = idp.answer(request, email=email, subject=email)
    client, thief = browser(), browser()
    assert deliver(client, xml, RelayState="https://evil.example.com/").url == "/"
    assert logged_in_user(client).email == email
    assert deliver(thief, xml).status_code == 401
    assert logged_in_user(thief) is None
    # A stolen answer to a request must not pass as one that the provider started.
    stolen = idp.answer(start_log_in(idp, browser()), email=email, subject=email)
    answered = f' InResponseTo="{idp.read_id(stolen)}"'
    assert deliver(thief, stolen.replace(answered, "", 1)).status_code == 401


@pytest.mark.usefixtures("idp")
def test_the_url_for_responses_limits_what_it_stores_and_there_is_no_single_log_out(settings):
    client, address = browser(), reverse("saml_acs", args=["acme"])
    assert client.get(address).status_code == 405
    assert client.post(reverse("saml_acs", args=["unknown"])).status_code == 404
    assert client.post(address, {"SAMLResponse": "x" * 300_000}).status_code == 413  # the limit is 256 KiB
    assert not Session.objects.exists()
    assert client.get(reverse("saml_sls", args=["acme"])).status_code == 404
    settings.ACCOUNT_RATE_LIMITS = {"saml_response": "1/m/ip"}
    assert [client.post(address, {"SAMLResponse": "x"}).status_code for _ in range(2)] == [302, 429]
    stored = Session.objects.get()
    assert stored.expire_date <= timezone.now() + timedelta(minutes=5)
    Session.objects.update(expire_date=timezone.now())
    sessions.clear_expired()
    assert not Session.objects.exists()


VALID_SETTING = {"id": "a", "name": "A", "entity_id": "https://a", "sso_url": "https://a/sso", "certificate": "x"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "`name`"),
        ({"entity_id": "acme"}, "URI"),
        ({"entity_id": f"https://{'a' * 200}"}, "200 characters"),
        ({"sso_url": "http://a/sso"}, "https://"),
        ({"sso_url": "https://[a/sso"}, "is not a URL"),
        ({"certificate": "MIIB"}, "no X.509 certificate"),
        ({"allow_idp_initiated": "yes"}, "true or false"),
        ({"metadata_url": "https://a"}, "`metadata_url` is not known"),
    ],
)
def test_an_invalid_provider_in_the_settings_stops_the_start(fields, message):
    with pytest.raises(ImproperlyConfigured, match=message):
        sign_in.parse_saml_providers(json.dumps([VALID_SETTING | fields]), console_url=CONSOLE)


def test_the_start_says_what_to_install_and_the_content_policy_gets_the_providers_origin(idp, settings, monkeypatch):
    assert sign_in.origins(settings.SAML_PROVIDERS) == ["https://idp.example.com"]
    monkeypatch.setitem(sys.modules, sign_in.SAML_MODULE, None)  # it cannot be imported, as if it were not installed
    with pytest.raises(ImproperlyConfigured, match="Install them"):
        saml_idp.configure(settings, idp.certificate, CONSOLE)
