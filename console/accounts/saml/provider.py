"""The provider of allauth for SAML, with the checks of `assertions`. allauth finds it by the name of this module."""

from __future__ import annotations

import logging
from typing import Any

from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.helpers import render_authentication_error
from allauth.socialaccount.providers.saml.provider import SAMLProvider
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from onelogin.saml2.auth import OneLogin_Saml2_Auth

from console.accounts.saml import assertions

logger = logging.getLogger(__name__)


class Provider(SAMLProvider):  # type: ignore[misc]  # allauth publishes no types
    """One SAML identity provider of SAML_PROVIDERS."""

    def sociallogin_from_response(self, request: HttpRequest, response: OneLogin_Saml2_Auth) -> Any:
        """Return the log-in of a response that python3-saml found valid.

        Raises ImmediateHttpResponse with the page of a failed log-in if the assertion breaks a further rule.
        """
        try:
            assertions.require_profile(response)
            assertions.require_lasting_subject(response, subject=self.extract_uid(response))
            assertions.require_first_use(response, issuer=self.sub_id)  # the provider's entity ID
        except assertions.InvalidAssertion as error:
            logger.warning("Rejected an assertion of the SAML provider %s: %s", self.app.client_id, error)
            raise ImmediateHttpResponse(render_authentication_error(request, self)) from None
        return super().sociallogin_from_response(request, response)

    def unstash_redirect_state(self, request: HttpRequest, state_id: str) -> Any:
        """Return what the console remembers of the log-in that it started.

        Raises ImmediateHttpResponse with the page of a failed log-in if this browser started none, or too long ago.
        """
        try:
            return super().unstash_redirect_state(request, state_id)
        except PermissionDenied:
            logger.warning(
                "Rejected a response of the SAML provider %s: this browser started no log-in, or too long ago.",
                self.app.client_id,
            )
            raise ImmediateHttpResponse(render_authentication_error(request, self)) from None


provider_classes = [Provider]  # allauth reads this name
