"""Admin pages of users and organizations.

Actions on users, members and tokens call `services`, which writes the audit log and never leaves an organization
without an owner. What an administrator edits in a form is saved as by Django, without an entry in the audit log.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from allauth.account.admin import EmailAddressAdmin as AllauthEmailAddressAdmin
from allauth.account.models import EmailAddress
from allauth.idp.oidc.adapter import get_adapter
from allauth.idp.oidc.models import Client, Token
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount, SocialApp, SocialToken
from allauth.usersessions.models import UserSession
from django.contrib import admin, messages
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group
from django.db import transaction
from django.db.models import QuerySet
from django.forms import CheckboxSelectMultiple, ModelForm, MultipleChoiceField, ValidationError
from django.http import HttpRequest
from django.utils.functional import lazy
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin, TabularInline
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from console.accounts import emails, openid, second_factors, services
from console.accounts.models import (
    ApiToken,
    Invitation,
    Membership,
    Organization,
    Quota,
    ServiceActivation,
    User,
)
from console.accounts.roles import Role
from console.core.errors import CustomerError
from console.core.readonly import ROWS_PER_PAGE, ReadOnly

# allauth's pages would show the keys of second factors and of sessions. Single sign-on is set in the environment.
# allauth's form of clients offers grant types that this provider does not support (`openid.GRANT_TYPES`).
# allauth's page of e-mail addresses is replaced below.
for _model in (Group, EmailAddress, Authenticator, UserSession, SocialAccount, SocialApp, SocialToken, Client, Token):
    admin.site.unregister(_model)


class LowerCaseEmailMixin:
    """Stores e-mail addresses in lower case, as sign-up does: people are looked up by them."""

    cleaned_data: dict[str, Any]

    def clean_email(self) -> str:
        """Return the address in lower case."""
        return str(self.cleaned_data["email"]).lower()


class NewUserForm(LowerCaseEmailMixin, UserCreationForm):  # type: ignore[misc]  # unfold publishes no types
    """The form that adds a user, who is identified by e-mail address."""

    class Meta:
        model = User
        fields = ("email",)


class EditedUserForm(LowerCaseEmailMixin, UserChangeForm):  # type: ignore[misc]  # unfold publishes no types
    """The form that changes a user: Django's, for the model `accounts.User`."""

    class Meta:
        model = User
        fields = "__all__"


@admin.register(User)
class UserAdmin(DjangoUserAdmin, ModelAdmin):  # type: ignore[misc, type-arg]  # unfold publishes no types
    """Users. A user added here gets an organization, as at sign-up."""

    form = EditedUserForm
    add_form = NewUserForm
    change_password_form = AdminPasswordChangeForm
    ordering = ("email",)
    list_per_page = ROWS_PER_PAGE
    list_display = ("email", "first_name", "last_name", "is_active", "awaits_approval", "is_staff", "last_login")
    list_filter = ("awaits_approval", "is_active", "is_staff")
    search_fields = ("email", "first_name", "last_name")
    filter_horizontal = ()
    readonly_fields = ("last_login", "date_joined")
    fieldsets = (
        (None, {"fields": ("email", "password", "first_name", "last_name")}),
        (_("Rights"), {"fields": ("is_active", "is_staff", "is_superuser")}),
        (_("Dates"), {"fields": ("last_login", "date_joined")}),
    )
    add_fieldsets = ((None, {"fields": ("email", "usable_password", "password1", "password2")}),)
    actions = ("approve", "reset_second_factors")

    @admin.action(description=_("Approve the chosen users"), permissions=("change",))
    def approve(self, request: HttpRequest, queryset: QuerySet[User]) -> None:
        """Let the chosen users, who await approval after sign-up, log in, and tell them by email."""
        for user in queryset:
            if services.approve_user(user=user, actor=_actor_of(request)) and not emails.send_approval(user):
                self.message_user(request, _("No email could be sent to %s.") % user.email, messages.WARNING)

    @admin.action(description=_("Remove the second factors of the chosen users"), permissions=("change",))
    def reset_second_factors(self, request: HttpRequest, queryset: QuerySet[User]) -> None:
        """Let people who lost their second factors log in with the password alone.

        The owners of each person's organizations see the removal in the audit log. For a person without an
        organization, the entry belongs to none.
        """
        actor = _actor_of(request)
        for user in queryset:
            with transaction.atomic():
                if second_factors.reset(user=user):
                    organizations: list[Organization | None] = [*Organization.objects.filter(memberships__user=user)]
                    for organization in organizations or [None]:
                        services.record_audit_event(
                            organization=organization, actor=actor, action="factors.reset", target=user.email
                        )

    def save_model(self, request: HttpRequest, obj: User, form: ModelForm[User], change: bool) -> None:
        """Save the user, and create the first organization of a new one."""
        with transaction.atomic():
            super().save_model(request, obj, form, change)
            if not change:
                services.create_organization(user=obj, name=obj.email.partition("@")[0])

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never allowed: the audit log refers to users. Deactivate them instead."""
        return False


@admin.register(EmailAddress)
class EmailAddressAdmin(AllauthEmailAddressAdmin, ModelAdmin):  # type: ignore[misc]  # neither publishes types
    """E-mail addresses of users. On allauth's own page, everybody who may view an address may mark it as verified."""

    list_per_page = ROWS_PER_PAGE

    @admin.action(
        description=AllauthEmailAddressAdmin.make_verified.short_description,
        permissions=("change",),
    )
    def make_verified(self, request: HttpRequest, queryset: QuerySet[EmailAddress]) -> None:
        """Mark the chosen addresses as verified, as if their users had opened the link in the email."""
        super().make_verified(request, queryset)


class MembershipInline(ReadOnly, TabularInline):  # type: ignore[misc]  # unfold publishes no types
    """The members of an organization. Roles are changed in the list of memberships."""

    model = Membership
    extra = 0
    fields = ("user", "role")


class QuotaInline(TabularInline):  # type: ignore[misc]  # unfold publishes no types
    """The organization's quotas."""

    model = Quota
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never allowed: each organization already has one."""
        return False


class ActivationInline(ReadOnly, TabularInline):  # type: ignore[misc]  # unfold publishes no types
    """Service activations with the accepted terms."""

    model = ServiceActivation
    extra = 0
    fields = ("service", "terms_version", "activated_by", "activated_at", "deactivated_at")


@admin.register(Organization)
class OrganizationAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Organizations with their quotas, members and services."""

    list_display = ("name", "slug", "created_at", "service_active")
    list_per_page = ROWS_PER_PAGE
    search_fields = ("name", "slug", "memberships__user__email")
    readonly_fields = ("slug", "created_at")
    inlines = (QuotaInline, MembershipInline, ActivationInline)
    actions = ("suspend_service",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Organization]:
        """Return the organizations with the data that the list shows."""
        return super().get_queryset(request).prefetch_related("activations")  # type: ignore[no-any-return]

    @admin.display(boolean=True, description=_("service active"))
    def service_active(self, organization: Organization) -> bool:
        """Return whether the service is active."""
        return any(activation.is_active for activation in organization.activations.all())

    @admin.action(description=_("Stop new orders of the chosen organizations"), permissions=("change",))
    def suspend_service(self, request: HttpRequest, queryset: QuerySet[Organization]) -> None:
        """Deactivate the service. Running jobs continue."""
        for organization in queryset:
            services.suspend_service(organization=organization, actor=_actor_of(request))

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never allowed: organizations are created by their owners."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never allowed: the organization's ledger must be kept."""
        return False


def _role_action(role: Role) -> Callable[[Any, HttpRequest, QuerySet[Membership]], None]:
    """Return the admin action that gives the chosen members a role."""

    def action(self: MembershipAdmin, request: HttpRequest, queryset: QuerySet[Membership]) -> None:
        self.apply(
            request,
            queryset,
            lambda membership: services.change_role(membership=membership, role=role, actor=_actor_of(request)),
        )

    def label() -> str:
        # Called for each page: at import, the operator % would return English once and for all.
        return _("Make the chosen members: %(role)s") % {"role": Membership.Roles(role).label}

    action.__name__ = f"make_{role}"  # by which Django tells the four actions apart
    return admin.action(description=lazy(label, str)(), permissions=("act",))(action)


@admin.register(Membership)
class MembershipAdmin(ReadOnly, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Memberships. Roles are changed by actions, which need the permission `act` (`ReadOnly.has_act_permission`)."""

    list_display = ("user", "organization", "role", "created_at")
    list_filter = ("role",)
    list_select_related = ("user", "organization")
    search_fields = ("user__email", "organization__name")
    actions = (*(_role_action(role) for role in Role), "remove")

    @admin.action(description=_("Remove the chosen members"), permissions=("act",))
    def remove(self, request: HttpRequest, queryset: QuerySet[Membership]) -> None:
        """End the memberships."""
        self.apply(
            request,
            queryset,
            lambda membership: services.remove_member(membership=membership, actor=_actor_of(request)),
        )

    def apply(
        self, request: HttpRequest, queryset: QuerySet[Membership], change: Callable[[Membership], object]
    ) -> None:
        """Call `change` with each selected membership, and report those that could not be changed."""
        for membership in queryset.select_related("user", "organization", "service_account"):
            # A service account may not get every role, and its name must become free again.
            if hasattr(membership, "service_account"):
                error_text = _("A service account is changed and deleted by its organization.")
                self.message_user(request, f"{membership}: {error_text}", messages.ERROR)
                continue
            try:
                change(membership)
            except CustomerError as error:
                self.message_user(request, f"{membership}: {error.message}", messages.ERROR)


@admin.register(Invitation)
class InvitationAdmin(ReadOnly, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Invitations and their results."""

    list_display = ("email", "organization", "role", "invited_by", "created_at", "accepted_at", "revoked_at")
    list_select_related = ("organization", "invited_by")
    search_fields = ("email", "organization__name", "invited_by__email")


@admin.register(ApiToken)
class ApiTokenAdmin(ReadOnly, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """API tokens, without their secrets."""

    list_display = ("name", "prefix", "membership", "scopes", "created_at", "expires_at", "last_used_at", "revoked_at")
    list_select_related = ("membership__user", "membership__organization")
    search_fields = ("prefix", "membership__user__email", "membership__organization__name")
    exclude = ("digest",)
    actions = ("revoke",)

    @admin.action(description=_("Revoke the chosen tokens"), permissions=("act",))
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiToken]) -> None:
        """Revoke the selected tokens."""
        for token in queryset.select_related("membership__organization"):
            services.revoke_token(token=token, actor=_actor_of(request))


class ClientForm(ModelForm):  # type: ignore[type-arg]  # allauth publishes no types
    """The name of a client, its redirect URIs and its scopes."""

    scopes = MultipleChoiceField(
        label=_("scopes"),
        choices=[(scope, scope) for scope in openid.SCOPES],
        widget=CheckboxSelectMultiple,
        help_text=_("The scope notebooks lets the client start notebooks, which people's organizations pay for."),
    )

    class Meta:
        model = Client
        fields = ("name", "redirect_uris", "scopes")
        labels = {"name": _("name"), "redirect_uris": _("redirect URIs")}
        help_texts = {"redirect_uris": _("One on each line, exactly as the client sends it.")}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial["scopes"] = self.instance.get_scopes()

    def clean_redirect_uris(self) -> str:
        """Return one address on each line. Raises ValidationError."""
        addresses = str(self.cleaned_data["redirect_uris"]).split()
        if not addresses or not all(map(openid.is_redirect_uri, addresses)):
            raise ValidationError(
                _("Each redirect URI must be a complete https:// address. Only localhost may use http://.")
            )
        return "\n".join(addresses)

    def clean_scopes(self) -> str:
        """Return one scope on each line. OpenID Connect requires `openid`."""
        further_scopes = [scope for scope in self.cleaned_data["scopes"] if scope != "openid"]
        return "\n".join(["openid", *further_scopes])


@admin.register(Client)
class ClientAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Clients of the OpenID provider. Deleting one ends its access to every account."""

    form = ClientForm
    list_display = ("client_name", "client_id", "created")
    search_fields = ("name", "id")
    readonly_fields = ("client_id", "created")
    actions = ("replace_secret", "revoke_tokens")

    # allauth does not translate the labels of these three fields.

    @admin.display(description=_("name"), ordering="name")
    def client_name(self, client: Client) -> str:
        """Return the client's name."""
        return str(client.name)

    @admin.display(description=_("client ID"), ordering="id")
    def client_id(self, client: Client) -> str:
        """Return the client's ID."""
        return str(client.pk)

    @admin.display(description=_("created"), ordering="created_at")
    def created(self, client: Client) -> datetime:
        """Return when the client was added."""
        added: datetime = client.created_at
        return added

    def save_model(self, request: HttpRequest, obj: Client, form: Any, change: bool) -> None:
        """Save the client. A new one gets a secret, which is shown once."""
        obj.set_grant_types([grant.value for grant in openid.GRANT_TYPES])
        if not change:
            self._set_new_secret(request, obj)
        super().save_model(request, obj, form, change)

    @admin.action(description=_("Replace the secrets of the chosen clients"), permissions=("change",))
    def replace_secret(self, request: HttpRequest, queryset: QuerySet[Client]) -> None:
        """Give each client a new secret. The old one stops working."""
        for client in queryset:
            self._set_new_secret(request, client)
            client.save(update_fields=["secret"])

    @admin.action(description=_("Log everybody out of the chosen clients"), permissions=("change",))
    def revoke_tokens(self, request: HttpRequest, queryset: QuerySet[Client]) -> None:
        """End the access of each client to every account."""
        Token.objects.filter(client__in=queryset).delete()

    def _set_new_secret(self, request: HttpRequest, client: Client) -> None:
        """Give the client a new secret, and show it once. The caller saves the client."""
        secret = get_adapter().generate_client_secret()
        client.set_secret(secret)
        message = format_html("{} <code>{}</code>", _("The secret of %s, shown only now:") % client.name, secret)
        self.message_user(request, message, messages.WARNING)


def _actor_of(request: HttpRequest) -> User | None:
    return request.user if isinstance(request.user, User) else None
