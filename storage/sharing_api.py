"""API of shared and public datasets."""

from __future__ import annotations

from typing import Any

from django.urls import path
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from storage import selectors, sharing
from storage.api import DatasetSerializer
from storage.models import DatasetShare


class DatasetShareSerializer(serializers.ModelSerializer[DatasetShare]):
    """A share. `accepted_at` is null until the code was entered.

    It does not name the other organization: neither side learns the other's name from the console.
    """

    class Meta:
        model = DatasetShare
        fields = ("id", "label", "created_at", "expires_at", "accepted_at")


class DatasetSharesSerializer(serializers.Serializer[Any]):
    """The open shares of a dataset, newest first."""

    results = DatasetShareSerializer(many=True)


class NewDatasetShareSerializer(serializers.Serializer[Any]):
    """A share to create. The label is for the owner only."""

    label = serializers.CharField()  # type: ignore[assignment]  # this field hides DRF's attribute `label`


class CreatedDatasetShareSerializer(serializers.Serializer[Any]):
    """A new share with its code, which cannot be read again."""

    id = serializers.IntegerField()
    label = serializers.CharField()  # type: ignore[assignment]  # this field hides DRF's attribute `label`
    code = serializers.CharField()
    expires_at = serializers.DateTimeField()


class ShareCodeSerializer(serializers.Serializer[Any]):
    """The code of a share."""

    code = serializers.CharField()


class BorrowedSerializer(DatasetSerializer):
    """A dataset of another organization that you may read."""

    access = serializers.SerializerMethodField(help_text="`shared` or `public`.")

    class Meta(DatasetSerializer.Meta):
        fields = (*DatasetSerializer.Meta.fields, "access")  # type: ignore[assignment]  # one field more

    def get_access(self, dataset: Any) -> str:
        """Return `shared` or `public`."""
        return "shared" if dataset.rank == sharing.SHARED_RANK else "public"


class BorrowedListSerializer(serializers.Serializer[Any]):
    """The shared and public datasets, by name."""

    results = BorrowedSerializer(many=True)


class SharesView(TenantView):
    """The shares of a dataset."""

    capabilities = {"GET": Capability.VIEW, "POST": Capability.STORE}

    @extend_schema(operation_id="datasets_shares_list", responses=DatasetSharesSerializer)
    def get(self, _request: Request, name: str) -> Response:
        """List the shares that were accepted or can still be accepted."""
        shares = sharing.open_shares(selectors.dataset_named(self.organization, name))
        return Response({"results": DatasetShareSerializer(shares, many=True).data})

    @extend_schema(
        operation_id="datasets_shares_create",
        request=NewDatasetShareSerializer,
        responses={201: CreatedDatasetShareSerializer},
    )
    def post(self, request: Request, name: str) -> Response:
        """Create a code that lets another organization read the dataset."""
        dataset = selectors.dataset_named(self.organization, name)
        form = NewDatasetShareSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        share, code = sharing.create_share(dataset=dataset, user=self.membership.user, **form.validated_data)
        data = {"id": share.pk, "label": share.label, "code": code, "expires_at": share.expires_at}
        return Response(CreatedDatasetShareSerializer(data).data, status=201)


class ShareView(TenantView):
    """One share."""

    capabilities = {"DELETE": Capability.STORE}

    @extend_schema(operation_id="datasets_shares_revoke", responses={204: None})
    def delete(self, _request: Request, name: str, pk: int) -> Response:
        """Revoke the share. Runs that were already ordered continue."""
        share = sharing.share_of(selectors.dataset_named(self.organization, name), pk)
        sharing.revoke_share(share=share, user=self.membership.user)
        return Response(status=204)


class SharedDatasetsView(TenantView):
    """The datasets of other organizations that this one may read."""

    capabilities = {"GET": Capability.VIEW, "POST": Capability.STORE}

    @extend_schema(operation_id="shared_datasets_list", responses=BorrowedListSerializer)
    def get(self, _request: Request) -> Response:
        """List the shared and public datasets. Use their names in other requests like those of your own datasets."""
        datasets = sharing.borrowed_datasets(self.organization)
        return Response({"results": BorrowedSerializer(datasets, many=True).data})

    @extend_schema(
        operation_id="shared_datasets_accept", request=ShareCodeSerializer, responses={201: DatasetSerializer}
    )
    def post(self, request: Request) -> Response:
        """Enter the code of a share."""
        form = ShareCodeSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        dataset = sharing.accept_share(organization=self.organization, user=self.membership.user, **form.validated_data)
        return Response(DatasetSerializer(dataset).data, status=201)


class SharedDatasetView(TenantView):
    """A dataset that was shared with this organization."""

    capabilities = {"DELETE": Capability.STORE}

    @extend_schema(operation_id="shared_datasets_leave", responses={204: None})
    def delete(self, _request: Request, name: str) -> Response:
        """Leave the share: this organization can no longer read the dataset through it."""
        sharing.leave_share(organization=self.organization, user=self.membership.user, name=name)
        return Response(status=204)


urlpatterns = [
    path("datasets/<str:name>/shares/", SharesView.as_view(), name="dataset-shares"),
    path("datasets/<str:name>/shares/<int:pk>/", ShareView.as_view(), name="dataset-share"),
    path("shared-datasets/", SharedDatasetsView.as_view(), name="shared-datasets"),
    path("shared-datasets/<str:name>/", SharedDatasetView.as_view(), name="shared-dataset"),
]
