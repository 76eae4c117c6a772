"""Credit and vouchers. The one rule: a grant moves money through the service, and is never edited."""

from __future__ import annotations

from typing import Any, cast

from django.contrib import admin
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin

from billing import credit, models
from billing.ledger import wallet_account
from billing.selectors import default_currency
from console.accounts.models import User
from console.accounts.readonly import ReadOnlyInline


class CreditUseInline(ReadOnlyInline):
    """What a credit was used for."""

    model = models.CreditUse
    fields = ("hold", "reserved_minor", "used_minor")


@admin.register(models.CreditGrant)
class CreditGrantAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Credit given, with the reason, and what became of it."""

    list_display = (
        "organization",
        "amount_minor",
        "used_minor",
        "reserved_minor",
        "expired_minor",
        "source",
        "reason",
        "expires_at",
        "granted_by",
        "created_at",
    )
    list_filter = ("source",)
    list_select_related = ("organization", "granted_by")
    search_fields = ("organization__name", "reason")
    autocomplete_fields = ("organization",)

    def get_inlines(self, _request: HttpRequest, obj: models.CreditGrant | None = None) -> tuple[type[Any], ...]:
        """Once it is given."""
        return (CreditUseInline,) if obj else ()

    def has_change_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never: correct a grant with another movement."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never."""
        return False

    def save_model(self, request: HttpRequest, obj: models.CreditGrant, _form: ModelForm[Any], _change: Any) -> None:
        """Grant through the service."""
        account = wallet_account(organization_id=obj.organization_id, currency=default_currency())
        credit.grant(credit=obj, user=cast("User", request.user), account=account)


class GrantInline(ReadOnlyInline):
    """Who entered a voucher."""

    model = models.CreditGrant
    fields = ("organization", "received_by", "amount_minor", "used_minor", "created_at")


@admin.register(models.Voucher)
class VoucherAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Codes that give credit. What was promised stays: a voucher that was entered is ended, not edited."""

    list_display = ("code", "amount_minor", "currency", "reason", "uses", "max_uses", "expires_at", "is_active")
    list_filter = ("is_active",)
    search_fields = ("code", "reason")

    def get_inlines(self, _request: HttpRequest, obj: models.Voucher | None = None) -> tuple[type[Any], ...]:
        """Once it is made."""
        return (GrantInline,) if obj else ()

    def get_readonly_fields(self, _request: HttpRequest, obj: models.Voucher | None = None) -> tuple[str, ...]:
        """What customers were promised."""
        return ("code", "amount_minor", "currency", "credit_days", "uses") if obj and obj.uses else ("uses",)

    def has_delete_permission(self, _request: HttpRequest, obj: models.Voucher | None = None) -> bool:
        """Only before it was entered."""
        return obj is None or not obj.uses

    def get_changeform_initial_data(self, _request: HttpRequest) -> dict[str, Any]:
        """In the currency of wallets."""
        return {"currency": default_currency()}

    def save_model(self, request: HttpRequest, obj: models.Voucher, _form: ModelForm[Any], _change: Any) -> None:
        """Make a code where none was given, and remember who made it."""
        obj.code = obj.code or credit.new_code()
        obj.created_by = obj.created_by or cast("User", request.user)
        obj.save()

    @admin.action(description=_("End: it can't be entered any more"))
    def end(self, _request: HttpRequest, vouchers: QuerySet[models.Voucher]) -> None:
        """Stop vouchers."""
        vouchers.update(is_active=False)

    actions = ("end",)
