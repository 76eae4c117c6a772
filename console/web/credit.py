"""Credit: what there is, until when, what became of it, and a voucher to enter."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods

from billing import credit, selectors, wording
from billing.errors import VoucherRefused
from console.accounts.errors import NotAllowed
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member, refuse


class VoucherForm(forms.Form):
    """A code to enter."""

    code = forms.CharField(
        label=gettext_lazy("Voucher code"),
        max_length=64,
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )


@require_http_methods(["GET", "POST"])
@member(Capability.VIEW)
def credit_list(request: MemberRequest) -> HttpResponse:
    """The credits in the order they are spent; posting a code enters a voucher."""
    account = selectors.wallet(request.membership.organization)
    if account is None:
        return render(request, "billing/no_wallet.html")
    form = VoucherForm(request.POST or None)
    if request.method == "POST":
        if not request.membership.allows(Capability.PAY):
            raise NotAllowed
        if form.is_valid():
            try:
                lot = credit.redeem(account=account, code=form.cleaned_data["code"], user=request.membership.user)
            except VoucherRefused as error:
                refuse(form, error)
            else:
                given = wording.money(lot.amount_minor, account.currency)
                messages.success(request, _("%(amount)s of credit is in the wallet.") % {"amount": given})
                return redirect("credit_list")
    now = timezone.now()
    return render(
        request,
        "billing/credit_list.html",
        {
            "account": account,
            "form": form,
            "lots": [
                (lot, lot.left_minor > 0 and (lot.expires_at is None or lot.expires_at > now))
                for lot in credit.credits_for(request.membership.organization)
            ],
            "credit_minor": credit.credit_minor(account),
            "paid_minor": credit.paid_minor(account),
        },
        status=422 if form.errors else 200,
    )
