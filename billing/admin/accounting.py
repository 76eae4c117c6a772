"""Admin pages of invoices, the billing policy, billing details, budgets and storage, and the form of a credit note."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.admin import ModelAdmin
from unfold.decorators import action

from billing import invoice_pdf, invoices, models
from billing.admin.amounts import AmountForm, ShowsAmounts
from billing.amounts import money, parse_amount
from billing.errors import InvoiceRefused
from billing.selectors import default_currency
from console.core.readonly import ReadOnlyAdmin, ReadOnlyInline, row_or_404


class InvoiceLineInline(ShowsAmounts, ReadOnlyInline):
    """The lines of an invoice (one for each receipt) or of a credit note."""

    model = models.InvoiceLine
    fields = ("position", "title", "receipt", "amount_minor", "credit_minor")


@admin.register(models.Invoice)
class InvoiceAdmin(ShowsAmounts, ReadOnlyAdmin):
    """Invoices and credit notes."""

    list_display = ("number", "kind", "organization", "total_minor", "tax_minor", "issued_at")
    list_filter = ("kind", "currency")
    list_select_related = ("organization",)
    search_fields = ("number", "organization__name")
    date_hierarchy = "issued_at"
    inlines = (InvoiceLineInline,)
    actions_detail = ("correct",)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Warn if invoices lack a seller's address, or the machine cannot render PDFs."""
        for problem in filter(None, (invoice_pdf.seller_problem(), invoice_pdf.problem())):
            messages.warning(request, problem)
        response: HttpResponse = super().changelist_view(request, extra_context)
        return response

    def has_correct_permission(self, request: HttpRequest, _object_id: str | None = None) -> bool:
        """Return whether the user may add rows of Invoice, such as a credit note. Unfold asks this before `correct`."""
        return request.user.has_perm("billing.add_invoice")

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Issue a credit note"), permissions=("correct",)
    )
    def correct(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show the form of a credit note, with an amount for each line. On POST, issue the note."""
        invoice = row_or_404(models.Invoice, object_id)
        # Counted before the lines are read. If another note is issued in between, the form has the old number, and
        # `invoices.correct` refuses it.
        notes_seen = invoice.notes.count()
        typed = {name: request.POST.get(name, "").strip() for name in request.POST if name.startswith("line-")}
        error = ""
        if request.method == "POST":
            try:
                amounts = {
                    int(name.removeprefix("line-")): parse_amount(value, invoice.currency)
                    for name, value in typed.items()
                    if value
                }
                note = invoices.correct(
                    invoice=invoice,
                    amounts=amounts,
                    reason=request.POST.get("reason", ""),
                    user=request.user if request.user.is_authenticated else None,
                    notes_seen=int(request.POST.get("notes_seen", "")),
                )
            except InvoiceRefused as refused:
                error = " ".join(map(str, refused.fields.values())) or str(refused.message)
            except ValueError:  # missing or malformed form fields
                error = _("Enter amounts such as 5 or 1.90.")
            else:
                messages.success(request, _("%(number)s was issued.") % {"number": note.number})
                return redirect("admin:billing_invoice_change", note.pk)
        rows = [
            {
                "line": line,
                "left": money(remaining, invoice.currency),
                "is_open": remaining > 0 and invoice.kind == models.Invoice.Kinds.INVOICE,
                "typed": typed.get(f"line-{line.pk}", ""),
            }
            for line, remaining in invoices.correctable_lines(invoice)
        ]
        return render(
            request,
            "admin/correct_invoice.html",
            {
                **self.admin_site.each_context(request),
                "title": _("Credit note for %(number)s") % {"number": invoice.number},
                "invoice": invoice,
                "rows": rows,
                "error": error,
                "notes_seen": notes_seen,  # a hidden field
                "reason": request.POST.get("reason", ""),
                "back": reverse("admin:billing_invoice_change", args=[invoice.pk]),
            },
        )


class BillingPolicyForm(AmountForm):
    """The form of the billing policy; the trial credit is typed in major units."""

    minor_name = "trial_credit_minor"
    allows_zero = True

    class Meta:
        model = models.BillingPolicy
        exclude = ("trial_credit_minor",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fields["amount"].label = _("Trial credit (%(currency)s)") % {"currency": default_currency()}
        self.fields["amount"].help_text = _(
            "Granted once, when a customer activates the service. Enter 0 for no trial credit."
        )


@admin.register(models.BillingPolicy)
class BillingPolicyAdmin(ShowsAmounts, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """The single billing policy."""

    form = BillingPolicyForm
    fieldsets = (
        (gettext_lazy("Seller"), {"fields": ("seller_name", "seller_address", "seller_tax_id", "footer")}),
        (gettext_lazy("Numbering"), {"fields": ("invoice_prefix", "note_prefix")}),
        (gettext_lazy("Tax"), {"fields": ("tax_name", "tax_percent", "tax_inclusive")}),
        (
            gettext_lazy("Trials"),
            # Probes are free estimates; the columns keep the old name.
            {"fields": ("amount", "trial_credit_days", "probes_per_day", "probes_need_payment")},
        ),
        (gettext_lazy("Storage"), {"fields": ("free_storage_gb",)}),
    )

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Allowed only while no policy exists."""
        return not models.BillingPolicy.objects.exists() and bool(super().has_add_permission(request))

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never allowed."""
        return False


@admin.register(models.BillingDetails)
class BillingDetailsAdmin(ShowsAmounts, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """The recipient and tax of an organization's invoices."""

    list_display = ("organization", "name", "tax_id", "tax_percent", "tax_inclusive")
    autocomplete_fields = ("organization",)
    search_fields = ("organization__name", "name", "tax_id")


@admin.register(models.Budget)
class BudgetAdmin(ShowsAmounts, ReadOnlyAdmin):
    """Budgets that customers set."""

    list_display = ("organization", "user", "amount_minor", "updated_at")
    list_select_related = ("organization", "user")
    search_fields = ("organization__name",)


@admin.register(models.StorageBalance)
class StorageBalanceAdmin(ShowsAmounts, ReadOnlyAdmin):
    """The unpaid storage cost of each organization."""

    list_display = ("account", "due_minor", "unpaid_since", "mailed_at")
    list_select_related = ("account__organization",)
    search_fields = ("account__organization__name",)


@admin.register(models.StorageDay)
class StorageDayAdmin(ShowsAmounts, ReadOnlyAdmin):
    """The storage and its cost, by organization and day."""

    list_display = ("account", "day", "size_bytes", "free_bytes", "cost_minor")
    fields = list_display
    list_select_related = ("account__organization",)
    search_fields = ("account__organization__name",)
