"""Pages of the wallet: balance, holds, top-ups, transactions, receipts."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.core.paginator import Page, Paginator
from django.db.models import Q, QuerySet
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_GET, require_http_methods
from django_htmx.http import HttpResponseClientRedirect

from billing import budgets, credit, currencies, payments, receivables, selectors, storage_charges
from billing import messages as billing_messages
from billing.errors import BillingError
from billing.models import Account, AutoTopUp, Receipt, TopUp
from console.accounts.models import Organization
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member
from console.web.amounts import AmountField, parse_row_id
from console.web.searching import MAX_QUERY_LENGTH

SUGGESTED_MULTIPLES = (4, 10, 20, 100)
"""Top-up amounts offered as buttons, as multiples of the minimum."""
PAGE_SIZE = 25
"""How many transactions or receipts one page shows."""
MAX_MATCHES = 1000
"""Largest number of receipts that a search shows, the newest first: nobody reads more than 40 pages."""
MAX_AMOUNT_DIGITS = 11
"""Longer amounts in a URL are ignored: no reasonable top-up has as many digits, even in a small currency."""


class TopUpForm(forms.Form):
    """The form of a top-up, typed in major units and cleaned to minor units."""

    amount = AmountField(label=gettext_lazy("Amount"))

    def __init__(self, *args: object, currency: str, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # passed through unchanged
        self.fields["amount"].currency = currency  # type: ignore[attr-defined]  # an AmountField


@require_GET
@member(Capability.VIEW)
def wallet(request: MemberRequest) -> HttpResponse:
    """Show the wallet. `?amount=` (minor units) fills in the top-up form."""
    account = selectors.wallet(request.membership.organization)
    if account is None:
        return render(request, "billing/no_wallet.html")
    requested = request.GET.get("amount", "")
    if requested.isdecimal() and len(requested) <= MAX_AMOUNT_DIGITS:
        requested_minor = max(int(requested), settings.TOP_UP_MINIMUM_MINOR)
        amount_minor = currencies.round_up_for_payment(requested_minor, account.currency)
        amount = billing_messages.to_major(amount_minor, account.currency)
    else:
        amount = suggested_amounts(account.currency)[1]  # the second smallest is preselected
    return _page(request, account, TopUpForm(currency=account.currency, initial={"amount": f"{amount:f}"}))


@require_http_methods(["GET", "POST"])
@member(Capability.PAY)
def top_up(request: MemberRequest) -> HttpResponse:
    """Redirect to the payment page. A GET, which follows a log-in, shows the wallet instead."""
    account = selectors.wallet(request.membership.organization)
    if account is None or request.method == "GET":
        return redirect("wallet")
    form = TopUpForm(request.POST, currency=account.currency)
    if not form.is_valid():
        return _page(request, account, form)
    try:
        top_up = payments.start_top_up(
            account=account,
            amount_minor=form.cleaned_data["amount"],
            user=request.membership.user,
            save_card="save_card" in request.POST,
        )
    except BillingError as error:
        form.add_error("amount", str(error.message))
        return _page(request, account, form)
    return redirect(top_up.checkout_url)


@require_GET
@member(Capability.VIEW)
def arrival(request: MemberRequest) -> HttpResponse:
    """Return the state of the newest top-up; htmx polls it after a payment. When it is final, reload the wallet."""
    account = selectors.wallet(request.membership.organization)
    newest = account.top_ups.first() if account else None
    if newest is not None and newest.state == TopUp.States.PENDING:
        return render(request, "billing/_arrival.html", {"top_up": newest})
    if newest is not None and newest.state == TopUp.States.PAID:
        messages.success(request, _("Payment received."))
    return HttpResponseClientRedirect(reverse("wallet"))


@require_GET
@member(Capability.VIEW)
def receipt_list(request: MemberRequest) -> HttpResponse:
    """List the receipts: all, or those that match `?q=`."""
    query = request.GET.get("q", "").strip()[:MAX_QUERY_LENGTH]
    receipts, number = _receipts(request.membership.organization), request.GET.get("page")
    if not query:
        return render(request, "billing/receipt_list.html", {"page": Paginator(receipts, PAGE_SIZE).get_page(number)})
    # One scan of an index returns the ids; only the rows of the page are read.
    matching_pks = list(_matching(receipts, query).values_list("pk", flat=True)[: MAX_MATCHES + 1])
    page: Page[Any] = Paginator(matching_pks[:MAX_MATCHES], PAGE_SIZE).get_page(number)
    page.object_list = list(receipts.filter(pk__in=list(page)))
    context = {"page": page, "query": query, "is_cut": len(matching_pks) > MAX_MATCHES, "max_matches": MAX_MATCHES}
    return render(request, "billing/receipt_list.html", context)


@require_GET
@member(Capability.VIEW)
def receipt_detail(request: MemberRequest, pk: int) -> HttpResponse:
    """Show a receipt as a printable page."""
    receipt = selectors.receipt_for(request.membership.organization, pk)
    return render(
        request,
        "billing/receipt_detail.html",
        {
            "receipt": receipt,
            "released_minor": receipt.ceiling_minor - receipt.total_minor,
            "job": receipt.hold.order.job if hasattr(receipt.hold, "order") else None,
        },
    )


def _receipts(organization: Organization) -> QuerySet[Receipt]:
    """Return an organization's receipts with the related rows that their titles need."""
    return selectors.receipts_for(organization).select_related(
        "hold__quote", "hold__order__quote", "hold__order__job__image"
    )


def _matching(receipts: QuerySet[Receipt], query: str) -> QuerySet[Receipt]:
    """Return the receipts whose title ("#7 name") contains the query. "R-7" is a receipt's number, "#7" a job's.

    The title is a column of the receipt: with 100,000 receipts, it would take seconds to read the names of their jobs.
    """
    if not query:
        return receipts
    by_title = Q(title__icontains=query)
    number = parse_row_id(query.upper().removeprefix("R-").removeprefix("#"))
    if number is None:
        return receipts.filter(by_title)
    if query.startswith("#"):
        return receipts.filter(title__startswith=f"#{number} ")
    return receipts.filter(Q(pk=number) if query.upper().startswith("R-") else by_title | Q(pk=number))


def _page(request: MemberRequest, account: Account, form: TopUpForm) -> HttpResponse:
    organization = request.membership.organization
    pending = None
    if "paid" in request.GET:  # the payment page returns to `?paid`
        pending = _pending_top_up(account)
        # If the payment arrived after the view read the wallet, nothing is pending and the page would not poll for the
        # new balance. So read the balance again.
        account.refresh_from_db()
    page = Paginator(selectors.movements(organization), PAGE_SIZE).get_page(request.GET.get("page"))
    return render(
        request,
        "billing/wallet.html",
        {
            "account": account,
            "form": form,
            "suggested_amounts": suggested_amounts(account.currency),
            "page": page,
            "holds": selectors.open_holds(organization).select_related("order__job", "sweep"),
            "receipts": _receipts(organization)[:6],
            "credit_minor": credit.credit_minor(account),
            "owed_minor": receivables.owed_minor(account),
            "storage_unpaid_minor": storage_charges.unpaid_minor(account),
            "auto_top_up": AutoTopUp.objects.filter(account=account).first(),
            "budgets": budgets.states(organization),
            "balance": budgets.balance_of(account),
            "pending_top_up": pending,
        },
        status=200 if not form.errors else 422,
    )


def suggested_amounts(currency: str) -> list[Decimal]:
    """Return the suggested amounts in major units, the smallest first, and whole amounts without `.00`."""
    minimum = currencies.round_up_for_payment(settings.TOP_UP_MINIMUM_MINOR, currency)
    amounts = [billing_messages.to_major(minimum * multiple, currency) for multiple in SUGGESTED_MULTIPLES]
    return [amount.to_integral_value() if amount == amount.to_integral_value() else amount for amount in amounts]


def _pending_top_up(account: Account) -> TopUp | None:
    """Return the top-up that the customer just paid, until the provider confirms it."""
    newest = account.top_ups.first()
    return newest if newest is not None and newest.state == TopUp.States.PENDING else None
