"""The API of accounts: who asks, API tokens, the organization and its members. Services do the work."""

from __future__ import annotations

from typing import Any, ClassVar

from django.shortcuts import get_object_or_404
from django.urls import path
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.accounts import selectors, services
from console.accounts.models import ApiToken, Membership, Organization
from console.accounts.permissions import TenantView
from console.accounts.roles import CAPABILITIES, Capability, Role

# --- Shapes -----------------------------------------------------------------------------------------------------------


class OrganizationSerializer(serializers.ModelSerializer[Organization]):
    """An organization; `service_active` says whether it may order."""

    service_active = serializers.SerializerMethodField()

    class Meta:
        model = Organization
        fields = ("id", "name", "slug", "created_at", "service_active")
        read_only_fields = ("slug", "created_at")

    def get_service_active(self, organization: Organization) -> bool:
        """Whether the distributed training service is active."""
        return services.is_active(organization)


class WhoAmISerializer(serializers.Serializer[Membership]):
    """Who asks, for which organization, and what that member may do."""

    email = serializers.EmailField(source="user.email")
    organization = OrganizationSerializer()
    role = serializers.ChoiceField(choices=Membership.Roles.choices)
    capabilities = serializers.SerializerMethodField()

    def get_capabilities(self, membership: Membership) -> list[str]:
        """The names of what the role allows."""
        return sorted(CAPABILITIES[Role(membership.role)])


class TokenSerializer(serializers.ModelSerializer[ApiToken]):
    """An API token, without its secret."""

    class Meta:
        model = ApiToken
        fields = ("id", "name", "prefix", "created_at", "last_used_at")
        read_only_fields = ("prefix", "created_at", "last_used_at")


class NewTokenSerializer(TokenSerializer):
    """An API token just made: the only time that its secret is shown."""

    secret = serializers.CharField(read_only=True)

    class Meta(TokenSerializer.Meta):
        fields = (*TokenSerializer.Meta.fields, "secret")  # type: ignore[assignment]  # one field more


class MemberSerializer(serializers.ModelSerializer[Membership]):
    """A member and their role."""

    email = serializers.EmailField(source="user.email", read_only=True)

    class Meta:
        model = Membership
        fields = ("id", "email", "role", "created_at")
        read_only_fields = ("created_at",)


class TokenListSerializer(serializers.Serializer[Any]):
    """Tokens, newest first."""

    results = TokenSerializer(many=True)


class MemberListSerializer(serializers.Serializer[Any]):
    """Members, oldest first."""

    results = MemberSerializer(many=True)


class NewMemberSerializer(serializers.Serializer[Any]):
    """Whom to add."""

    email = serializers.EmailField()
    role = serializers.ChoiceField(choices=Membership.Roles.choices, default=Role.MEMBER)


# --- Views ------------------------------------------------------------------------------------------------------------


class WhoAmIView(TenantView):
    """Who the request acts for."""

    capabilities: ClassVar = {"GET": Capability.VIEW}

    @extend_schema(operation_id="whoami", responses=WhoAmISerializer)
    def get(self, request: Request) -> Response:
        """The member who asks, with the organization and what the role allows."""
        return Response(WhoAmISerializer(self.membership).data)


class TokensView(TenantView):
    """The member's own API tokens."""

    capabilities: ClassVar = {"GET": Capability.VIEW, "POST": Capability.VIEW}

    @extend_schema(operation_id="tokens_list", responses=TokenListSerializer)
    def get(self, request: Request) -> Response:
        """The tokens that work, newest first."""
        return Response(TokenListSerializer({"results": selectors.tokens(membership=self.membership)}).data)

    @extend_schema(operation_id="tokens_create", request=TokenSerializer, responses={201: NewTokenSerializer})
    def post(self, request: Request) -> Response:
        """Make a token. Its secret is in this answer only."""
        shape = TokenSerializer(data=request.data)
        shape.is_valid(raise_exception=True)
        token, secret = services.create_token(membership=self.membership, name=shape.validated_data["name"])
        return Response({**TokenSerializer(token).data, "secret": secret}, status=201)


class TokenView(TenantView):
    """One of the member's own API tokens."""

    capabilities: ClassVar = {"DELETE": Capability.VIEW}

    @extend_schema(operation_id="tokens_revoke", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Revoke the token at once."""
        token = get_object_or_404(selectors.tokens(membership=self.membership), pk=pk)
        services.revoke_token(token=token, actor=self.membership.user)
        return Response(status=204)


class OrganizationView(TenantView):
    """The organization that the request acts for."""

    capabilities: ClassVar = {"GET": Capability.VIEW, "PATCH": Capability.MANAGE}

    @extend_schema(operation_id="organization_read", responses=OrganizationSerializer)
    def get(self, request: Request) -> Response:
        """The organization."""
        return Response(OrganizationSerializer(self.organization).data)

    @extend_schema(operation_id="organization_rename", request=OrganizationSerializer, responses=OrganizationSerializer)
    def patch(self, request: Request) -> Response:
        """Change the display name."""
        shape = OrganizationSerializer(data=request.data)
        shape.is_valid(raise_exception=True)
        renamed = services.rename_organization(
            organization=self.organization, name=shape.validated_data["name"], actor=self.membership.user
        )
        return Response(OrganizationSerializer(renamed).data)


class MembersView(TenantView):
    """The organization's members."""

    capabilities: ClassVar = {"GET": Capability.VIEW, "POST": Capability.MANAGE}

    @extend_schema(operation_id="members_list", responses=MemberListSerializer)
    def get(self, request: Request) -> Response:
        """Every member, oldest first."""
        return Response(MemberListSerializer({"results": selectors.members(organization=self.organization)}).data)

    @extend_schema(operation_id="members_add", request=NewMemberSerializer, responses={201: MemberSerializer})
    def post(self, request: Request) -> Response:
        """Add a person who has signed up."""
        shape = NewMemberSerializer(data=request.data)
        shape.is_valid(raise_exception=True)
        added = services.add_member(organization=self.organization, actor=self.membership.user, **shape.validated_data)
        return Response(MemberSerializer(added).data, status=201)


class MemberView(TenantView):
    """One member."""

    capabilities: ClassVar = {"PATCH": Capability.MANAGE, "DELETE": Capability.MANAGE}

    @extend_schema(operation_id="members_change_role", request=MemberSerializer, responses=MemberSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Give the member another role."""
        shape = MemberSerializer(data=request.data)
        shape.is_valid(raise_exception=True)
        changed = services.change_role(
            membership=self._member(pk),
            role=shape.validated_data.get("role", ""),
            actor=self.membership.user,
        )
        return Response(MemberSerializer(changed).data)

    @extend_schema(operation_id="members_remove", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """End the membership, and its API tokens with it."""
        services.remove_member(membership=self._member(pk), actor=self.membership.user)
        return Response(status=204)

    def _member(self, pk: int) -> Membership:
        return get_object_or_404(selectors.members(organization=self.organization), pk=pk)


urlpatterns = [
    path("whoami/", WhoAmIView.as_view(), name="api_whoami"),
    path("tokens/", TokensView.as_view(), name="api_tokens"),
    path("tokens/<int:pk>/", TokenView.as_view(), name="api_token"),
    path("organization/", OrganizationView.as_view(), name="api_organization"),
    path("organization/members/", MembersView.as_view(), name="api_members"),
    path("organization/members/<int:pk>/", MemberView.as_view(), name="api_member"),
]
