"""The REST API of accounts: the current member, API tokens, the organization, members, invitations."""

from __future__ import annotations

from typing import ClassVar

from django.db import transaction
from django.shortcuts import get_object_or_404
from django.urls import path
from django.utils.translation import gettext as _
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.accounts import invitations, selectors, service_accounts, services
from console.accounts.models import ApiToken, Invitation, Membership, Organization, ServiceAccount
from console.accounts.permissions import TenantView
from console.accounts.roles import Capability, Role
from console.core.errors import InvalidInput, NotAllowed
from console.core.schema import results_of

# --- Serializers ------------------------------------------------------------------------------------------------------


class OrganizationSerializer(serializers.ModelSerializer[Organization]):
    """An organization; `service_active` says whether it may order."""

    service_active = serializers.SerializerMethodField()

    class Meta:
        model = Organization
        fields = ("id", "name", "slug", "created_at", "service_active", "requires_second_factor", "shell_enabled")
        read_only_fields = ("slug", "created_at")

    def get_service_active(self, organization: Organization) -> bool:
        """Whether the distributed training service is active."""
        return services.is_active(organization)


class WhoAmISerializer(serializers.Serializer[Membership]):
    """The current user, organization, role and capabilities."""

    email = serializers.EmailField(source="user.email")
    organization = OrganizationSerializer()
    role = serializers.ChoiceField(choices=Membership.Roles.choices)
    capabilities = serializers.SerializerMethodField()

    def get_capabilities(self, membership: Membership) -> list[str]:
        """The names of what the role, and the token if one is used, allows."""
        return sorted(capability for capability in Capability if membership.allows(capability))


class TokenSerializer(serializers.ModelSerializer[ApiToken]):
    """An API token, without its secret."""

    scopes = serializers.ListField(
        child=serializers.ChoiceField(choices=[capability.value for capability in Capability]),
        required=False,
        allow_null=True,
        default=None,
        help_text="What the token may do, besides reading (`view`). Null: all that the role allows, also later.",
    )
    days = serializers.IntegerField(
        min_value=1,
        max_value=services.MAX_TOKEN_DAYS,
        required=False,
        allow_null=True,
        default=None,
        write_only=True,
        help_text="The token expires after this many days. Null: never.",
    )

    class Meta:
        model = ApiToken
        fields = ("id", "name", "prefix", "scopes", "days", "expires_at", "created_at", "last_used_at")
        read_only_fields = ("prefix", "expires_at", "created_at", "last_used_at")


TOKENS_RESPONSE = results_of(TokenSerializer)
"""The documented response of both views that list tokens."""


class NewTokenSerializer(TokenSerializer):
    """A new API token, with its secret. The secret is never shown again."""

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


class InvitationSerializer(serializers.ModelSerializer[Invitation]):
    """An invitation. It does not reveal whether the address has an account."""

    role = serializers.ChoiceField(choices=Membership.Roles.choices, default=Role.MEMBER)
    invited_by = serializers.EmailField(source="invited_by.email", read_only=True, default=None, allow_null=True)
    is_expired = serializers.BooleanField(read_only=True)

    class Meta:
        model = Invitation
        fields = ("id", "email", "role", "invited_by", "created_at", "expires_at", "is_expired")
        read_only_fields = ("created_at", "expires_at")


class ServiceAccountSerializer(serializers.ModelSerializer[ServiceAccount]):
    """An account for programs. It acts with tokens and cannot log in."""

    role = serializers.ChoiceField(choices=[role.value for role in service_accounts.ROLES], source="membership.role")
    email = serializers.EmailField(
        source="membership.user.email", read_only=True, help_text="How jobs and the audit log name it."
    )
    is_disabled = serializers.SerializerMethodField()

    class Meta:
        model = ServiceAccount
        fields = ("id", "name", "email", "role", "is_disabled", "created_at")
        read_only_fields = ("created_at",)

    def get_is_disabled(self, account: ServiceAccount) -> bool:
        """Whether its tokens are refused."""
        return account.disabled_at is not None


class ServiceAccountChangeSerializer(serializers.Serializer[ServiceAccount]):
    """Changes of a service account."""

    role = serializers.ChoiceField(choices=[role.value for role in service_accounts.ROLES], required=False)
    is_disabled = serializers.BooleanField(required=False, help_text="Whether its tokens are refused.")


class NewServiceAccountSerializer(serializers.Serializer[ServiceAccount]):
    """A new service account."""

    name = serializers.CharField(max_length=40, help_text="Small letters, digits and dashes.")
    role = serializers.ChoiceField(choices=[role.value for role in service_accounts.ROLES], default=Role.MEMBER.value)


# --- Views ------------------------------------------------------------------------------------------------------------


def _require_within_scopes(actor: Membership, token: ApiToken) -> None:
    """Raise NotAllowed if the request uses a token that is limited to scopes, and `token` may do more."""
    scopes = token.scope_set()
    if actor.scopes is not None and (scopes is None or not scopes <= actor.scopes):
        raise NotAllowed


def _require_role_within_scopes(actor: Membership, role: str) -> None:
    """Raise NotAllowed if the request uses a token that is limited to scopes, and `role` allows more.

    `role` is the role of the member, invitation or service account that the request changes.
    """
    if not actor.may_grant(role):
        raise NotAllowed


def _grantable_role(actor: Membership, role: str) -> Role:
    """Return the role if it is valid and allows no more than the token of the request. Raises InvalidInput."""
    if not actor.may_grant(services.checked_role(role)):
        raise InvalidInput(fields={"role": _("Choose a role that the token that you use allows.")})
    return Role(role)


class WhoAmIView(TenantView):
    """The current member."""

    capabilities: ClassVar = {"GET": Capability.VIEW}

    @extend_schema(operation_id="whoami", responses=WhoAmISerializer)
    def get(self, request: Request) -> Response:
        """Return the current user, organization, role and capabilities."""
        return Response(WhoAmISerializer(self.membership).data)


class TokensView(TenantView):
    """The member's own API tokens."""

    # Every member may create tokens, because a token never allows more than the member's role.
    capabilities: ClassVar = {"GET": Capability.VIEW, "POST": Capability.VIEW}

    @extend_schema(operation_id="tokens_list", responses=TOKENS_RESPONSE)
    def get(self, request: Request) -> Response:
        """List the tokens that were not revoked, newest first, including expired ones."""
        tokens = selectors.tokens(membership=self.membership)
        return Response({"results": TokenSerializer(tokens, many=True).data})

    @extend_schema(operation_id="tokens_create", request=TokenSerializer, responses={201: NewTokenSerializer})
    def post(self, request: Request) -> Response:
        """Create a token. Its secret is in this response only.

        A token that a token creates may do no more and expires no later.
        """
        serializer = TokenSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        creating_token = request.auth if isinstance(request.auth, ApiToken) else None
        token, secret = services.create_token(
            membership=self.membership, creating_token=creating_token, **serializer.validated_data
        )
        return Response({**TokenSerializer(token).data, "secret": secret}, status=201)


class TokenView(TenantView):
    """One of the member's API tokens."""

    capabilities: ClassVar = {"DELETE": Capability.VIEW}

    @extend_schema(operation_id="tokens_revoke", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Revoke the token at once. A token can revoke itself and tokens that may do no more."""
        token = get_object_or_404(selectors.tokens(membership=self.membership), pk=pk)
        if token != request.auth:
            _require_within_scopes(self.membership, token)
        services.revoke_token(token=token, actor=self.membership.user)
        return Response(status=204)


class OrganizationView(TenantView):
    """The current organization."""

    capabilities: ClassVar = {"GET": Capability.VIEW, "PATCH": Capability.MANAGE}

    @extend_schema(operation_id="organization_read", responses=OrganizationSerializer)
    def get(self, request: Request) -> Response:
        """Return the organization."""
        return Response(OrganizationSerializer(self.organization).data)

    @extend_schema(operation_id="organization_change", request=OrganizationSerializer, responses=OrganizationSerializer)
    def patch(self, request: Request) -> Response:
        """Change the display name, whether members need a second factor, or whether they may open shells in nodes."""
        serializer = OrganizationSerializer(data=request.data, partial=True)
        serializer.is_valid(raise_exception=True)
        organization, actor, data = self.organization, self.membership.user, serializer.validated_data
        with transaction.atomic():
            if "name" in data:
                services.rename_organization(organization=organization, name=data["name"], actor=actor)
            if "requires_second_factor" in data:
                services.set_second_factor_required(
                    organization=organization, is_required=data["requires_second_factor"], actor=actor
                )
            if "shell_enabled" in data:
                services.set_shells_enabled(organization=organization, is_enabled=data["shell_enabled"], actor=actor)
        return Response(OrganizationSerializer(organization).data)


class MembersView(TenantView):
    """The organization's members."""

    capabilities: ClassVar = {"GET": Capability.VIEW}

    @extend_schema(operation_id="members_list", responses=results_of(MemberSerializer))
    def get(self, request: Request) -> Response:
        """List the members, oldest first."""
        members = selectors.members(organization=self.organization)
        return Response({"results": MemberSerializer(members, many=True).data})


class MemberView(TenantView):
    """One member."""

    capabilities: ClassVar = {"PATCH": Capability.MANAGE, "DELETE": Capability.MANAGE}

    @extend_schema(operation_id="members_change_role", request=MemberSerializer, responses=MemberSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Change the member's role. A token neither grants nor takes a role that may do more than the token."""
        serializer = MemberSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        # The serializer accepts a request without a role, because the model has a default. `checked_role` refuses "".
        role = _grantable_role(self.membership, serializer.validated_data.get("role", ""))
        membership = services.change_role(membership=self._get_changed(pk), role=role, actor=self.membership.user)
        return Response(MemberSerializer(membership).data)

    @extend_schema(operation_id="members_remove", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Remove the member and revoke their API tokens. A token removes only members who may do no more."""
        services.remove_member(membership=self._get_changed(pk), actor=self.membership.user)
        return Response(status=204)

    def _get_changed(self, pk: int) -> Membership:
        """Return the member that the request changes. Raises Http404, NotAllowed."""
        member = get_object_or_404(selectors.members(organization=self.organization), pk=pk)
        _require_role_within_scopes(self.membership, member.role)
        return member


class InvitationsView(TenantView):
    """The organization's open invitations."""

    capabilities: ClassVar = {"GET": Capability.MANAGE, "POST": Capability.MANAGE}

    @extend_schema(operation_id="invitations_list", responses=results_of(InvitationSerializer))
    def get(self, request: Request) -> Response:
        """List invitations that were not accepted, declined or revoked, newest first, including expired ones."""
        open_invitations = selectors.open_invitations(organization=self.organization)
        return Response({"results": InvitationSerializer(open_invitations, many=True).data})

    @extend_schema(
        operation_id="invitations_create", request=InvitationSerializer, responses={201: InvitationSerializer}
    )
    def post(self, request: Request) -> Response:
        """Invite an address by email. Accepting makes the person a member. Earlier invitations to it are revoked."""
        serializer = InvitationSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        _grantable_role(self.membership, serializer.validated_data["role"])
        invitation = invitations.invite(
            organization=self.organization, actor=self.membership.user, **serializer.validated_data
        )
        return Response(InvitationSerializer(invitation).data, status=201)


class InvitationView(TenantView):
    """One open invitation."""

    capabilities: ClassVar = {"DELETE": Capability.MANAGE}

    @extend_schema(operation_id="invitations_revoke", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Revoke the invitation; its link stops working. A token revokes only invitations to roles that do no more."""
        open_invitations = selectors.open_invitations(organization=self.organization)
        invitation = get_object_or_404(open_invitations, pk=pk)
        _require_role_within_scopes(self.membership, invitation.role)
        invitations.revoke(invitation=invitation, actor=self.membership.user)
        return Response(status=204)


class ServiceAccountsView(TenantView):
    """The organization's service accounts."""

    capabilities: ClassVar = {"GET": Capability.MANAGE, "POST": Capability.MANAGE}

    @extend_schema(operation_id="service_accounts_list", responses=results_of(ServiceAccountSerializer))
    def get(self, request: Request) -> Response:
        """List the service accounts by name."""
        accounts = selectors.service_accounts(organization=self.organization)
        return Response({"results": ServiceAccountSerializer(accounts, many=True).data})

    @extend_schema(
        operation_id="service_accounts_create",
        request=NewServiceAccountSerializer,
        responses={201: ServiceAccountSerializer},
    )
    def post(self, request: Request) -> Response:
        """Create a service account. Create its tokens next."""
        serializer = NewServiceAccountSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        account = service_accounts.create(actor=self.membership, **serializer.validated_data)
        return Response(ServiceAccountSerializer(account).data, status=201)


class _ServiceAccountBase(TenantView):
    def account(self, pk: int) -> ServiceAccount:
        return get_object_or_404(selectors.service_accounts(organization=self.organization), pk=pk)

    def changed_account(self, pk: int) -> ServiceAccount:
        """Return the account that the request changes. Raises Http404, NotAllowed."""
        account = self.account(pk)
        _require_role_within_scopes(self.membership, account.membership.role)
        return account


class ServiceAccountView(_ServiceAccountBase):
    """One service account."""

    capabilities: ClassVar = {"PATCH": Capability.MANAGE, "DELETE": Capability.MANAGE}

    @extend_schema(
        operation_id="service_accounts_change",
        request=ServiceAccountChangeSerializer,
        responses=ServiceAccountSerializer,
    )
    @transaction.atomic
    def patch(self, request: Request, pk: int) -> Response:
        """Change the role, disable the account, or enable it again. A token changes only accounts that do no more."""
        account = self.changed_account(pk)
        serializer = ServiceAccountChangeSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        if "role" in serializer.validated_data:
            service_accounts.change_role(account=account, actor=self.membership, role=serializer.validated_data["role"])
        if "is_disabled" in serializer.validated_data:
            service_accounts.set_disabled(
                account=account, actor=self.membership, is_disabled=serializer.validated_data["is_disabled"]
            )
        return Response(ServiceAccountSerializer(self.account(pk)).data)

    @extend_schema(operation_id="service_accounts_delete", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Delete the account and its tokens. Runs that it ordered continue.

        A token deletes only accounts that may do no more.
        """
        service_accounts.delete(account=self.changed_account(pk), actor=self.membership)
        return Response(status=204)


class ServiceAccountTokensView(_ServiceAccountBase):
    """The tokens of a service account."""

    capabilities: ClassVar = {"GET": Capability.MANAGE, "POST": Capability.MANAGE}

    @extend_schema(operation_id="service_account_tokens_list", responses=TOKENS_RESPONSE)
    def get(self, request: Request, pk: int) -> Response:
        """List the tokens that were not revoked, newest first, including expired ones."""
        tokens = selectors.tokens(membership=self.account(pk).membership)
        return Response({"results": TokenSerializer(tokens, many=True).data})

    @extend_schema(
        operation_id="service_account_tokens_create", request=TokenSerializer, responses={201: NewTokenSerializer}
    )
    def post(self, request: Request, pk: int) -> Response:
        """Create a token of the account. Its secret is in this response only."""
        account = self.account(pk)
        serializer = TokenSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        creating_token = request.auth if isinstance(request.auth, ApiToken) else None
        token, secret = service_accounts.create_token(
            account=account, actor=self.membership, creating_token=creating_token, **serializer.validated_data
        )
        return Response({**TokenSerializer(token).data, "secret": secret}, status=201)


class ServiceAccountTokenView(_ServiceAccountBase):
    """One token of a service account."""

    capabilities: ClassVar = {"DELETE": Capability.MANAGE}

    @extend_schema(operation_id="service_account_tokens_revoke", responses={204: None})
    def delete(self, request: Request, pk: int, token_pk: int) -> Response:
        """Revoke the token at once. A token revokes only tokens that may do no more."""
        token = get_object_or_404(selectors.tokens(membership=self.account(pk).membership), pk=token_pk)
        _require_within_scopes(self.membership, token)
        services.revoke_token(token=token, actor=self.membership.user)
        return Response(status=204)


urlpatterns = [
    path("whoami/", WhoAmIView.as_view(), name="api_whoami"),
    path("tokens/", TokensView.as_view(), name="api_tokens"),
    path("tokens/<int:pk>/", TokenView.as_view(), name="api_token"),
    path("organization/", OrganizationView.as_view(), name="api_organization"),
    path("organization/members/", MembersView.as_view(), name="api_members"),
    path("organization/members/<int:pk>/", MemberView.as_view(), name="api_member"),
    path("organization/invitations/", InvitationsView.as_view(), name="api_invitations"),
    path("organization/invitations/<int:pk>/", InvitationView.as_view(), name="api_invitation"),
    path("service-accounts/", ServiceAccountsView.as_view(), name="api_service_accounts"),
    path("service-accounts/<int:pk>/", ServiceAccountView.as_view(), name="api_service_account"),
    path("service-accounts/<int:pk>/tokens/", ServiceAccountTokensView.as_view(), name="api_service_account_tokens"),
    path(
        "service-accounts/<int:pk>/tokens/<int:token_pk>/",
        ServiceAccountTokenView.as_view(),
        name="api_service_account_token",
    ),
]
