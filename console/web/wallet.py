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

from billing import budgets, credit, currencies, invoices, payments, receivables, selectors
from billing.amounts import to_major
from billing.errors import BillingError
from billing.models import Account, Hold, Receipt, TopUp
from console.accounts.models import Organization
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member
from console.web.amounts import AmountField, parse_row_id
from console.web.searching import MAX_QUERY_LENGTH

SUGGESTED_MULTIPLES = (4, 10, 20, 100)
"""Top-up amounts offered as buttons, as multiples of the smallest top-up. For $5 they are $20, $50, $100 and $500."""
PAGE_SIZE = 25
"""How many transactions or receipts one page shows."""
MAX_MATCHES = 250
"""Largest number of receipts that a search shows, the newest first: ten pages. More would make frequent words slow."""
MAX_LATEST_RECEIPTS = 6
"""How many receipts the wallet shows beside its transactions; a link leads to the others."""
HOLD_FIELDS = ("amount_minor", "metered_minor", "order__job__name", "order__job__state", "sweep__name", "sweep__state")
"""The columns that the wallet shows of an open hold."""
RECEIPT_FIELDS = (
    "title", "currency", "total_minor", "ceiling_minor", "created_at", "hold__quote__purchase",
    "hold__order__job__name", "hold__order__job__code_path", "hold__order__job__builtin_script",
    "hold__order__job__image__name",
)  # fmt: skip
"""The columns that lists show of a receipt; those of the quote and the job give its title in the reader's language."""
MAX_AMOUNT_DIGITS = 11
"""The most digits of an amount in the URL. A longer one is ignored, because `int` would raise an error for thousands of
digits. 11 are more than any payment has: `currencies.LARGEST_PAYMENT` has eight."""


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
    account = selectors.wallet_with_settings(request.membership.organization)
    if account is None:
        return render(request, "billing/no_wallet.html", {"heading": _("Wallet")})
    requested = request.GET.get("amount", "")
    if requested.isdecimal() and len(requested) <= MAX_AMOUNT_DIGITS:
        requested_minor = max(int(requested), settings.TOP_UP_MINIMUM_MINOR)
        amount_minor = currencies.round_up_for_payment(requested_minor, account.currency)
        amount = to_major(amount_minor, account.currency)
    else:
        amount = suggested_amounts(account.currency)[1]  # the second smallest is preselected
    return _render_wallet(request, account, TopUpForm(currency=account.currency, initial={"amount": f"{amount:f}"}))


@require_http_methods(["GET", "POST"])
@member(Capability.PAY)
def top_up(request: MemberRequest) -> HttpResponse:
    """Start a top-up and redirect to its payment page.

    The page with a refused form has this URL. If its form is sent after the session has ended, the log-in leads back
    here with GET, without the form: show the wallet.
    """
    account = selectors.wallet_with_settings(request.membership.organization)
    if account is None or request.method == "GET":
        return redirect("wallet")
    form = TopUpForm(request.POST, currency=account.currency)
    if not form.is_valid():
        return _render_wallet(request, account, form)
    try:
        top_up = payments.start_top_up(
            account=account,
            amount_minor=form.cleaned_data["amount"],
            user=request.membership.user,
            save_card="save_card" in request.POST,
        )
    except BillingError as error:
        form.add_error("amount", str(error.message))
        return _render_wallet(request, account, form)
    return redirect(top_up.checkout_url)


@require_GET
@member(Capability.VIEW)
def pending_top_up(request: MemberRequest) -> HttpResponse:
    """Return the notice of a pending top-up, for htmx, which polls this view. After the payment, reload the wallet."""
    account = selectors.wallet(request.membership.organization)
    newest = _newest_top_up(account) if account else None
    if newest is not None and newest.state == TopUp.States.PENDING:
        return render(request, "billing/_pending_top_up.html", {"top_up": newest})
    if newest is not None and newest.state == TopUp.States.PAID:
        messages.success(request, _("Payment received."))
    return HttpResponseClientRedirect(reverse("wallet"))


@require_GET
@member(Capability.VIEW)
def receipt_list(request: MemberRequest) -> HttpResponse:
    """List the receipts: all, or those that match `?q=`."""
    query = request.GET.get("q", "").strip()[:MAX_QUERY_LENGTH]
    receipts, page_number = _titled_receipts(request.membership.organization), request.GET.get("page")
    if not query:
        page = Paginator(receipts, PAGE_SIZE).get_page(page_number)
        return render(request, "billing/receipt_list.html", {"page": page})
    # Read the ids of all matches from an index, and only the receipts of one page from the table.
    matching_pks = list(_matching(receipts, query).values_list("pk", flat=True)[: MAX_MATCHES + 1])
    pks_page: Page[Any] = Paginator(matching_pks[:MAX_MATCHES], PAGE_SIZE).get_page(page_number)
    pks_page.object_list = list(receipts.filter(pk__in=list(pks_page)))
    context = {"page": pks_page, "query": query, "is_cut": len(matching_pks) > MAX_MATCHES, "max_matches": MAX_MATCHES}
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
            "corrections": invoices.corrections_of(receipt),
            # None for the receipt of a storage charge, whose hold has no order.
            "job": receipt.hold.order.job if hasattr(receipt.hold, "order") else None,
        },
    )


def _titled_holds(account: Account) -> QuerySet[Hold]:
    """Return a wallet's open holds, newest first, with what the wallet shows of their jobs and sweeps."""
    holds = Hold.objects.filter(account=account, state=Hold.States.HELD).order_by("-id")
    return holds.select_related("order__job", "sweep").only(*HOLD_FIELDS)


def _titled_receipts(organization: Organization) -> QuerySet[Receipt]:
    """Return an organization's receipts, newest first, with the columns and related rows that lists show."""
    related = ("hold__quote", "hold__order__job__image")
    return selectors.receipts_for(organization).select_related(*related).only(*RECEIPT_FIELDS)


def _matching(receipts: QuerySet[Receipt], query: str) -> QuerySet[Receipt]:
    """Return the receipts that match a search: "R-7" is a receipt's number, "#7" a job's, other text a part of a title.

    The title ("#7 name") is stored in the receipt, because it would take seconds to read the names of the jobs of
    100,000 receipts.
    """
    by_title = Q(title__icontains=query)
    number = parse_row_id(query.upper().removeprefix("R-").removeprefix("#"))
    if number is None:
        return receipts.filter(by_title)
    if query.startswith("#"):
        return receipts.filter(title__startswith=f"#{number} ")
    if query.upper().startswith("R-"):
        return receipts.filter(pk=number)
    return receipts.filter(by_title | Q(pk=number))


def _render_wallet(request: MemberRequest, account: Account, form: TopUpForm) -> HttpResponse:
    """Render the wallet with the form of a top-up, and with a notice until a payment is credited."""
    organization = request.membership.organization
    pending = None
    if "paid" in request.GET:  # the payment page returns to `?paid`
        newest = _newest_top_up(account)
        pending = newest if newest is not None and newest.state == TopUp.States.PENDING else None
        # `account` was read before `newest`. If the top-up was credited in between, `account` has the old balance, and
        # the page has no notice that would reload it later.
        account.refresh_from_db()
    storage = getattr(account, "storage_balance", None)  # a one-to-one relation: without a row there is no attribute
    entries_page = Paginator(selectors.wallet_entries(account), PAGE_SIZE).get_page(request.GET.get("page"))
    return render(
        request,
        "billing/wallet.html",
        {
            "account": account,
            "wallet": account,  # its name in base.html, which would query the wallet again
            "form": form,
            "suggested_amounts": suggested_amounts(account.currency),
            "page": entries_page,
            "holds": _titled_holds(account),
            "receipts": _titled_receipts(organization)[:MAX_LATEST_RECEIPTS],
            "credit_minor": credit.credit_minor(account),
            "owed_minor": receivables.owed_minor(account),
            "storage_unpaid_minor": storage.unpaid_minor if storage else 0,
            "auto_top_up": getattr(account, "auto_top_up", None),
            "budgets": budgets.states_of(account),
            "runway": budgets.runway_of(account),
            "pending_top_up": pending,
        },
        status=200 if not form.errors else 422,
    )


def suggested_amounts(currency: str) -> list[Decimal]:
    """Return the suggested amounts of a top-up in major units, smallest first. Whole amounts have no decimals."""
    minimum = currencies.round_up_for_payment(settings.TOP_UP_MINIMUM_MINOR, currency)
    amounts = [to_major(minimum * multiple, currency) for multiple in SUGGESTED_MULTIPLES]
    return [amount.to_integral_value() if amount == amount.to_integral_value() else amount for amount in amounts]


def _newest_top_up(account: Account) -> TopUp | None:
    return account.top_ups.order_by("-created_at").first()
