"""Credit and vouchers. The one rule: a grant moves money through the service, and is never edited."""

from __future__ import annotations

from typing import Any, cast
from uuid import uuid4

from django import forms
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


SENT_BEFORE = _("This form was sent before, with other values, and done. Open it again for another.")


class GrantForm(forms.ModelForm):  # type: ignore[type-arg]  # at run time Django's class takes no argument
    """A credit to give: the same form, sent twice, is the same credit."""

    key = forms.UUIDField(widget=forms.HiddenInput, initial=uuid4)

    class Meta:
        model = models.CreditGrant
        fields = ("organization", "amount_minor", "reason", "expires_at")

    def clean(self) -> dict[str, Any]:
        """A form that was sent before has the values that it had."""
        data = super().clean() or {}
        known = models.CreditGrant.objects.filter(pk=data["key"]).first() if "key" in data else None
        if known and any(getattr(known, name) != data.get(name) for name in GrantForm.Meta.fields):
            raise forms.ValidationError(SENT_BEFORE)
        return data


@admin.register(models.CreditGrant)
class CreditGrantAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Credit given, with the reason, and what became of it."""

    form = GrantForm

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

    def get_fields(self, _request: HttpRequest, obj: models.CreditGrant | None = None) -> tuple[str, ...]:
        """The form's key is of what is not given yet."""
        return GrantForm.Meta.fields if obj else (*GrantForm.Meta.fields, "key")

    def has_change_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never: correct a grant with another movement."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never."""
        return False

    def save_model(self, request: HttpRequest, obj: models.CreditGrant, form: ModelForm[Any], _change: Any) -> None:
        """Grant through the service."""
        obj.pk = form.cleaned_data["key"]
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
        obj.currency = obj.currency.upper()  # as wallets have it: no customer can enter one of "usd"
        obj.created_by = obj.created_by or cast("User", request.user)
        obj.save()

    @admin.action(description=_("End: it can't be entered any more"))
    def end(self, _request: HttpRequest, vouchers: QuerySet[models.Voucher]) -> None:
        """Stop vouchers."""
        vouchers.update(is_active=False)

    actions = ("end",)
