"""SAML in a real browser, for which the provider is another site: cookies and the content policy must let it log in."""

from __future__ import annotations

import copy
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from django.urls import reverse
from playwright.sync_api import expect

from console import sign_in
from tests import saml_idp
from tests.browser.conftest import LIVE_SERVER_MARKS
from tests.http_server import serving

pytestmark = [
    *LIVE_SERVER_MARKS,
    pytest.mark.skipif(shutil.which("xmlsec1") is None, reason="No xmlsec1 to sign with: apt-get install xmlsec1."),
]
EMAIL = "ada@example.com"
FORM = """<!doctype html><title>Acme</title><link rel="icon" href="data:,">
<form method="post" action="{acs}"><input type="hidden" name="SAMLResponse" value="{response}"></form>
<script>document.forms[0].submit()</script>"""


class Handler(BaseHTTPRequestHandler):
    """Logs everyone in as EMAIL at once."""

    def do_GET(self):
        idp = self.server.idp
        request = idp.read_request(self.path)
        response = saml_idp.encode(idp.answer(request, email=EMAIL, subject="ada"))
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(FORM.format(acs=request.assertion_consumer_service_url, response=response).encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def provider(tmp_path):
    """A provider on `localhost`, which for browsers is another site than the console's 127.0.0.1."""
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        server.url = f"http://localhost:{server.server_port}/sso"
        server.idp = saml_idp.IdentityProvider(tmp_path, server.url)
        yield server


def test_a_person_logs_in_at_the_provider(transactional_db, console, provider, strict_window, settings):
    page = strict_window.page
    saml_idp.configure(settings, provider.idp.certificate, console, sso_url=provider.url)
    policy = copy.deepcopy(settings.CONTENT_SECURITY_POLICY)  # made at startup, so without this provider
    policy["DIRECTIVES"]["form-action"] += sign_in.origins(settings.SAML_PROVIDERS)
    settings.CONTENT_SECURITY_POLICY = policy
    provider.idp.read_metadata(page.request.get(f"{console}{reverse('saml_metadata', args=['acme'])}").text())
    page.goto(f"{console}/accounts/login/?next=/security/")
    page.get_by_role("button", name="Continue with Acme").click()
    page.wait_for_url(f"{console}/security/")
    expect(page.get_by_role("heading", name="Single sign-on")).to_be_visible()
