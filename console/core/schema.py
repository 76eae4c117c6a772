"""The parts of the OpenAPI schema that all operations share: authentication and errors."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy as _
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import inline_serializer
from rest_framework import serializers


class ErrorSerializer(serializers.Serializer[Any]):
    """The body of every error response."""

    code = serializers.SlugField(help_text=_("Stable error code for programs."))
    message = serializers.CharField(help_text=_("What happened and how to fix it, in the language of the request."))
    fields = serializers.DictField(  # type: ignore[assignment]  # DRF has an attribute `fields`, too
        child=serializers.CharField(), required=False, help_text=_("Errors by field.")
    )


class TokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # defining the class registers it
    """`Authorization: Token ty_...`."""

    target_class = "console.accounts.authentication.TokenAuthentication"
    name = "token"

    def get_security_definition(self, auto_schema: AutoSchema) -> dict[str, str]:
        """Return the security scheme."""
        description = "An API token of a member: `Authorization: Token ty_...`"
        return {"type": "apiKey", "in": "header", "name": "Authorization", "description": description}


class ClientTokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # as above
    """`Authorization: Bearer ...` of an OpenID client."""

    target_class = "console.accounts.authentication.ClientTokenAuthentication"
    name = "openid"

    def get_security_definition(self, auto_schema: AutoSchema) -> dict[str, str]:
        """Return the security scheme."""
        description = "An access token of an OpenID client with the scope `notebooks`: `Authorization: Bearer ...`"
        return {"type": "http", "scheme": "bearer", "description": description}


class Schema(AutoSchema):
    """Describes the error responses of every operation, which drf-spectacular cannot infer from a view."""

    def _get_response_bodies(self, direction: Any = "response") -> dict[str, Any]:
        """Return the operation's responses by status, errors included."""
        bodies: dict[str, Any] = super()._get_response_bodies(direction)
        if direction == "response":
            for codes in ("4XX", "5XX"):
                bodies[codes] = self._get_response_for_code(ErrorSerializer, codes, direction=direction)  # type: ignore[no-untyped-call]
        return bodies


def results_of(serializer: type[serializers.BaseSerializer[Any]]) -> serializers.Serializer[Any]:
    """Return a serializer for the response `{"results": [...]}`, a list that is not divided into pages."""
    name = f"{serializer.__name__.removesuffix('Serializer')}List"
    return inline_serializer(name=name, fields={"results": serializer(many=True)})
