"""The page on which a person lets a client of the OpenID provider log them in (`console.accounts.openid`).

allauth serves the protocol, but is less strict than this console. It accepts a redirect URI with additional parameters,
or with another port if it leads to the person's own machine (127.0.0.1). It accepts requests without PKCE. With
`prompt=none` it skips the consent to a client if the person has trusted another client. The view refuses such requests
before allauth handles them.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from allauth.idp.oidc import views
from allauth.idp.oidc.models import Client
from django.conf import settings
from django.core.exceptions import BadRequest
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import include, path

from console.accounts.audit import record_for_person
from console.accounts.models import User
from console.content_security import FORM_TARGET


class AuthorizationView(views.AuthorizationView):  # type: ignore[misc]  # allauth publishes no types
    """Asks for consent each time, and requires an exact redirect URI and PKCE."""

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Return the log-in page, the consent page, or an error. Raises BadRequest."""
        _check_request(request)
        return super().get(request, *args, **kwargs)  # type: ignore[no-any-return]

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """Return the template's context, and let the form redirect to the client (the CSP directive `form-action`)."""
        context: dict[str, Any] = super().get_context_data(**kwargs)
        if self._request_info["redirect_uri"] not in context["client"].get_redirect_uris():
            # allauth parses the request on its own, and may have read another URI than `_check_request`.
            raise BadRequest("The redirect_uri is not registered for this client.")
        target = urlsplit(self._request_info["redirect_uri"])
        setattr(self.request, FORM_TARGET, f"{target.scheme}://{target.netloc}")
        return context | {"target": target.netloc}

    def form_valid(self, form: Any) -> HttpResponse:
        """Redirect to the client with a code, and record the consent."""
        response: HttpResponse = super().form_valid(form)
        if isinstance(self.request.user, User):
            client = Client.objects.get(pk=self._request_info["client_id"])
            record_for_person(user=self.request.user, action="client_authorized", target=client.name)
        return response


def _check_request(request: HttpRequest) -> None:
    """Raise BadRequest if this console refuses a request that allauth would accept. allauth refuses unknown clients."""
    parameters = request.GET
    client = Client.objects.filter(pk=parameters.get("client_id", "")).first()
    if client is None:
        return
    if parameters.get("redirect_uri") not in client.get_redirect_uris():
        raise BadRequest("The redirect_uri is not registered for this client.")
    if not parameters.get("code_challenge") or parameters.get("code_challenge_method") != "S256":
        raise BadRequest("This provider requires PKCE with the method S256.")
    if "none" in parameters.get("prompt", "").split() or client.skip_consent:
        raise BadRequest("This provider always asks for consent.")


def not_offered(_request: HttpRequest) -> HttpResponse:
    """Refuse the log-in by device code: no client gets this grant (`console.accounts.openid`)."""
    raise Http404


urlpatterns = (
    [
        path("identity/o/authorize", AuthorizationView.as_view()),
        path("identity/o/device", not_offered),
        path("identity/o/api/device/code", not_offered),
        path("", include("allauth.idp.urls")),
    ]
    if settings.OPENID_PRIVATE_KEY
    else []
)
"""Our paths come first, so that they replace allauth's. Without a key the provider is off."""
