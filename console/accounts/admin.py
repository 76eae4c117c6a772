"""Administrators' work on people and organizations.

The one rule: roles and services change through `services`, so that the last owner stays and the trail is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group
from django.db import transaction
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin, TabularInline
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from console.accounts import services
from console.accounts.errors import CustomerError
from console.accounts.models import ApiToken, AuditEvent, Membership, Organization, Quota, ServiceActivation, User
from console.accounts.readonly import ReadOnly
from console.accounts.roles import Role

admin.site.unregister(Group)


class NewUserForm(UserCreationForm):  # type: ignore[misc]  # unfold publishes no types
    """A person, by e-mail address."""

    class Meta:
        model = User
        fields = ("email",)


class EditedUserForm(UserChangeForm):  # type: ignore[misc]  # unfold publishes no types
    """The same form as Django's, for our user."""

    class Meta:
        model = User
        fields = "__all__"


@admin.register(User)
class UserAdmin(DjangoUserAdmin, ModelAdmin):  # type: ignore[misc, type-arg]  # unfold publishes no types
    """People. Whoever is added here gets an organization, as at sign-up."""

    form = EditedUserForm
    add_form = NewUserForm
    change_password_form = AdminPasswordChangeForm
    ordering = ("email",)
    list_display = ("email", "first_name", "last_name", "is_active", "is_staff", "last_login")
    list_filter = ("is_active", "is_staff")
    search_fields = ("email", "first_name", "last_name")
    filter_horizontal = ()
    readonly_fields = ("last_login", "date_joined")
    fieldsets = (
        (None, {"fields": ("email", "password", "first_name", "last_name")}),
        (_("Rights"), {"fields": ("is_active", "is_staff", "is_superuser")}),
        (_("Dates"), {"fields": ("last_login", "date_joined")}),
    )
    add_fieldsets = ((None, {"fields": ("email", "usable_password", "password1", "password2")}),)

    def save_model(self, request: HttpRequest, obj: User, form: ModelForm[User], change: bool) -> None:
        """Save, and make the first organization of a new person."""
        with transaction.atomic():
            super().save_model(request, obj, form, change)
            if not change:
                services.create_organization(user=obj, name=obj.email.partition("@")[0])

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never: the trail names people. Make them inactive instead."""
        return False


class MembershipInline(ReadOnly, TabularInline):  # type: ignore[misc]  # unfold publishes no types
    """Who belongs to an organization; roles are changed in the list of memberships."""

    model = Membership
    extra = 0
    fields = ("user", "role")


class QuotaInline(TabularInline):  # type: ignore[misc]  # unfold publishes no types
    """The organization's limits."""

    model = Quota
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never: each organization was made with one."""
        return False


class ActivationInline(ReadOnly, TabularInline):  # type: ignore[misc]  # unfold publishes no types
    """Who accepted which terms, and when."""

    model = ServiceActivation
    extra = 0
    fields = ("service", "terms_version", "activated_by", "activated_at", "deactivated_at")


@admin.register(Organization)
class OrganizationAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Customers: their limits, members and services."""

    list_display = ("name", "slug", "created_at", "service_active")
    search_fields = ("name", "slug", "memberships__user__email")
    readonly_fields = ("slug", "created_at")
    inlines = (QuotaInline, MembershipInline, ActivationInline)
    actions = ("suspend_service",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Organization]:
        """With what the list shows of each."""
        return super().get_queryset(request).prefetch_related("activations")  # type: ignore[no-any-return]

    @admin.display(boolean=True, description=_("service active"))
    def service_active(self, organization: Organization) -> bool:
        """Whether new orders are taken."""
        return any(activation.is_active for activation in organization.activations.all())

    @admin.action(description=_("Stop new orders of the chosen organizations"))
    def suspend_service(self, request: HttpRequest, queryset: QuerySet[Organization]) -> None:
        """Deactivate the service; what runs goes on."""
        for organization in queryset:
            services.suspend_service(organization=organization, actor=_person(request))

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never: an organization is made by its owner."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never: its ledger stays."""
        return False


def _role_action(role: Role) -> Callable[[Any, HttpRequest, QuerySet[Membership]], None]:
    def act(self: MembershipAdmin, request: HttpRequest, queryset: QuerySet[Membership]) -> None:
        self.apply(
            request, queryset, lambda one: services.change_role(membership=one, role=role, actor=_person(request))
        )

    act.__name__ = f"make_{role}"
    label = _("Make the chosen members: %(role)s") % {"role": Membership.Roles(role).label}
    return admin.action(description=label)(act)


@admin.register(Membership)
class MembershipAdmin(ReadOnly, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Members and their roles, changed by actions."""

    list_display = ("user", "organization", "role", "created_at")
    list_filter = ("role",)
    list_select_related = ("user", "organization")
    search_fields = ("user__email", "organization__name")
    actions = (*(_role_action(role) for role in Role), "remove")

    @admin.action(description=_("Remove the chosen members"))
    def remove(self, request: HttpRequest, queryset: QuerySet[Membership]) -> None:
        """End the memberships."""
        self.apply(request, queryset, lambda one: services.remove_member(membership=one, actor=_person(request)))

    def apply(
        self, request: HttpRequest, queryset: QuerySet[Membership], change: Callable[[Membership], object]
    ) -> None:
        """Change each, and say which could not be changed, and why."""
        for membership in queryset.select_related("user", "organization"):
            try:
                change(membership)
            except CustomerError as error:
                self.message_user(request, f"{membership}: {error.message}", messages.ERROR)


@admin.register(ApiToken)
class ApiTokenAdmin(ReadOnly, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """API tokens: there is no secret to be seen."""

    list_display = ("name", "prefix", "membership", "created_at", "last_used_at", "revoked_at")
    list_select_related = ("membership__user", "membership__organization")
    search_fields = ("prefix", "membership__user__email", "membership__organization__name")
    exclude = ("digest",)
    actions = ("revoke",)

    @admin.action(description=_("Revoke the chosen tokens"))
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiToken]) -> None:
        """End them at once."""
        for token in queryset.select_related("membership__organization"):
            services.revoke_token(token=token, actor=_person(request))


@admin.register(AuditEvent)
class AuditEventAdmin(ReadOnly, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """The trail."""

    list_display = ("created_at", "actor", "action", "target", "organization")
    list_filter = ("action",)
    list_select_related = ("actor", "organization")
    search_fields = ("target", "actor__email", "organization__name")
    show_full_result_count = False


def _person(request: HttpRequest) -> User | None:
    return request.user if isinstance(request.user, User) else None
