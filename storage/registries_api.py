"""API of the credentials of an organization's image registries. Passwords can be written, and never read."""

from __future__ import annotations

from typing import Any

from django.urls import path
from django.views.decorators.debug import sensitive_variables
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core.schema import results_of
from storage import registries
from storage.models import Registry


class RegistrySerializer(serializers.ModelSerializer[Registry]):
    """The credentials of a registry, without the password."""

    class Meta:
        model = Registry
        fields = ("host", "username", "created_at")


class CheckedRegistrySerializer(RegistrySerializer):
    """The answer to a PUT, which checks the credentials before it saves them."""

    warning = serializers.SerializerMethodField(
        help_text="Why the credentials could not be checked before they were saved. Else empty."
    )

    class Meta(RegistrySerializer.Meta):
        fields = (*RegistrySerializer.Meta.fields, "warning")  # type: ignore[assignment]  # one field more

    def get_warning(self, _registry: Registry) -> str:
        """Return the warning of the check."""
        return str(self.context["warning"])


class CredentialsSerializer(serializers.Serializer[Any]):
    """User name and password for a registry. `registries.save_registry` validates their length and characters.

    With an empty user name, images are pulled without credentials. An empty password is stored as such; null keeps the
    stored one.
    """

    username = serializers.CharField(default="", allow_blank=True)
    password = serializers.CharField(
        default=None,
        allow_null=True,
        allow_blank=True,
        trim_whitespace=False,
        write_only=True,
        # Clients cannot read the password, so they could not send it again with a new user name.
        help_text="Password or access token. Default: the stored one stays.",
    )


class RegistriesView(TenantView):
    """The organization's registries."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(operation_id="registries_list", responses=results_of(RegistrySerializer))
    def get(self, _request: Request) -> Response:
        """List the registries with stored credentials."""
        rows = registries.registries_for(self.organization)
        return Response({"results": RegistrySerializer(rows, many=True).data})


class RegistryView(TenantView):
    """The credentials of one registry."""

    capabilities = {"PUT": Capability.STORE, "DELETE": Capability.STORE}

    @extend_schema(operation_id="registries_write", request=CredentialsSerializer, responses=CheckedRegistrySerializer)
    @sensitive_variables("form")
    def put(self, request: Request, host: str) -> Response:
        """Check the credentials at the registry and store them. Refused if the registry does not accept them."""
        form = CredentialsSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        check = registries.check_registry(organization=self.organization, host=host, **form.validated_data)
        registry = registries.save_registry(
            organization=self.organization, host=host, user=self.membership.user, **form.validated_data
        )
        return Response(CheckedRegistrySerializer(registry, context={"warning": check.warning}).data)

    @extend_schema(operation_id="registries_delete", responses={204: None})
    def delete(self, _request: Request, host: str) -> Response:
        """Delete the credentials. Refused while an open job needs an image from this registry."""
        registry = registries.registry_named(self.organization, host)
        registries.delete_registry(registry=registry, user=self.membership.user)
        return Response(status=204)


urlpatterns = [
    path("registries/", RegistriesView.as_view(), name="api_registries"),
    path("registries/<str:host>/", RegistryView.as_view(), name="api_registry"),
]
