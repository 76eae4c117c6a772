"""The wallet: what is in it, what is held and why, paying in, what moved, and receipts."""

from __future__ import annotations

from decimal import Decimal

from django import forms
from django.conf import settings
from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_GET, require_http_methods
from django_htmx.http import HttpResponseClientRedirect

from billing import budgets, credit, currencies, payments, receivables, selectors, wording
from billing.errors import BillingError
from billing.models import Account, AutoTopUp, TopUp
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member
from console.web.amounts import AmountField

QUICK_PICKS = (4, 10, 20, 100)
"""Amounts offered at one click: so many times the least one."""
PAGE = 25


class TopUpForm(forms.Form):
    """An amount to pay in: typed in the currency's major unit, in minor units when it is valid."""

    amount = AmountField(label=gettext_lazy("Amount"))

    def __init__(self, *args: object, currency: str, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # passed through as they came
        self.fields["amount"].currency = currency  # type: ignore[attr-defined]  # an AmountField


@require_GET
@member(Capability.VIEW)
def wallet(request: MemberRequest) -> HttpResponse:
    """The wallet's page. `?amount=` fills the top-up form, in minor units."""
    account = selectors.wallet(request.membership.organization)
    if account is None:
        return render(request, "billing/no_wallet.html")
    asked = request.GET.get("amount", "")
    wanted = max(int(asked), settings.TOP_UP_MINIMUM_MINOR) if asked.isdecimal() and len(asked) < 12 else None
    start = picks(account.currency)[1]
    if wanted is not None:
        start = wording.to_major(currencies.payable(wanted, account.currency), account.currency)
    return _page(request, account, TopUpForm(currency=account.currency, initial={"amount": f"{start:f}"}))


@require_http_methods(["GET", "POST"])
@member(Capability.PAY)
def top_up(request: MemberRequest) -> HttpResponse:
    """Go to the payment page for an amount."""
    account = selectors.wallet(request.membership.organization)
    if account is None or request.method == "GET":
        return redirect("wallet")
    form = TopUpForm(request.POST, currency=account.currency)
    if not form.is_valid():
        return _page(request, account, form)
    try:
        started = payments.start_top_up(
            account=account,
            amount_minor=form.cleaned_data["amount"],
            user=request.membership.user,
            save_card="save_card" in request.POST,
        )
    except BillingError as error:
        form.add_error("amount", str(error.message))
        return _page(request, account, form)
    return redirect(started.checkout_url)


@require_GET
@member(Capability.VIEW)
def arrival(request: MemberRequest) -> HttpResponse:
    """Asked again and again after a payment: goes to the fresh wallet once the newest top-up has come in."""
    account = selectors.wallet(request.membership.organization)
    newest = account.top_ups.first() if account else None
    if newest is not None and newest.state == TopUp.States.PENDING:
        return render(request, "billing/_arrival.html", {"top_up": newest})
    if newest is not None and newest.state == TopUp.States.PAID:
        messages.success(request, _("The payment has come in."))
    return HttpResponseClientRedirect(reverse("wallet"))


@require_GET
@member(Capability.VIEW)
def receipt_list(request: MemberRequest) -> HttpResponse:
    """Every receipt."""
    page = Paginator(selectors.receipts_for(request.membership.organization), PAGE).get_page(request.GET.get("page"))
    return render(request, "billing/receipt_list.html", {"page": page})


@require_GET
@member(Capability.VIEW)
def receipt_detail(request: MemberRequest, pk: int) -> HttpResponse:
    """One receipt, made to be printed."""
    receipt = selectors.receipt_for(request.membership.organization, pk)
    return render(
        request,
        "billing/receipt_detail.html",
        {
            "receipt": receipt,
            "released_minor": receipt.ceiling_minor - receipt.total_minor,
            "job": receipt.hold.order.job,
        },
    )


def _page(request: MemberRequest, account: Account, form: TopUpForm) -> HttpResponse:
    organization = request.membership.organization
    page = Paginator(selectors.movements(organization), PAGE).get_page(request.GET.get("page"))
    return render(
        request,
        "billing/wallet.html",
        {
            "account": account,
            "form": form,
            "quick_picks": picks(account.currency),
            "page": page,
            "holds": selectors.open_holds(organization).select_related("order__job"),
            "receipts": selectors.receipts_for(organization)[:6],
            "credit_minor": credit.credit_minor(account),
            "owed_minor": receivables.owed_minor(account),
            "automatic": AutoTopUp.objects.filter(account=account).first(),
            "budgets": budgets.states(organization),
            "balance": budgets.balance(account),
            "arriving": _arriving(account) if "paid" in request.GET else None,
        },
        status=200 if not form.errors else 422,
    )


def picks(currency: str) -> list[Decimal]:
    """Amounts to begin with, in the major unit, as they are typed."""
    least = currencies.payable(settings.TOP_UP_MINIMUM_MINOR, currency)
    amounts = [wording.to_major(least * times, currency) for times in QUICK_PICKS]
    return [amount.to_integral_value() if amount == amount.to_integral_value() else amount for amount in amounts]


def _arriving(account: Account) -> TopUp | None:
    """The top-up a customer has just paid, until the payment provider's word of it has come."""
    newest = account.top_ups.first()
    return newest if newest is not None and newest.state == TopUp.States.PENDING else None
