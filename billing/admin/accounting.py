"""Invoices, the billing policy, customers' details and budgets.

The one rule: a document is shown, and corrected by a credit note that the service writes.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.admin import ModelAdmin
from unfold.decorators import action

from billing import documents, invoices, models
from billing.errors import InvoiceRefused
from billing.wording import money, typed_minor
from console.accounts.readonly import ReadOnlyAdmin, ReadOnlyInline


class InvoiceLineInline(ReadOnlyInline):
    """The lines of an invoice."""

    model = models.InvoiceLine
    fields = ("position", "title", "receipt", "amount_minor", "credit_minor")


@admin.register(models.Invoice)
class InvoiceAdmin(ReadOnlyAdmin):
    """Invoices and credit notes."""

    list_display = ("number", "kind", "organization", "total_minor", "tax_minor", "currency", "issued_at")
    list_filter = ("kind", "currency")
    list_select_related = ("organization",)
    search_fields = ("number", "organization__name")
    date_hierarchy = "issued_at"
    inlines = (InvoiceLineInline,)
    actions_detail = ("correct",)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Say what the machine lacks for PDF files, where it does."""
        if problem := documents.problem():
            messages.warning(request, problem)
        answer: HttpResponse = super().changelist_view(request, extra_context)
        return answer

    def has_correct_permission(self, request: HttpRequest, _object_id: str | None = None) -> bool:
        """Whoever may add invoices may correct them: a credit note is one."""
        return request.user.has_perm("billing.add_invoice")

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Write a credit note"), permissions=("correct",)
    )
    def correct(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Give back what of its runs should not have been charged."""
        invoice = get_object_or_404(models.Invoice, pk=object_id)
        typed = {name: request.POST.get(name, "").strip() for name in request.POST if name.startswith("line-")}
        error = ""
        if request.method == "POST":
            try:
                amounts = {
                    int(name.removeprefix("line-")): typed_minor(value, invoice.currency)
                    for name, value in typed.items()
                    if value
                }
                note = invoices.correct(
                    invoice=invoice,
                    amounts=amounts,
                    reason=request.POST.get("reason", ""),
                    user=request.user if request.user.is_authenticated else None,
                    after=int(request.POST.get("after", "")),
                )
            except InvoiceRefused as refused:
                error = " ".join(map(str, refused.fields.values())) or str(refused.message)
            except ValueError:  # no amount, no line, or no form of ours
                error = _("Give amounts such as 5 or 1.90.")
            else:
                messages.success(request, _("%(number)s is written.") % {"number": note.number})
                return redirect("admin:billing_invoice_change", note.pk)
        rows = [
            {
                "line": line,
                "left": money(left, invoice.currency),
                "is_open": left > 0 and invoice.kind == models.Invoice.Kinds.INVOICE,
                "typed": typed.get(f"line-{line.pk}", ""),
            }
            for line, left in invoices.correctable(invoice)
        ]
        return render(
            request,
            "admin/correct_invoice.html",
            {
                **self.admin_site.each_context(request),
                "title": _("A credit note for %(number)s") % {"number": invoice.number},
                "invoice": invoice,
                "rows": rows,
                "error": error,
                "after": invoice.notes.count(),
                "reason": request.POST.get("reason", ""),
                "back": reverse("admin:billing_invoice_change", args=[invoice.pk]),
            },
        )


@admin.register(models.BillingPolicy)
class BillingPolicyAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """The one policy."""

    fieldsets = (
        (gettext_lazy("Seller"), {"fields": ("seller_name", "seller_address", "seller_tax_id", "footer")}),
        (gettext_lazy("Numbers"), {"fields": ("invoice_prefix", "note_prefix")}),
        (gettext_lazy("Tax"), {"fields": ("tax_name", "tax_percent", "tax_inclusive")}),
        (gettext_lazy("To try out"), {"fields": ("trial_credit_minor", "trial_credit_days", "probes_per_day")}),
    )

    def has_add_permission(self, request: HttpRequest) -> bool:
        """While there is none."""
        return not models.BillingPolicy.objects.exists() and bool(super().has_add_permission(request))

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never: there is always one."""
        return False


@admin.register(models.BillingDetails)
class BillingDetailsAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Whom invoices are for, and which tax they carry."""

    list_display = ("organization", "name", "tax_id", "tax_percent", "tax_inclusive")
    autocomplete_fields = ("organization",)
    search_fields = ("organization__name", "name", "tax_id")


@admin.register(models.Budget)
class BudgetAdmin(ReadOnlyAdmin):
    """Limits that customers set for themselves."""

    list_display = ("organization", "user", "amount_minor", "updated_at")
    list_select_related = ("organization", "user")
    search_fields = ("organization__name",)
