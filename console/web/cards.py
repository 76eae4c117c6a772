"""Saved cards, and automatic top-ups from one of them.

The one rule: card numbers are typed at the payment provider's pages alone; here are labels and ids.
"""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods, require_POST

from billing import automatic, customers, selectors, wording
from billing.customers import SavedCard
from billing.errors import BillingError, NoWallet
from billing.models import Account, AutoTopUp
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member, refuse, tell
from console.web.amounts import AmountField
from console.web.wallet import picks


class AutomaticForm(forms.Form):
    """When, how much, and from which card; amounts are typed in the major unit and come out as minor."""

    threshold_minor = AmountField(label=gettext_lazy("When less is available than"))
    amount_minor = AmountField(label=gettext_lazy("Pay in"))
    method = forms.CharField(max_length=255)

    def __init__(self, *args: object, currency: str, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # passed through as they came
        for name in ("threshold_minor", "amount_minor"):
            self.fields[name].currency = currency  # type: ignore[attr-defined]  # an AmountField


@require_http_methods(["GET", "POST"])
@member(Capability.PAY)
def card_list(request: MemberRequest) -> HttpResponse:
    """The cards and the automatic top-up; a POST sets the latter."""
    account = _account(request)
    setup = AutoTopUp.objects.filter(account=account).first()
    if request.method != "POST":
        return _page(
            request, account, setup, AutomaticForm(currency=account.currency, initial=_initial(account, setup))
        )
    form = AutomaticForm(request.POST, currency=account.currency)
    if not form.is_valid():
        return _page(request, account, setup, form)
    try:
        automatic.switch_on(
            account=account,
            threshold_minor=form.cleaned_data["threshold_minor"],
            amount_minor=form.cleaned_data["amount_minor"],
            method_id=form.cleaned_data["method"],
            user=request.membership.user,
        )
    except BillingError as error:
        refuse(form, error)
        return _page(request, account, setup, form)
    messages.success(request, _("Automatic top-ups are on."))
    return redirect("card_list")


@require_POST
@member(Capability.PAY)
def card_automatic_off(request: MemberRequest) -> HttpResponse:
    """No more automatic top-ups."""
    automatic.switch_off(account=_account(request))
    messages.success(request, _("Automatic top-ups are off."))
    return redirect("card_list")


@require_POST
@member(Capability.PAY)
def card_add(request: MemberRequest) -> HttpResponse:
    """Go to the page where a card is saved."""
    try:
        return redirect(customers.save_card_page(account=_account(request), email=request.membership.user.email))
    except BillingError as error:
        tell(request, error)
        return redirect("card_list")


@require_POST
@member(Capability.PAY)
def card_default(request: MemberRequest) -> HttpResponse:
    """Use a card first."""
    return _change(request, customers.make_default, _("This card is used first now."))


@require_POST
@member(Capability.PAY)
def card_remove(request: MemberRequest) -> HttpResponse:
    """Forget a card."""
    return _change(request, customers.remove_card, _("The card is removed."))


def _change(request: MemberRequest, act: object, done: str) -> HttpResponse:
    try:
        act(organization=request.membership.organization, method_id=request.POST.get("method", ""))  # type: ignore[operator]  # one of two services
    except BillingError as error:
        tell(request, error)
    else:
        messages.success(request, done)
    return redirect("card_list")


def _account(request: MemberRequest) -> Account:
    account = selectors.wallet(request.membership.organization)
    if account is None:
        raise NoWallet
    return account


def _initial(account: Account, setup: AutoTopUp | None) -> dict[str, str]:
    """The amounts as they are set, or a sensible beginning."""
    if setup is None:
        threshold, amount, *_larger = picks(account.currency)
        return {"threshold_minor": f"{threshold:f}", "amount_minor": f"{amount:f}"}
    return {
        "threshold_minor": f"{wording.to_major(setup.threshold_minor, account.currency):f}",
        "amount_minor": f"{wording.to_major(setup.amount_minor, account.currency):f}",
    }


def _page(request: MemberRequest, account: Account, setup: AutoTopUp | None, form: AutomaticForm) -> HttpResponse:
    cards: list[SavedCard] = []
    problem = ""
    try:
        cards = customers.saved_cards(request.membership.organization)
    except BillingError as error:
        problem = str(error.message)
    context = {
        "account": account,
        "cards": cards,
        "problem": problem,
        "were_lost": not cards and not problem and customers.were_lost(request.membership.organization),
        "form": form,
        "setup": setup,
        "failure": wording.failure_sentence(setup.last_failure) if setup and setup.last_failure else "",
        "chosen": form.data.get("method") or (setup.method_id if setup else ""),
    }
    return render(request, "billing/card_list.html", context, status=422 if form.errors else 200)
