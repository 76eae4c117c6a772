"""Invoices and credit notes: the list, one as a page, its files, and whom they are for."""

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

from billing import documents, exports, invoices, selectors
from billing.errors import DocumentUnavailable
from billing.models import BillingDetails
from billing.taxes import tax_for
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member
from console.web.costs import csv_file

PAGE = 25


class DetailsForm(forms.ModelForm):  # type: ignore[type-arg]  # at run time it takes no parameters
    """What a customer says of itself; its tax is an administrator's to set."""

    class Meta:
        model = BillingDetails
        fields = ("name", "address", "tax_id")
        widgets = {"address": forms.Textarea(attrs={"rows": 4})}


@require_GET
@member(Capability.PAY)
def invoice_list(request: MemberRequest) -> HttpResponse:
    """Every invoice and credit note, and what is on none yet."""
    organization = request.membership.organization
    account = selectors.wallet(organization)
    if account is None:
        return render(request, "billing/no_wallet.html")
    page = Paginator(invoices.invoices_for(organization), PAGE).get_page(request.GET.get("page"))
    details = BillingDetails.objects.filter(organization=organization).first()
    return render(
        request,
        "billing/invoice_list.html",
        {
            "page": page,
            "account": account,
            "open_minor": invoices.uninvoiced_minor(organization),
            "details": details,
            "tax": tax_for(organization),
        },
    )


@require_POST
@member(Capability.PAY)
def invoice_new(request: MemberRequest) -> HttpResponse:
    """Write an invoice of all that is on none yet."""
    made = invoices.issue(organization=request.membership.organization, user=request.membership.user)
    if made is None:
        messages.info(request, _("Nothing was charged since the last invoice."))
        return redirect("invoice_list")
    return redirect("invoice_detail", made.pk)


@require_GET
@member(Capability.PAY)
def invoice_detail(request: MemberRequest, pk: int) -> HttpResponse:
    """One document, as a page that can be printed."""
    invoice = invoices.invoice_for(request.membership.organization, pk)
    return render(request, "billing/invoice_detail.html", documents.context(invoice) | {"notes": invoice.notes.all()})


@require_GET
@member(Capability.PAY)
def invoice_pdf(request: MemberRequest, pk: int) -> HttpResponse:
    """One document as a file, in the language of `?language=`, or of the page."""
    invoice = invoices.invoice_for(request.membership.organization, pk)
    try:
        content = documents.pdf(invoice=invoice, language=request.GET.get("language", get_language() or "en"))
    except DocumentUnavailable as error:
        messages.error(request, str(error.message))
        return redirect("invoice_detail", pk)
    response = HttpResponse(content, content_type="application/pdf")
    response["Content-Disposition"] = content_disposition_header(True, f"{invoice.number}.pdf") or ""
    return response


@require_GET
@member(Capability.PAY)
def invoice_csv(request: MemberRequest, pk: int) -> StreamingHttpResponse:
    """One document with every line of every receipt."""
    invoice = invoices.invoice_for(request.membership.organization, pk)
    return csv_file(exports.invoice_csv(invoice), f"{invoice.number}.csv")


@require_http_methods(["GET", "POST"])
@member(Capability.PAY)
def billing_details(request: MemberRequest) -> HttpResponse:
    """Whom the next invoices are for; those that are written stay as they are."""
    organization = request.membership.organization
    known = BillingDetails.objects.filter(organization=organization).first()
    details = known or BillingDetails(organization=organization)
    form = DetailsForm(request.POST or None, instance=details)
    form.fields["name"].widget.attrs["placeholder"] = organization.name
    if request.method == "POST" and form.is_valid():
        form.save()
        messages.success(request, _("The next invoice is written with these details."))
        return redirect("invoice_list")
    return render(request, "billing/details.html", {"form": form}, status=422 if form.errors else 200)
