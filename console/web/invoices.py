"""Pages of invoices and credit notes, their files, and billing details."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.utils.http import content_disposition_header
from django.utils.translation import get_language
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from billing import exports, invoices, selectors
from billing import invoice_pdf as billing_invoice_pdf
from billing.errors import DocumentUnavailable
from billing.models import BillingDetails
from billing.taxes import tax_for
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member
from console.web.costs import csv_file

PAGE_SIZE = 25
"""Invoices and credit notes per page of the list."""


class DetailsForm(forms.ModelForm):  # type: ignore[type-arg]  # at run time it takes no parameters
    """The form of billing details. It lacks the tax, which only administrators of the console set."""

    class Meta:
        model = BillingDetails
        fields = ("name", "address", "tax_id")
        widgets = {"address": forms.Textarea(attrs={"rows": 4})}


@require_GET
@member(Capability.PAY)
def invoice_list(request: MemberRequest) -> HttpResponse:
    """List invoices and credit notes, and show the amount that is not invoiced yet."""
    organization = request.membership.organization
    account = selectors.wallet(organization)
    if account is None:
        return render(request, "billing/no_wallet.html", {"heading": _("Invoices")})
    page = Paginator(invoices.invoices_for(organization), PAGE_SIZE).get_page(request.GET.get("page"))
    details = BillingDetails.objects.filter(organization=organization).first()
    return render(
        request,
        "billing/invoice_list.html",
        {
            "page": page,
            "account": account,
            "uninvoiced_minor": invoices.uninvoiced_minor(organization),
            "details": details,
            "tax": tax_for(organization),
        },
    )


@require_POST
@member(Capability.PAY)
def invoice_new(request: MemberRequest) -> HttpResponse:
    """Issue an invoice for all uninvoiced charges."""
    invoice = invoices.issue(organization=request.membership.organization, user=request.membership.user)
    if invoice is None:
        messages.info(request, _("There are no charges since the last invoice."))
        return redirect("invoice_list")
    return redirect("invoice_detail", invoice.pk)


@require_GET
@member(Capability.PAY)
def invoice_detail(request: MemberRequest, pk: int) -> HttpResponse:
    """Show an invoice as a printable page."""
    invoice = invoices.invoice_for(request.membership.organization, pk)
    context = billing_invoice_pdf.context(invoice) | {"notes": invoice.notes.all()}  # its credit notes
    return render(request, "billing/invoice_detail.html", context)


@require_GET
@member(Capability.PAY)
def invoice_pdf(request: MemberRequest, pk: int) -> HttpResponse:
    """Return an invoice as PDF, in the language of the parameter `language`, or else of the user."""
    invoice = invoices.invoice_for(request.membership.organization, pk)
    try:
        content = billing_invoice_pdf.pdf(invoice=invoice, language=request.GET.get("language", get_language() or "en"))
    except DocumentUnavailable as error:
        messages.error(request, str(error.message))
        return redirect("invoice_detail", pk)
    response = HttpResponse(content, content_type="application/pdf")
    disposition = content_disposition_header(as_attachment=True, filename=f"{invoice.number}.pdf")
    response["Content-Disposition"] = disposition or ""
    return response


@require_GET
@member(Capability.PAY)
def invoice_csv(request: MemberRequest, pk: int) -> StreamingHttpResponse:
    """Return an invoice as CSV with all receipt lines."""
    invoice = invoices.invoice_for(request.membership.organization, pk)
    return csv_file(exports.invoice_csv(invoice), f"{invoice.number}.csv")


@require_http_methods(["GET", "POST"])
@member(Capability.PAY)
def billing_details(request: MemberRequest) -> HttpResponse:
    """Edit the billing details, which future invoices use."""
    organization = request.membership.organization
    existing = BillingDetails.objects.filter(organization=organization).first()
    details = existing or BillingDetails(organization=organization)
    form = DetailsForm(request.POST or None, instance=details)
    form.fields["name"].widget.attrs["placeholder"] = organization.name  # printed if the name is empty
    if form.is_valid():
        form.save()
        messages.success(request, _("The billing details were saved. The next invoice uses them."))
        return redirect("invoice_list")
    return render(request, "billing/details.html", {"form": form}, status=422 if form.errors else 200)
