"""Admin pages of credit and vouchers. A grant is made through the service and never edited."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast
from uuid import uuid4

from django import forms
from django.conf import settings
from django.contrib import admin
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin

from billing import credit, models
from billing.admin.amounts import AmountForm, ShowsAmounts
from billing.amounts import money
from billing.ledger import wallet_account
from billing.selectors import default_currency, wallet
from console.accounts.models import User
from console.accounts.services import record_audit_event
from console.core.readonly import ReadOnlyInline


class CreditUseInline(ShowsAmounts, ReadOnlyInline):
    """The holds that reserved or used credit of one grant."""

    model = models.CreditUse
    fields = ("hold", "reserved_minor", "used_minor")


MAX_CREDIT_TOP_UPS = 100
"""Largest credit, as a multiple of the largest top-up: a million dollars with the default settings. A grant cannot be
edited or deleted, so a slip of the keyboard must not be saved. More credit takes several grants."""
ALREADY_SUBMITTED = _("This form was already submitted with different values. Reload the page and try again.")


class CreditForm(AmountForm):
    """A form with an amount of credit, which may expire."""

    def clean(self) -> dict[str, Any]:
        """Refuse an amount so large that it must be a typing error."""
        data = super().clean()
        maximum_minor = MAX_CREDIT_TOP_UPS * settings.TOP_UP_MAXIMUM_MINOR
        if data.get("amount_minor", 0) > maximum_minor:
            most = money(maximum_minor, self.currency(data))
            self.add_error("amount", gettext("The amount must be at most %(most)s.") % {"most": most})
        return data

    def clean_expires_at(self) -> datetime | None:
        """Refuse an expiry in the past. An unchanged one passes, so that an expired voucher can still be edited."""
        expires_at: datetime | None = self.cleaned_data["expires_at"]
        if expires_at and "expires_at" in self.changed_data and expires_at <= timezone.now():
            raise forms.ValidationError(_("Choose a time in the future."))
        return expires_at


class GrantForm(CreditForm):
    """The form of a new grant. Submitting it twice grants the credit once."""

    key = forms.UUIDField(widget=forms.HiddenInput, initial=uuid4)

    class Meta:
        model = models.CreditGrant
        fields = ("organization", "reason", "expires_at")

    def currency(self, data: dict[str, Any]) -> str:
        """Return the currency of the organization's wallet or, if it has none yet, the currency of new wallets."""
        account = wallet(data["organization"]) if "organization" in data else None
        return account.currency if account else default_currency()

    def clean(self) -> dict[str, Any]:
        """Refuse a form whose key was submitted before with other values."""
        data = super().clean()
        existing = models.CreditGrant.objects.filter(pk=data["key"]).first() if "key" in data else None
        fields = (*GrantForm.Meta.fields, "amount_minor")
        if existing and any(getattr(existing, name) != data.get(name) for name in fields):
            raise forms.ValidationError(ALREADY_SUBMITTED)
        return data


@admin.register(models.CreditGrant)
class CreditGrantAdmin(ShowsAmounts, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Grants with their reason, use and expiry."""

    form = GrantForm
    page_fields = (
        "organization",
        "amount_minor",
        "used_minor",
        "reserved_minor",
        "expired_minor",
        "reason",
        "expires_at",
    )
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
        """Show the uses of a credit once it is granted."""
        return (CreditUseInline,) if obj else ()

    def get_fields(self, _request: HttpRequest, obj: models.CreditGrant | None = None) -> Sequence[Any]:
        """Show the form's idempotency key only before the grant."""
        return (
            self._with_formatted_amounts(self.page_fields)
            if obj
            else ("organization", "amount", "reason", "expires_at", "key")
        )

    def has_change_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never allowed, because the amount is posted in the ledger."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never allowed."""
        return False

    def save_model(self, request: HttpRequest, obj: models.CreditGrant, form: ModelForm[Any], _change: Any) -> None:
        """Grant the credit through the service. An organization without a wallet gets one for the credit."""
        obj.pk = form.cleaned_data["key"]
        # Unlike `wallet`, this creates a missing wallet. An existing one keeps its currency, which `GrantForm` uses.
        account = wallet_account(organization_id=obj.organization_id, currency=default_currency())
        credit.grant(credit_grant=obj, user=cast("User", request.user), account=account)


class RedemptionInline(ShowsAmounts, ReadOnlyInline):
    """The grants of credit to organizations that redeemed a voucher."""

    model = models.CreditGrant
    fields = ("organization", "received_by", "amount_minor", "used_minor", "created_at")


class VoucherForm(CreditForm):
    """The form of a voucher."""

    class Meta:
        model = models.Voucher
        exclude = ("amount_minor",)
        help_texts = {
            "max_uses_each": _(
                "The same limit applies to each person, counting the uses in all their organizations together."
            )
        }

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.instance.uses:  # already redeemed: read-only
            del self.fields["amount"]

    def currency(self, data: dict[str, Any]) -> str:
        """Return the typed currency, or the stored one if it is read-only."""
        return str(data.get("currency", self.instance.currency)).upper()

    def clean(self) -> dict[str, Any]:
        """Refuse a limit below the number of uses so far. Locks the voucher, so that no use is added meanwhile."""
        data = super().clean()
        current = models.Voucher.objects.select_for_update(no_key=True).filter(pk=self.instance.pk).first()
        if current:
            self.instance.uses = current.uses
        if data.get("max_uses", self.instance.uses) < self.instance.uses:
            sentence = _("The limit must be at least %(uses)d, the number of uses so far.")
            self.add_error("max_uses", sentence % {"uses": self.instance.uses})
        return data


@admin.register(models.Voucher)
class VoucherAdmin(ShowsAmounts, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Vouchers. A redeemed voucher can be ended but not edited."""

    form = VoucherForm
    list_display = ("code", "amount_minor", "reason", "uses", "max_uses", "expires_at", "is_active")
    list_filter = ("is_active",)
    search_fields = ("code", "reason")
    actions = ("end",)
    other_fields = ("currency", "expires_at", "credit_days", "max_uses", "max_uses_each", "uses", "is_active")

    def get_inlines(self, _request: HttpRequest, obj: models.Voucher | None = None) -> tuple[type[Any], ...]:
        """Show the redemptions of a voucher once it exists."""
        return (RedemptionInline,) if obj else ()

    def get_readonly_fields(self, _request: HttpRequest, obj: models.Voucher | None = None) -> Sequence[Any]:
        """Return the read-only fields: the count of uses and, once the voucher was redeemed, its code and value too."""
        fixed_fields = ("code", "amount_minor", "currency", "credit_days", "uses")
        return self._with_formatted_amounts(fixed_fields) if obj and obj.uses else ("uses",)

    def get_fields(self, request: HttpRequest, obj: models.Voucher | None = None) -> Sequence[Any]:
        """Show the amount as an input until the first redemption."""
        is_editable = obj is None or (not obj.uses and self.has_change_permission(request, obj))
        return self._with_formatted_amounts(
            ("code", "reason", "amount" if is_editable else "amount_minor", *self.other_fields)
        )

    def has_delete_permission(self, request: HttpRequest, obj: models.Voucher | None = None) -> bool:
        """Allowed only before the first redemption."""
        return (obj is None or not obj.uses) and bool(super().has_delete_permission(request, obj))

    def get_changeform_initial_data(self, _request: HttpRequest) -> dict[str, Any]:
        """Preset the currency of new wallets."""
        return {"currency": default_currency()}

    def save_model(self, request: HttpRequest, obj: models.Voucher, _form: ModelForm[Any], change: Any) -> None:
        """Generate a missing code and record the author, also in the audit log."""
        obj.code = obj.code or credit.new_code()
        obj.currency = obj.currency.upper()  # upper case, as wallets store it
        obj.created_by = obj.created_by or cast("User", request.user)
        obj.save()
        if not change:
            record_audit_event(
                organization=None,  # any organization may redeem it
                actor=obj.created_by,
                action="voucher.created",
                target=f"voucher:{obj.pk}",  # not the code, which is worth money
                data={
                    "amount_minor": obj.amount_minor,
                    "currency": obj.currency,
                    "max_uses": obj.max_uses,
                    "reason": obj.reason,
                },
            )

    @admin.action(description=_("End (no further redemptions)"), permissions=("change",))
    def end(self, _request: HttpRequest, vouchers: QuerySet[models.Voucher]) -> None:
        """End the selected vouchers."""
        vouchers.update(is_active=False)
