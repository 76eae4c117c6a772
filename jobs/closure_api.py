"""API of the export and the closure of an organization."""

from __future__ import annotations

from typing import Any, ClassVar

from django.http import HttpResponseBase
from django.urls import path
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from billing import selectors as billing
from console.accounts.models import Organization
from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from jobs import account_exports, closure
from storage.downloads import download_archive


class ClosureSerializer(serializers.Serializer[Any]):
    """Whether an organization is being closed, and what would prevent it."""

    requested_at = serializers.DateTimeField(allow_null=True, help_text="Null: no closure was requested.")
    ends_at = serializers.DateTimeField(
        allow_null=True, help_text="When money is paid back and the data is deleted. Until then it can be withdrawn."
    )
    obstacles = serializers.ListField(child=serializers.CharField(), help_text="What must happen first.")
    payable_minor = serializers.IntegerField(help_text="Unspent money that was paid in and would be paid back.")
    currency = serializers.CharField()


class NewClosureSerializer(serializers.Serializer[Any]):
    """A request to close the organization."""

    confirmation = serializers.CharField(max_length=60, help_text="The short name of the organization.")


class ClosureView(TenantView):
    """The closure of the organization."""

    capabilities: ClassVar = {
        "GET": Capability.MANAGE,
        "POST": Capability.MANAGE,
        "DELETE": Capability.MANAGE,
    }

    @extend_schema(operation_id="closure_read", responses=ClosureSerializer)
    def get(self, request: Request) -> Response:
        """Return whether the organization is being closed, what would prevent it, and what would be paid back."""
        return Response(_data(self.organization))

    @extend_schema(operation_id="closure_request", request=NewClosureSerializer, responses={201: ClosureSerializer})
    def post(self, request: Request) -> Response:
        """Close the organization after the notice period. The service stops at once.

        Needs a session, or a token with all scopes.
        """
        serializer = NewClosureSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        closure.request(membership=self.membership, **serializer.validated_data)
        return Response(_data(self.organization), status=201)

    @extend_schema(operation_id="closure_withdraw", responses={204: None})
    def delete(self, request: Request) -> Response:
        """Keep the organization. Possible until the notice period is over."""
        closure.withdraw(membership=self.membership)
        return Response(status=204)


class ExportView(TenantView):
    """The archive of the organization."""

    capabilities: ClassVar = {"GET": Capability.MANAGE}

    @extend_schema(operation_id="organization_export", responses={(200, "application/zip"): OpenApiTypes.BINARY})
    def get(self, request: Request) -> HttpResponseBase:
        """Download everything kept about the organization but its files, as JSON and CSV. Secrets are left out."""
        chunks = account_exports.export_organization(membership=self.membership)
        return download_archive(
            request, chunks, name=f"trainyard-{self.organization.slug}.zip", content_type="application/zip"
        )


def _data(organization: Organization) -> dict[str, Any]:
    """Return the data of ClosureSerializer."""
    current_closure, account = closure.closure_of(organization), billing.wallet(organization)
    return {
        "requested_at": current_closure.requested_at if current_closure else None,
        "ends_at": current_closure.ends_at if current_closure else None,
        "obstacles": closure.obstacles(organization),
        "payable_minor": closure.payable_minor(organization),
        "currency": account.currency if account else billing.default_currency(),
    }


urlpatterns = [
    path("organization/closure/", ClosureView.as_view(), name="api_closure"),
    path("organization/export/", ExportView.as_view(), name="api_export"),
]
