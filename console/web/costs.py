"""Where the money goes: spend of a month told apart, what is held and why, the forecast, and the budgets."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_GET, require_POST

from billing import budgets, costs, exports, selectors, wording
from billing.models import Account
from console.accounts import selectors as accounts
from console.accounts.errors import CustomerError
from console.accounts.models import Membership
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member, tell
from console.web.amounts import row_number

TITLES = {
    "member": gettext_lazy("Member"),
    "workspace": gettext_lazy("Workspace"),
    "node_spec": gettext_lazy("Node spec"),
}


@require_GET
@member(Capability.VIEW)
def cost_list(request: MemberRequest) -> HttpResponse:
    """A month's costs. `?month=2026-11` chooses it, `?by=member` what the chart is told apart by."""
    organization = request.membership.organization
    account = selectors.wallet(organization)
    if account is None:
        return render(request, "billing/no_wallet.html")
    month = costs.month_named(request.GET.get("month", ""))
    dimension = request.GET.get("by", "")
    dimension = dimension if dimension in costs.DIMENSIONS else "node_spec"
    names, days = costs.by_day(organization, month, dimension)
    spent = costs.spent_minor(organization, month)
    return render(
        request,
        "billing/cost_list.html",
        {
            "account": account,
            "month": month,
            "months": costs.months_with_costs(organization),
            "dimension": dimension,
            "titles": TITLES,
            "shares": {name: costs.by(organization, month, name) for name in costs.DIMENSIONS},
            "spent_minor": spent,
            "before_minor": costs.spent_minor(organization, month.before),
            "forecast": costs.forecast(organization) if month.is_now else None,
            "chart": _chart(names, days, account.currency),
            "holds": costs.held(account).select_related("order__job"),
            "budgets": budgets.states(organization),
            "balance": budgets.balance(account),
            "members": accounts.members(organization=organization),
        },
    )


@require_GET
@member(Capability.VIEW)
def cost_export(request: MemberRequest) -> StreamingHttpResponse:
    """A month's receipts, line by line, as CSV."""
    organization = request.membership.organization
    month = costs.month_named(request.GET.get("month", ""))
    receipts = costs.receipts(organization, month).select_related("hold__placed_by").iterator(chunk_size=500)
    return csv_file(exports.costs_csv(receipts), f"trainyard-{organization.slug}-{month.name}.csv")


@require_POST
@member(Capability.PAY)
def budget_set(request: MemberRequest) -> HttpResponse:
    """Set a budget; an empty amount takes it away."""
    organization = request.membership.organization
    account = selectors.wallet(organization)
    try:
        amount = _amount(request.POST.get("amount", ""), account)
        chosen = request.POST.get("member", "")
        person = _person(request.membership, chosen)
        budgets.set_budget(membership=request.membership, user=person, amount_minor=amount)
        messages.success(request, _("The budget was set.") if amount else _("The budget was taken away."))
    except CustomerError as error:
        tell(request, error)
    return redirect("cost_list")


def csv_file(rows: Any, name: str) -> StreamingHttpResponse:
    """Rows as a file to download; the mark at its beginning makes spreadsheets read UTF-8."""
    response = StreamingHttpResponse(_marked(rows), content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = content_disposition_header(True, name) or ""
    return response


def _marked(rows: Any) -> Any:
    yield "\ufeff"
    yield from rows


def _chart(names: list[str], days: dict[Any, list[int]], currency: str) -> dict[str, Any]:
    """What the page's module draws: days as texts, and for each name its amounts in the major unit."""
    return {
        "names": [name or "–" for name in names],
        "days": [day.isoformat() for day in days],
        "amounts": [
            [float(wording.to_major(amounts[place], currency)) for amounts in days.values()]
            for place in range(len(names))
        ],
        "currency": currency,
    }


def _amount(text: str, account: Account | None) -> int | None:
    if not text.strip():
        return None
    currency = account.currency if account else selectors.default_currency()
    try:
        return wording.typed_minor(text, currency)
    except ValueError:
        sentence = _("Give an amount such as 50 or 19.90, without marks between thousands.")
        raise CustomerError(sentence, fields={"amount": sentence}) from None


def _person(membership: Membership, chosen: str) -> Any:
    if not chosen:
        return None
    found = membership.organization.memberships.filter(pk=row_number(chosen) or 0).first()
    if found is None:
        raise CustomerError(_("Choose a member of your organization."))
    return found.user
