"""The console as an OpenID provider: consent, what a client learns about a person, and what its tokens cannot do."""

import base64
import hashlib
import html
import json
import re
from urllib.parse import parse_qsl, urlencode, urlsplit

import jwt
import pytest
from allauth.account.models import EmailAddress
from allauth.idp.oidc.models import Client as OpenIDClient
from django.core.exceptions import ImproperlyConfigured
from django.test import Client
from django.urls import reverse

from console import sign_in
from console.accounts.models import AuditEvent
from console.accounts.openid import SCOPES, is_redirect_uri
from console.accounts.roles import Role
from tests.console.test_request_matrix import ROUTES
from tests.factories.accounts import PASSWORD, MembershipFactory, logged_in
from tests.factories.notebooks import notebook_form

pytestmark = pytest.mark.django_db
HUB = "https://hub.example.com/hub/oauth_callback"
VERIFIER = "v" * 64
CHALLENGE = base64.urlsafe_b64encode(hashlib.sha256(VERIFIER.encode()).digest()).decode().rstrip("=")
SECRET = "the secret of the hub"
TOKEN_URL, USERINFO_URL = "/identity/o/api/token", "/identity/o/api/userinfo"


@pytest.fixture
def hub():
    """A client of the console, a JupyterHub, as an administrator registers it."""
    hub = OpenIDClient(name="Hub", redirect_uris=HUB, scopes="\n".join(SCOPES))
    hub.set_grant_types(["authorization_code", "refresh_token"])
    hub.set_secret(SECRET)
    hub.save()
    return hub


@pytest.fixture
def browser(owner):
    """The test client in which the owner is logged in."""
    return logged_in(owner.user)


def authorization_url(hub, **changes):
    asked = {
        "client_id": hub.pk, "redirect_uri": HUB, "response_type": "code", "scope": " ".join(SCOPES),
        "state": "a state", "code_challenge": CHALLENGE, "code_challenge_method": "S256",
    } | changes  # fmt: skip
    return f"/identity/o/authorize?{urlencode({name: value for name, value in asked.items() if value is not None})}"


def consent(browser, hub, action="grant", **changes):
    """Answer the consent page. Return the parameters with which the browser goes back to the client."""
    page = browser.get(authorization_url(hub, **changes))
    assert page.status_code == 200, page.content.decode()
    fields = re.findall(r'<input type="hidden" name="(request|scopes)" value="([^"]*)"', page.content.decode())
    posted = {
        "request": html.unescape(dict(fields)["request"]),
        "scopes": [value for name, value in fields if name == "scopes"],
    }
    answer = browser.post("/identity/o/authorize", posted | {"action": action})
    assert answer["Location"].startswith(f"{HUB}?"), answer["Location"]
    return dict(parse_qsl(urlsplit(answer["Location"]).query))


def request_tokens(hub, **form):
    form = {"client_id": hub.pk, "client_secret": SECRET} | form
    return Client().post(TOKEN_URL, {name: value for name, value in form.items() if value is not None})


def log_in_to(browser, hub, **changes):
    """Log in to the client. Return the tokens that it got for the code."""
    code = consent(browser, hub, **changes)["code"]
    form = {"grant_type": "authorization_code", "code": code, "redirect_uri": HUB, "code_verifier": VERIFIER}
    return request_tokens(hub, **form).json()


def bearer(token, organization=None):
    headers = {"Authorization": f"Bearer {token}"}
    return headers | ({"Trainyard-Organization": organization} if organization else {})


def test_a_person_consents_and_the_client_learns_who_they_are(hub, browser, owner):
    EmailAddress.objects.create(user=owner.user, email=owner.user.email, verified=True, primary=True)
    assert Client().get(authorization_url(hub)).url.startswith(f"{reverse('account_login')}?next=")
    page = browser.get(authorization_url(hub))
    policy = dict(part.strip().partition(" ")[::2] for part in page["Content-Security-Policy"].split(";"))
    assert "https://hub.example.com" in policy["form-action"].split()
    assert "hub.example.com" not in browser.get("/")["Content-Security-Policy"]
    assert "Start, see and stop notebooks" in page.content.decode()
    assert consent(browser, hub, "cancel") == {"error": "access_denied", "state": "a state"}
    got = log_in_to(browser, hub, nonce="n")
    userinfo = Client().get(USERINFO_URL, headers=bearer(got["access_token"])).json()
    organization = owner.organization
    assert userinfo == {
        "sub": str(owner.user.pk), "email": owner.user.email, "email_verified": True,
        "organizations": [{"slug": organization.slug, "name": organization.name, "role": "owner"}],
    }  # fmt: skip
    configuration = Client().get("/.well-known/openid-configuration").json()
    keys = Client().get(urlsplit(configuration["jwks_uri"]).path).json()
    claims = jwt.decode(
        got["id_token"], jwt.PyJWKSet.from_dict(keys).keys[0], algorithms=["RS256"], audience=hub.pk,
        issuer=configuration["issuer"],
    )  # fmt: skip
    assert (claims["sub"], claims["nonce"]) == (userinfo["sub"], "n")
    assert AuditEvent.objects.get(action="account.client_authorized").target == "Hub"
    renewed = request_tokens(hub, grant_type="refresh_token", refresh_token=got["refresh_token"]).json()
    assert Client().get(USERINFO_URL, headers=bearer(renewed["access_token"])).status_code == 200


def test_a_request_that_the_client_would_not_send_gets_no_consent_page(hub, browser):
    for changes in (
        {"redirect_uri": f"{HUB}?next=x"},
        {"redirect_uri": f"{HUB}/"},
        {"redirect_uri": "https://x@hub.example.com/hub/oauth_callback"},
        {"redirect_uri": None},
        {"code_challenge": None},
        {"code_challenge_method": None},
        {"code_challenge_method": "plain"},
        {"prompt": "none"},  # asks that no page is shown
        {"client_id": "unknown"},
        {"response_type": "token"},
        {"response_type": "id_token", "nonce": "n"},
        {"scope": "openid manage"},
    ):
        answer = browser.get(authorization_url(hub, **changes))
        assert 'name="action"' not in answer.content.decode(), changes
        if answer.status_code == 302:  # back to the client's own address, with an error
            assert answer["Location"].startswith(f"{HUB}?error="), changes


def test_consent_cannot_be_given_by_another_page(hub, owner):
    checked = Client(enforce_csrf_checks=True)
    checked.force_login(owner.user)
    page = checked.get(authorization_url(hub)).content.decode()
    signed = html.unescape(re.search(r'name="request" value="([^"]*)"', page)[1])
    forged = {"request": signed, "scopes": "openid", "action": "grant"}  # all but the CSRF token
    assert checked.post("/identity/o/authorize", forged).status_code == 403
    assert Client().post("/identity/o/authorize", forged).url.startswith(reverse("account_login"))


def test_a_code_is_used_once_with_the_secret_and_the_verifier_and_the_device_flow_is_off(hub, browser):
    def statuses(times=1, **changes):
        code = consent(browser, hub)["code"]
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": HUB, "code_verifier": VERIFIER}
        return [request_tokens(hub, **form | changes).status_code for _ in range(times)]

    for changes in (
        {"code_verifier": None},
        {"code_verifier": "w" * 64},
        {"client_secret": "guessed"},
        {"client_secret": None},
        {"redirect_uri": f"{HUB}?next=x"},
        {"grant_type": "client_credentials"},
        {"grant_type": "password", "username": "a", "password": PASSWORD},
    ):
        assert 400 <= statuses(**changes)[0] < 500, changes
    assert statuses(times=2) == [200, 400]
    assert browser.get("/identity/o/device").status_code == 404
    assert Client().post("/identity/o/api/device/code", {"client_id": hub.pk}).status_code == 404


def test_a_token_reaches_notebooks_and_nothing_else(hub, browser, customer):
    browser.force_login(customer.membership.user)
    got = log_in_to(browser, hub)
    headers = bearer(got["access_token"])
    client = Client()
    asked = notebook_form(customer)
    quoted = client.post("/api/v1/notebooks/quotes/", asked, content_type="application/json", headers=headers)
    assert quoted.status_code == 201, quoted.content
    refused = set()
    for route, methods in ROUTES.items():  # every route of the API with its methods; public ones have none
        if not route.startswith("notebooks/"):
            path = f"/api/v1/{re.sub(r'<[^>]*>', '1', route)}"
            refused |= {client.generic(method, path, headers=headers).status_code for method in methods}
    assert refused <= {401, 404}  # 404: "1" is no valid argument of the route
    assert client.get("/tokens/", headers=headers).status_code == 302
    for wrong in (got["id_token"], got["refresh_token"], "ey.ey.ey", ""):
        assert client.get("/api/v1/notebooks/", headers=bearer(wrong)).status_code == 401
    narrow = log_in_to(browser, hub, scope="openid organizations")["access_token"]
    assert client.get("/api/v1/notebooks/", headers=bearer(narrow)).status_code == 403
    hub.scopes = "openid"  # as when an administrator withdraws the scope of notebooks
    hub.save()
    assert client.get("/api/v1/notebooks/", headers=headers).status_code == 403


def test_a_token_acts_in_an_organization_that_the_person_may_use_now(hub, browser, owner, stranger):
    token = log_in_to(browser, hub)["access_token"]

    def status(organization=None):
        return Client().get("/api/v1/notebooks/", headers=bearer(token, organization)).status_code

    second = MembershipFactory(user=owner.user, role=Role.BILLING)
    mine, other = owner.organization.slug, second.organization.slug
    # None: a person with several organizations must name one.
    assert [status(each) for each in (None, mine, other, stranger.organization.slug)] == [403, 200, 200, 403]
    refused = Client().post(
        "/api/v1/notebooks/quotes/", "{}", content_type="application/json", headers=bearer(token, other)
    )
    assert refused.status_code == 403  # the role *billing* may not run notebooks
    # Written to the row, because `set_second_factor_required` refuses an owner who has no second factor.
    owner.organization.requires_second_factor = True
    owner.organization.save()
    assert status(mine) == 403
    userinfo = Client().get(USERINFO_URL, headers=bearer(token)).json()
    assert [each["slug"] for each in userinfo["organizations"]] == [other]
    second.delete()
    assert status() == 403  # the only organization that is left requires a second factor
    owner.user.is_active = False
    owner.user.save()
    assert status(mine) == 401
    assert Client().get(USERINFO_URL, headers=bearer(token)).status_code == 401


def test_a_person_ends_an_access_and_a_new_password_ends_all(hub, browser, stranger):
    got, other = log_in_to(browser, hub), logged_in(stranger.user)
    end = reverse("security_end_client_access", args=[hub.pk])
    assert end not in other.get(reverse("security")).content.decode()
    other.post(end)  # must not end another person's access
    assert end in browser.get(reverse("security")).content.decode()
    assert Client().get(USERINFO_URL, headers=bearer(got["access_token"])).status_code == 200
    browser.post(end)
    assert Client().get(USERINFO_URL, headers=bearer(got["access_token"])).status_code == 401
    assert end not in browser.get(reverse("security")).content.decode()
    got = log_in_to(browser, hub)
    browser.post(
        reverse("account_change_password"),
        {"oldpassword": PASSWORD, "password1": "another horse 9", "password2": "another horse 9"},
    )
    assert Client().get(USERINFO_URL, headers=bearer(got["access_token"])).status_code == 401
    assert request_tokens(hub, grant_type="refresh_token", refresh_token=got["refresh_token"]).status_code == 400


def shown_secret(page):
    """Return the secret that a page of the administration shows after it was created."""
    return html.unescape(re.search(r"<code>([^<]+)</code>", page)[1])


def test_administrators_register_clients_with_exact_addresses(admin_client):
    add = reverse("admin:allauth_idp_oidc_client_add")
    form = {"name": "Hub", "redirect_uris": f"{HUB}\nhttps://*.example.com/", "scopes": ["notebooks"]}
    assert "complete https:// address" in admin_client.post(add, form).content.decode()
    page = admin_client.post(add, form | {"redirect_uris": HUB}, follow=True).content.decode()
    hub = OpenIDClient.objects.get()
    secret = shown_secret(page)
    assert hub.check_secret(secret)
    assert (hub.get_scopes(), hub.get_redirect_uris(), hub.type) == (
        ["openid", "notebooks"], [HUB], "confidential",
    )  # fmt: skip
    chosen = {"action": "replace_secret", "_selected_action": [hub.pk]}
    page = admin_client.post(reverse("admin:allauth_idp_oidc_client_changelist"), chosen, follow=True).content.decode()
    new_secret = shown_secret(page)
    hub.refresh_from_db()
    assert [hub.check_secret(each) for each in (secret, new_secret)] == [False, True]
    change = reverse("admin:allauth_idp_oidc_client_change", args=[hub.pk])
    assert new_secret not in admin_client.get(change).content.decode()


def test_a_redirect_uri_is_complete_and_encrypted():
    for address, is_good in {
        HUB: True,
        "http://127.0.0.1:8000/hub/oauth_callback": True,  # this machine needs no encryption
        "http://hub.example.com/": False,
        "https://*.example.com/": False,
        "https://a:b@example.com/": False,
        "https://example.com/#x": False,
        "https://example.com;script-src/x": False,
        "javascript:alert(1)": False,
        "org.example.app://x": False,
    }.items():
        assert is_redirect_uri(address) is is_good, address


def test_without_a_private_key_no_token_is_accepted_and_an_unreadable_key_stops_the_start(hub, browser, settings):
    token = log_in_to(browser, hub)["access_token"]
    settings.OPENID_PRIVATE_KEY = sign_in.parse_private_key("")
    assert Client().get("/api/v1/notebooks/", headers=bearer(token)).status_code == 401
    with pytest.raises(ImproperlyConfigured, match="no private key"):
        sign_in.parse_private_key(json.dumps({}))
