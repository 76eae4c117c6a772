"""The Content-Security-Policy: strict for pages, looser for the admin, whose theme needs inline styles and `eval`."""

from __future__ import annotations

from csp.middleware import CSPMiddleware, PolicyParts
from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase

FORM_TARGET = "form_target"
"""The name of an attribute that a view sets on its request: an origin to which the page's forms may redirect too. It is
added to the directive `form-action`."""


class PolicyMiddleware(CSPMiddleware):
    """Sends CONTENT_SECURITY_POLICY. It is looser on the admin's pages, and on a page whose request has FORM_TARGET."""

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        """Return the response with its policy. An empty response, such as a redirect, needs none."""
        if isinstance(response, HttpResponse) and not response.content:
            return response
        return super().process_response(request, response)

    def get_policy_parts(
        self, request: HttpRequest, response: HttpResponseBase, report_only: bool = False
    ) -> PolicyParts:
        """Return the parts of a response's policy (the method of django-csp that subclasses override)."""
        parts = super().get_policy_parts(request, response, report_only)
        # django-csp adds the sources of `update` to those that the directives have.
        if request.resolver_match and "admin" in request.resolver_match.namespaces:
            parts.update = settings.ADMIN_POLICY_UPDATE
        elif target := getattr(request, FORM_TARGET, ""):
            parts.update = {"form-action": [target]}
        return parts
