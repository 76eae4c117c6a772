"""API of an organization's secrets. Values can be written, and never read."""

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
from storage import secret_store
from storage.models import Secret


class SecretSerializer(serializers.ModelSerializer[Secret]):
    """A secret, without its value."""

    class Meta:
        model = Secret
        fields = ("name", "created_at", "updated_at")


class SecretValueSerializer(serializers.Serializer[Any]):
    """The value of a secret. The service validates it."""

    value = serializers.CharField(write_only=True, trim_whitespace=False, allow_blank=True)


class SecretsView(TenantView):
    """The organization's secrets."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(operation_id="secrets_list", responses=results_of(SecretSerializer))
    def get(self, _request: Request) -> Response:
        """List the names of the secrets."""
        secrets = secret_store.secrets_for(self.organization)
        return Response({"results": SecretSerializer(secrets, many=True).data})


class SecretView(TenantView):
    """One secret."""

    capabilities = {"PUT": Capability.STORE, "DELETE": Capability.STORE}

    @extend_schema(
        operation_id="secrets_write",
        request=SecretValueSerializer,
        responses={201: SecretSerializer, 200: SecretSerializer},
    )
    @sensitive_variables("form")
    def put(self, request: Request, name: str) -> Response:
        """Create a secret (201) or replace its value (200). Open jobs get it at their next attempt."""
        form = SecretValueSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        secret, created = secret_store.save_secret(
            organization=self.organization, name=name, user=self.membership.user, **form.validated_data
        )
        return Response(SecretSerializer(secret).data, status=201 if created else 200)

    @extend_schema(operation_id="secrets_delete", responses={204: None})
    def delete(self, _request: Request, name: str) -> Response:
        """Delete a secret. Refused while an open job needs it."""
        secret = secret_store.secret_named(self.organization, name)
        secret_store.delete_secret(secret=secret, user=self.membership.user)
        return Response(status=204)


urlpatterns = [
    path("secrets/", SecretsView.as_view(), name="api_secrets"),
    path("secrets/<str:name>", SecretView.as_view(), name="api_secret"),
]
