"""Credits given. The one rule: a grant moves money through the service, and is never edited."""

from __future__ import annotations

from typing import Any, cast

from django.contrib import admin
from django.forms import ModelForm
from django.http import HttpRequest
from unfold.admin import ModelAdmin

from billing import models, payments
from billing.ledger import wallet_account
from billing.selectors import default_currency
from console.accounts.models import User


@admin.register(models.CreditGrant)
class CreditGrantAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Money given, with the reason."""

    list_display = ("organization", "amount_minor", "reason", "granted_by", "created_at")
    autocomplete_fields = ("organization",)

    def has_change_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never: correct a grant with another movement."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never."""
        return False

    def save_model(self, request: HttpRequest, obj: models.CreditGrant, _form: ModelForm[Any], _change: Any) -> None:
        """Grant through the service."""
        account = wallet_account(organization_id=obj.organization_id, currency=default_currency())
        payments.grant(credit=obj, user=cast("User", request.user), account=account)
