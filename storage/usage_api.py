"""API of storage usage, of the deletion of dataset versions, and of deleted items.

A deleted dataset version, model version or workspace can be restored for some days, or removed early.
"""

from __future__ import annotations

from typing import Any

from django.urls import path
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.accounts.models import Organization
from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from storage import retention, selectors
from storage.models import Allocation
from storage.selectors import Item
from storage.trees import ENTRY_BYTES


class DeletedSerializer(serializers.Serializer[Any]):
    """A deleted item. Until `kept_until` it can be restored, or removed early."""

    kind = serializers.ChoiceField(choices=tuple(selectors.KEPT_ITEMS_BY_KIND))
    id = serializers.IntegerField()
    name = serializers.CharField()
    size_bytes = serializers.IntegerField()
    entry_count = serializers.IntegerField(help_text="Files, links and folders.")
    deleted_at = serializers.DateTimeField()
    kept_until = serializers.DateTimeField()


class AllocationSerializer(serializers.ModelSerializer[Allocation]):
    """An upload in progress, or a run's results (`key` is `job:<id>`)."""

    name = serializers.CharField(source="label", read_only=True)

    class Meta:
        model = Allocation
        fields = ("kind", "key", "name", "size_bytes", "entry_count", "kept_until")


class LimitSerializer(serializers.Serializer[Any]):
    """How many objects of a kind the organization has, and how many it may have."""

    resource = serializers.ChoiceField(choices=("files", "datasets", "models", "workspaces"))
    count = serializers.IntegerField()
    max_count = serializers.IntegerField()


class UsageSerializer(serializers.Serializer[Any]):
    """Storage usage. `used_bytes`, which count against the quota, are `size_bytes` + `entry_count` x `entry_bytes`."""

    quota_bytes = serializers.IntegerField()
    used_bytes = serializers.IntegerField()
    left_bytes = serializers.IntegerField()
    size_bytes = serializers.IntegerField()
    entry_count = serializers.IntegerField()
    entry_bytes = serializers.IntegerField()
    limits = LimitSerializer(many=True)
    deleted = DeletedSerializer(many=True)
    allocations = AllocationSerializer(many=True)


def usage_data(organization: Organization) -> dict[str, Any]:
    """Return the data of an organization's usage for UsageSerializer."""
    usage = selectors.usage(organization)
    return {
        "quota_bytes": organization.quota.max_storage_bytes,
        "used_bytes": usage.counted_bytes,
        "left_bytes": max(0, organization.quota.max_storage_bytes - usage.counted_bytes),
        "size_bytes": usage.size_bytes,
        "entry_count": usage.entry_count,
        "entry_bytes": ENTRY_BYTES,
        "limits": selectors.limits(organization, usage),
        "deleted": [_deleted_data(item) for item in selectors.deleted(organization)],
        "allocations": selectors.allocations(organization),
    }


class DeletedView(TenantView):
    """A deleted item."""

    capabilities = {"DELETE": Capability.STORE}

    @extend_schema(operation_id="storage_remove", responses={204: None})
    def delete(self, _request: Request, kind: str, pk: int) -> Response:
        """Remove the files of the item now."""
        retention.remove(item=selectors.deleted_item(self.organization, kind, pk), user=self.membership.user)
        return Response(status=204)


class RestoreView(TenantView):
    """Restoring a deleted item."""

    capabilities = {"POST": Capability.STORE}

    @extend_schema(operation_id="storage_restore", request=None, responses={204: None})
    def post(self, _request: Request, kind: str, pk: int) -> Response:
        """Restore the item under its name."""
        retention.restore(item=selectors.deleted_item(self.organization, kind, pk), user=self.membership.user)
        return Response(status=204)


class VersionView(TenantView):
    """One version of a dataset."""

    capabilities = {"DELETE": Capability.STORE}

    @extend_schema(operation_id="datasets_delete_version", responses={204: None})
    def delete(self, _request: Request, name: str, number: int) -> Response:
        """Delete the version. The newest remaining one becomes the dataset's latest."""
        dataset = selectors.dataset_named(self.organization, name)
        retention.delete_version(version=selectors.version_numbered(dataset, number), user=self.membership.user)
        return Response(status=204)


def _deleted_data(item: Item) -> dict[str, Any]:
    """Return the data of a deleted item for DeletedSerializer."""
    return {
        "kind": item.kind,
        "id": item.pk,
        "name": str(item),  # for a version: the name of its dataset or model, and its number
        "size_bytes": item.size_bytes,
        "entry_count": item.entry_count,
        "deleted_at": item.deleted_at,
        "kept_until": item.kept_until,
    }


urlpatterns = [
    path("storage/deleted/<str:kind>/<int:pk>/", DeletedView.as_view(), name="storage-deleted"),
    path("storage/deleted/<str:kind>/<int:pk>/restore/", RestoreView.as_view(), name="storage-restore"),
    path("datasets/<str:name>/versions/<int:number>/", VersionView.as_view(), name="dataset-version"),
]
