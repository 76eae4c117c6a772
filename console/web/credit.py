"""The page of credit: each grant ("lot") with its amount, expiry and use, and the form that redeems a voucher."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods

from billing import credit, selectors
from billing.amounts import money
from console.accounts.roles import Capability
from console.core.errors import NotAllowed
from console.web.access import MemberRequest, errors_in_form, member


class VoucherForm(forms.Form):
    """The form of a voucher code."""

    code = forms.CharField(
        label=gettext_lazy("Voucher code"),
        max_length=64,
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )


@require_http_methods(["GET", "POST"])
@member(Capability.VIEW)
def credit_list(request: MemberRequest) -> HttpResponse:
    """List the lots of credit in the order in which they are spent. POST redeems a voucher if the member may pay."""
    account = selectors.wallet(request.membership.organization)
    if account is None:
        return render(request, "billing/no_wallet.html", {"heading": _("Credit")})
    form = VoucherForm(request.POST or None)
    if request.method == "POST":
        if not request.membership.allows(Capability.PAY):
            raise NotAllowed
        if form.is_valid():
            with errors_in_form(form):
                lot = credit.redeem(account=account, code=form.cleaned_data["code"], user=request.membership.user)
                amount = money(lot.amount_minor, account.currency)
                messages.success(request, _("%(amount)s of credit was added to your wallet.") % {"amount": amount})
                return redirect("credit_list")
    now = timezone.now()
    lots_with_state = [  # pairs: a lot, and whether it can still be spent
        (lot, lot.left_minor > 0 and (lot.expires_at is None or lot.expires_at > now))
        for lot in credit.lots_of(request.membership.organization)
    ]
    return render(
        request,
        "billing/credit_list.html",
        {
            "account": account,
            "form": form,
            "lots": lots_with_state,
            "credit_minor": credit.credit_minor(account),
            "paid_minor": credit.paid_minor(account),  # the rest of the available balance
        },
        status=422 if form.errors else 200,
    )
