"""Pages of saved cards and automatic top-ups. Card numbers are typed on the payment provider's pages only."""

from __future__ import annotations

from collections.abc import Callable

from django import forms
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods, require_POST

from billing import auto_topup, customers, selectors
from billing.amounts import to_major
from billing.customers import SavedCard
from billing.errors import BillingError, NoWallet
from billing.messages import payment_failure_sentence
from billing.models import Account, AutoTopUp
from console.accounts.roles import Capability
from console.core.errors import CustomerError
from console.web.access import MemberRequest, add_errors, errors_as_message, member, show_error
from console.web.amounts import AmountField
from console.web.wallet import suggested_amounts


class AutoTopUpForm(forms.Form):
    """The form of automatic top-ups. Amounts are typed in major units and cleaned to minor units."""

    threshold_minor = AmountField(label=gettext_lazy("When available funds fall below"))
    amount_minor = AmountField(label=gettext_lazy("Top up by"))
    method = forms.CharField(max_length=255)
    """The id of a saved card at the payment provider."""

    def __init__(self, *args: object, currency: str, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # passed through unchanged
        for name in ("threshold_minor", "amount_minor"):
            self.fields[name].currency = currency  # type: ignore[attr-defined]  # an AmountField


@require_http_methods(["GET", "POST"])
@member(Capability.PAY)
def card_list(request: MemberRequest) -> HttpResponse:
    """Show the saved cards and the form of automatic top-ups. POST saves the form and switches them on."""
    account = selectors.wallet(request.membership.organization)
    if account is None:
        return render(request, "billing/no_wallet.html", {"heading": _("Cards and automatic top-ups")})
    setup = AutoTopUp.objects.filter(account=account).first()
    if request.method != "POST":
        form = AutoTopUpForm(currency=account.currency, initial=_initial_amounts(account, setup))
        return _render_cards(request, account, setup, form)
    form = AutoTopUpForm(request.POST, currency=account.currency)
    if not form.is_valid():
        return _render_cards(request, account, setup, form)
    try:
        auto_topup.switch_on(
            account=account,
            threshold_minor=form.cleaned_data["threshold_minor"],
            amount_minor=form.cleaned_data["amount_minor"],
            method_id=form.cleaned_data["method"],
            user=request.membership.user,
        )
    except BillingError as error:
        add_errors(form, error)
        return _render_cards(request, account, setup, form)
    messages.success(request, _("Automatic top-ups are on."))
    return redirect("card_list")


@require_POST
@member(Capability.PAY)
def automatic_top_up_off(request: MemberRequest) -> HttpResponse:
    """Switch automatic top-ups off."""
    with errors_as_message(request):
        auto_topup.switch_off(account=_account(request))
        messages.success(request, _("Automatic top-ups are off."))
    return redirect("card_list")


@require_POST
@member(Capability.PAY)
def card_add(request: MemberRequest) -> HttpResponse:
    """Redirect to the provider's page that saves a card."""
    try:
        return redirect(customers.create_card_page(account=_account(request), email=request.membership.user.email))
    except CustomerError as error:
        show_error(request, error)
        return redirect("card_list")


@require_POST
@member(Capability.PAY)
def card_default(request: MemberRequest) -> HttpResponse:
    """Make a card the default."""
    return _change_card(request, customers.make_default, _("This is now the default card."))


@require_POST
@member(Capability.PAY)
def card_remove(request: MemberRequest) -> HttpResponse:
    """Delete a card."""
    return _change_card(request, customers.remove_card, _("The card was removed."))


def _change_card(request: MemberRequest, change: Callable[..., object], success: str) -> HttpResponse:
    """Call `change` with the chosen card, and show `success` or the error."""
    try:
        change(organization=request.membership.organization, method_id=request.POST.get("method", ""))
    except BillingError as error:
        show_error(request, error)
    else:
        messages.success(request, success)
    return redirect("card_list")


def _account(request: MemberRequest) -> Account:
    """Return the organization's wallet. Raises NoWallet."""
    account = selectors.wallet(request.membership.organization)
    if account is None:
        raise NoWallet
    return account


def _initial_amounts(account: Account, setup: AutoTopUp | None) -> dict[str, str]:
    """Return the amounts to show in the form: those that were saved, or the two smallest suggested top-ups."""
    if setup is None:
        threshold, amount, *_larger = suggested_amounts(account.currency)
        return {"threshold_minor": f"{threshold:f}", "amount_minor": f"{amount:f}"}
    return {
        "threshold_minor": f"{to_major(setup.threshold_minor, account.currency):f}",
        "amount_minor": f"{to_major(setup.amount_minor, account.currency):f}",
    }


def _render_cards(
    request: MemberRequest, account: Account, setup: AutoTopUp | None, form: AutoTopUpForm
) -> HttpResponse:
    """Render the page. If the provider does not answer, the problem is in place of the cards."""
    cards: list[SavedCard] = []
    problem = ""
    try:
        cards = customers.saved_cards(request.membership.organization)
    except BillingError as error:
        problem = str(error.message)
    # The page explains missing cards if the provider deleted its record of the organization, and with it the cards.
    has_deleted_customer = not cards and not problem and customers.has_deleted_customer(request.membership.organization)
    context = {
        "account": account,
        "cards": cards,
        "problem": problem,
        "has_deleted_customer": has_deleted_customer,
        "form": form,
        "auto_top_up": setup,
        "failure": payment_failure_sentence(setup.last_failure) if setup and setup.last_failure else "",
        "chosen_method": form.data.get("method") or (setup.method_id if setup else ""),
    }
    return render(request, "billing/card_list.html", context, status=422 if form.errors else 200)
