"""Browsers behind a trusted proxy, and log-ins at a SAML identity provider, which is another project's code."""

import shutil
from uuid import uuid4

import pytest
from django.test import Client
from django.urls import reverse

from console.accounts.models import User
from console.observability.addresses import parse_networks
from tests import saml_idp

CONSOLE = "http://testserver"
PROXY = "10.0.0.1"
NEEDS_XMLSEC = pytest.mark.skipif(
    shutil.which("xmlsec1") is None, reason="The SAML provider signs by xmlsec1: apt-get install xmlsec1."
)


@pytest.fixture
def proxied(settings):
    """Let the console trust PROXY, from which requests with `forwarded_for` come."""
    settings.TRUSTED_PROXIES = parse_networks([PROXY])


def forwarded_for(address):
    """Return the options of a request that PROXY forwards with this X-Forwarded-For header."""
    return {"REMOTE_ADDR": PROXY, "headers": {"x-forwarded-for": address}}


@pytest.fixture(scope="session")
def saml_providers(tmp_path_factory):
    """Two identity providers with the same name: the one that the console trusts, and one with another key."""
    return [saml_idp.IdentityProvider(tmp_path_factory.mktemp("saml")) for _ in range(2)]


@pytest.fixture
def idp(settings, saml_providers):
    """The provider that the console trusts. Both providers have read the console's metadata."""
    idp = saml_providers[0]
    saml_idp.configure(settings, idp.certificate, CONSOLE)
    if not idp.knows_console:
        metadata = browser().get(reverse("saml_metadata", args=["acme"])).content.decode()
        assert "validUntil" not in metadata  # a provider reads it once, so it must not expire
        assert "SingleLogoutService" not in metadata
        for each in saml_providers:
            each.read_metadata(metadata)
    return idp


def browser():
    return Client(headers={"host": "testserver"})  # allauth asks for this header, which Client leaves out


def fresh_email(domain="example.com"):
    return f"{uuid4().hex}@{domain}"


def start_log_in(idp, client, *, process="login", next_page=""):
    """Press the provider's button. Return the request that the browser brings there."""
    answer = client.post(f"{reverse('saml_login', args=['acme'])}?process={process}&next={next_page}")
    assert answer.status_code == 302, answer.content.decode()[-2000:]
    assert answer.url.startswith(f"{saml_idp.SSO_URL}?SAMLRequest=")
    return idp.read_request(answer.url)


def deliver(client, xml, **fields):
    """Post a response of the provider to the console, and return the answer of the page that checks it."""
    form = {"SAMLResponse": saml_idp.encode(xml), "RelayState": ""} | fields
    received = client.post(reverse("saml_acs", args=["acme"]), form)
    assert received.status_code == 302, received.content.decode()[-2000:]
    return client.get(received.url)


def sign_on(idp, email, *, client=None, subject=None, process="login", next_page="", **changes):
    """Go to the provider, log in there as `subject` and come back. Return the browser and the console's answer."""
    client = client or browser()
    request = start_log_in(idp, client, process=process, next_page=next_page)
    return client, deliver(client, idp.answer(request, email=email, subject=subject or email, **changes))


def logged_in_user(client):
    return User.objects.filter(pk=client.session.get("_auth_user_id")).first()
