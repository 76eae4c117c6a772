"""The admin page of closures of organizations, with the money that is still to be refunded."""

from __future__ import annotations

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from billing import credit, selectors
from billing.amounts import money
from console.accounts.models import Closure
from console.core.readonly import ReadOnlyAdmin


@admin.register(Closure)
class ClosureAdmin(ReadOnlyAdmin):
    """Closures of organizations."""

    list_display = ("organization", "requested_by", "requested_at", "ends_at", "closed_at", "to_pay_back", "problem")
    list_select_related = ("organization", "requested_by")
    search_fields = ("organization__name", "organization__slug")

    @admin.display(description=_("to pay back"))
    def to_pay_back(self, closure: Closure) -> str:
        """Return the paid-in money that is still in the wallet, or a dash if there is no wallet."""
        account = selectors.wallet(closure.organization)
        return money(credit.paid_minor(account), account.currency) if account else "–"
