"""The card beside the form of a sweep or a notebook: its live quote, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from django.http import HttpResponse, QueryDict
from django.shortcuts import render
from django.utils import timezone
from django.utils.translation import gettext as _

from billing import payments
from billing import selectors as billing
from billing.amounts import parse_amount
from billing.models import Quote
from billing.taxes import tax_for
from console.accounts.models import Organization
from console.core.errors import CustomerError, InvalidInput
from console.web.access import MemberRequest
from jobs import orders


def quote_card(
    request: MemberRequest,
    quote: Quote,
    *,
    template: str,
    order_url: str,
    fields: Sequence[str] = (),
    problem: str = "",
    stale: bool = False,
    **context: Any,
) -> HttpResponse:
    """Render the card of a quote. `problem` says why the last attempt to order the quote failed.

    The response also has an empty error for each form control in `fields`, to clear the errors of an earlier refusal.
    `template` extends `jobs/_plain_quote.html` and gets `context` too. The form of the card posts to `order_url`. For a
    `stale` quote, which cannot be bought, the card offers a new quote.
    """
    account = billing.wallet(request.membership.organization)
    available = account.available_minor if account else 0
    refusal = orders.refusal(quote, request.membership.user)  # why a budget or the storage quota prevents a purchase
    held_minor = orders.held_minor(quote)
    added_minor = quote.ceiling_minor - held_minor  # to extend a notebook, only the difference to its hold is needed
    context |= {
        "quote": quote,
        "order_url": order_url,
        "available_minor": available,
        "added_minor": added_minor,
        "remaining_minor": available - added_minor,
        "missing_minor": max(0, added_minor - available),
        # The smallest payment that covers the missing amount and debts; 0 without a wallet: then nobody can pay.
        "to_pay_minor": payments.shortfall_minor(quote, account=account, held_minor=held_minor) if account else 0,
        "idempotency_key": uuid4(),
        "problem": problem or refusal,
        "is_refused": bool(refusal),
        "is_storage_full": bool(refusal) and refusal == orders.storage_refusal(request.membership.organization),
        "stale": stale,
        "seconds_left": max(0, math.ceil((quote.expires_at - timezone.now()).total_seconds())),
        "tax": tax_for(request.membership.organization),
        "errors": dict.fromkeys(fields, ""),
    }
    return render(request, template, context)


def refused_card(request: MemberRequest, error: CustomerError, fields: Sequence[str]) -> HttpResponse:
    """Return a card in place of a quote. Errors of `fields` are shown at the form's controls, others in the card."""
    errors = {name: error.fields.get(name, "") for name in fields}
    others = {name: message for name, message in error.fields.items() if name not in fields}
    context = {"message": "" if error.fields else error.message, "others": others, "errors": errors}
    return render(request, "jobs/_plain_quote_refused.html", context)


def posted_key(posted: QueryDict) -> str:
    """Return the idempotency key of a card's form, as its column can store it: without NUL, at most 255 characters."""
    return posted.get("idempotency_key", "").replace("\0", "")[:255]


def currency_of(organization: Organization) -> str:
    """Return the currency of an organization's wallet, or the default one."""
    account = billing.wallet(organization)
    return account.currency if account else billing.default_currency()


def posted_ceiling(posted: QueryDict, currency: str) -> dict[str, Any]:
    """Return `{"ceiling_minor": amount}` for a form's field `ceiling`, or {} if it is empty. Raises InvalidInput."""
    text = posted.get("ceiling", "").strip()
    if not text:
        return {}
    try:
        return {"ceiling_minor": parse_amount(text, currency)}
    except ValueError:
        raise InvalidInput(fields={"ceiling_minor": _("Enter a number or leave the field empty.")}) from None
