"""The addresses that a SAML identity provider uses: for its responses, and for the console's metadata."""

from __future__ import annotations

import logging

from allauth.core import ratelimit
from allauth.socialaccount.helpers import render_authentication_error
from allauth.socialaccount.providers.saml import views
from allauth.socialaccount.providers.saml.utils import build_saml_config, get_app_or_404
from allauth.socialaccount.sessions import LoginSession
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST
from lxml import etree
from onelogin.saml2.errors import OneLogin_Saml2_ValidationError
from onelogin.saml2.settings import OneLogin_Saml2_Settings
from onelogin.saml2.xmlparser import DTDForbidden, EntitiesForbidden

logger = logging.getLogger(__name__)
MAX_RESPONSE_BYTES = 256 * 1024
"""The largest form with a response. An assertion with a person's groups has some tens of KiB."""
RESPONSE_SECONDS = 300
"""How long a response is stored. Browsers follow the redirect at once; five minutes leave room for slow connections."""


@csrf_exempt
@require_POST
def receive_response(request: HttpRequest, organization_slug: str) -> HttpResponse:
    """Store a provider's response, and redirect to the page that checks it.

    A browser sends no session cookie with a form from the provider's site, but sends the cookie after the redirect.
    Everyone can post here. Therefore the number of responses, their size and how long they are stored are limited.
    """
    get_app_or_404(request, organization_slug)
    limited: HttpResponse | None = ratelimit.consume_or_429(request, action="saml_response")
    if limited is not None:
        return limited
    if len(request.body) > MAX_RESPONSE_BYTES:
        return HttpResponse(status=413)
    # allauth keeps the response in this session, which it finds on the request.
    LoginSession(request, "saml_acs_session", "saml-acs-session").store.set_expiry(RESPONSE_SECONDS)
    response: HttpResponse = views.acs(request, organization_slug=organization_slug)
    return response


@require_GET
def check_response(request: HttpRequest, organization_slug: str) -> HttpResponse:
    """Check the stored response and log the person in, or show the page of a failed log-in."""
    try:
        response: HttpResponse = views.finish_acs(request, organization_slug=organization_slug)
        return response
    except (etree.XMLSyntaxError, DTDForbidden, EntitiesForbidden, OneLogin_Saml2_ValidationError) as error:
        # The response is not XML, or is encrypted. allauth expects python3-saml to return such errors, but python3-saml
        # raises them.
        logger.warning("Rejected a response of the SAML provider %s: %s", organization_slug, error)
        provider = get_app_or_404(request, organization_slug).get_provider(request)
        page: HttpResponse = render_authentication_error(request, provider)
        return page


@require_GET
def metadata(request: HttpRequest, organization_slug: str) -> HttpResponse:
    """Return the console's metadata as a service provider. It never expires: some providers read it only once."""
    app = get_app_or_404(request, organization_slug)
    config = build_saml_config(request, app.settings, organization_slug)
    del config["sp"]["singleLogoutService"]  # see `log_out`
    config["security"] |= {"metadataValidUntil": "", "metadataCacheDuration": ""}
    settings = OneLogin_Saml2_Settings(settings=config, sp_validation_only=True)
    return HttpResponse(settings.get_sp_metadata(), content_type="application/samlmetadata+xml")


def log_out(request: HttpRequest, organization_slug: str) -> HttpResponse:
    """Answer 404: the console offers no single log-out.

    allauth accepts unsigned requests to log out, so any page could log people out. The route must exist all the same,
    because allauth looks up its URL by name.
    """
    raise Http404
