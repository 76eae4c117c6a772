"""Pages of costs: a month's spend by group, open holds, the forecast, budgets. Amounts are in minor units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import date
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import HttpResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_GET, require_POST

from billing import budgets, costs, exports, selectors
from billing.amounts import parse_amount, to_major
from billing.models import Account, NodeSpec
from console.accounts import selectors as accounts
from console.accounts.models import Membership, User
from console.accounts.roles import Capability
from console.core.errors import CustomerError
from console.web.access import MemberRequest, errors_as_message, member
from console.web.amounts import parse_row_id

TITLES = {
    "member": gettext_lazy("Member"),
    "workspace": gettext_lazy("Workspace"),
    "node_spec": gettext_lazy("Node spec"),
}
"""Titles of the dimensions by which costs can be grouped (`costs.DIMENSIONS`)."""


@require_GET
@member(Capability.VIEW)
def cost_list(request: MemberRequest) -> HttpResponse:
    """Show a month's costs. `?month=2026-11` selects the month, `?by=member` the grouping."""
    organization = request.membership.organization
    account = selectors.wallet(organization)
    if account is None:
        return render(request, "billing/no_wallet.html", {"heading": _("Costs")})
    month = costs.parse_month(request.GET.get("month", ""))
    dimension = request.GET.get("by", "")
    dimension = dimension if dimension in costs.DIMENSIONS else "node_spec"
    spec_titles = _spec_titles()
    spends = [
        replace(spend, node_spec=spec_titles.get(spend.node_spec, spend.node_spec))
        for spend in costs.spending(organization, month)
    ]
    # `names` are the groups of the chosen dimension; each day of `days` has their amounts in the same order.
    names, days = costs.by_day(spends, month, dimension)
    spent_minor = sum(spend.amount_minor for spend in spends)
    return render(
        request,
        "billing/cost_list.html",
        {
            "account": account,
            "wallet": account,  # its name in base.html, which would query the wallet again
            "month": month,
            "months": costs.months_with_costs(organization),
            "dimension": dimension,
            "titles": TITLES,
            "shares": {name: costs.shares_by(spends, name) for name in costs.DIMENSIONS},
            "spent_minor": spent_minor,
            "returned_minor": costs.returned_minor(organization, month),
            "previous_minor": costs.spent_minor(organization, month.previous),
            "forecast": costs.forecast(organization, spent_minor) if month.is_current else None,
            "chart": _chart_data(names, days, account.currency),
            "holds": costs.largest_open_holds(account).select_related("order__job", "sweep"),
            "budgets": budgets.states_of(account),
            "runway": budgets.runway_of(account),
            "accounting_zone": settings.TIME_ZONE,
            "members": accounts.members(organization=organization),
        },
    )


@require_GET
@member(Capability.VIEW)
def cost_export(request: MemberRequest) -> StreamingHttpResponse:
    """Return a month's receipt lines as CSV. Lines are sent while receipts are read, so the file may be large."""
    organization = request.membership.organization
    month = costs.parse_month(request.GET.get("month", ""))
    receipts = costs.receipts(organization, month).select_related("hold__placed_by").iterator(chunk_size=500)
    return csv_file(exports.costs_csv(receipts), f"trainyard-{organization.slug}-{month.name}.csv")


@require_POST
@member(Capability.PAY)
def budget_set(request: MemberRequest) -> HttpResponse:
    """Set a budget, or remove it if the amount is empty."""
    organization = request.membership.organization
    account = selectors.wallet(organization)
    with errors_as_message(request):
        amount = _parse_budget(request.POST.get("amount", ""), account)
        user = _budget_user(request.membership, request.POST.get("member", ""))
        budgets.set_budget(membership=request.membership, user=user, amount_minor=amount)
        messages.success(request, _("The budget was saved.") if amount else _("The budget was removed."))
    return redirect("cost_list")


def csv_file(lines: Iterable[str], name: str) -> StreamingHttpResponse:
    """Return CSV lines as a download. A byte order mark comes first: without the mark, Excel does not read UTF-8."""
    response = StreamingHttpResponse(_with_byte_order_mark(lines), content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = content_disposition_header(as_attachment=True, filename=name) or ""
    return response


def _with_byte_order_mark(lines: Iterable[str]) -> Iterator[str]:
    yield "\ufeff"
    yield from lines


def _spec_titles() -> dict[str, str]:
    """Return each node spec's title by its name. If several specs share a title, each gets its name after the title."""
    titles = dict(NodeSpec.objects.values_list("name", "title"))
    counts = Counter(titles.values())
    return {name: f"{title} ({name})" if counts[title] > 1 else title for name, title in titles.items()}


def _chart_data(names: list[str], days: Mapping[date, list[int]], currency: str) -> dict[str, Any]:
    """Return the data for the script that draws the chart: the days, and each name's amounts by day in major units."""
    return {
        "names": [name or "–" for name in names],
        "days": [day.isoformat() for day in days],
        # `days` has the amounts of all names for each day. The chart needs the amounts of all days for each name.
        "amounts": [
            [float(to_major(amounts[index], currency)) for amounts in days.values()] for index in range(len(names))
        ],
        "currency": currency,
    }


def _parse_budget(text: str, account: Account | None) -> int | None:
    """Parse a budget in major units into minor units; None if it is empty. Raises CustomerError."""
    if not text.strip():
        return None
    currency = account.currency if account else selectors.default_currency()
    try:
        return parse_amount(text, currency)
    except ValueError:
        message = _("Enter an amount such as 50 or 19.90, without thousands separators.")
        raise CustomerError(message, fields={"amount": message}) from None


def _budget_user(membership: Membership, membership_id: str) -> User | None:
    """Return the user of a membership; None for the organization's own budget. Raises CustomerError."""
    if not membership_id:
        return None
    pk = parse_row_id(membership_id) or 0  # no row has the id 0
    selected = membership.organization.memberships.filter(pk=pk).first()
    if selected is None:
        raise CustomerError(_("Choose a member of your organization."))
    return selected.user
