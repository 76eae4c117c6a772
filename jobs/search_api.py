"""API of the search over all kinds of objects, which the command palette uses."""

from __future__ import annotations

from typing import Any

from django.urls import path
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core.schema import results_of
from jobs import quick_search


class HitSerializer(serializers.Serializer[Any]):
    """An object that matches the query."""

    kind = serializers.ChoiceField(["job", "dataset", "model", "workspace"])
    id = serializers.CharField(help_text="A job's number, or the name of another object, as in URLs.")
    title = serializers.CharField()
    detail = serializers.CharField(
        help_text="The state of a job, the beginning of another object's description.", allow_blank=True
    )


class SearchView(TenantView):
    """Search over jobs, datasets, models and workspaces."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(
        responses=results_of(HitSerializer),
        parameters=[OpenApiParameter("q", OpenApiTypes.STR, description="A part of a name, or a job's number.")],
    )
    def get(self, request: Request) -> Response:
        """Find objects by a part of their name, at most five of each kind."""
        hits = quick_search.search(self.organization, request.query_params.get("q", ""))
        return Response({"results": HitSerializer(hits, many=True).data})


urlpatterns = [path("search/", SearchView.as_view(), name="api_search")]
