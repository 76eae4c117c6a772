"""Invoices and credit notes: a number, the receipts they are of, the tax, and the money that moves with them.

The one rule: a number is taken, its document written and its money posted in one transaction, which holds the series'
row; so numbers have no gap, a receipt stands on one invoice, and asking twice writes nothing twice. What is written is
never changed: a correction is a credit note.

Runs were charged when they ended. An invoice moves tax alone: from revenue where prices hold it, else from the wallet,
what was paid in first, and what is not there becomes the organization's debt (receivable).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import F, QuerySet, Sum
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from billing import credit, ledger, receivables
from billing.errors import InvoiceRefused
from billing.models import Account, BillingDetails, Invoice, InvoiceLine, InvoiceMail, InvoiceSeries, Receipt
from billing.policy import policy
from billing.taxes import Tax, tax_for
from console.accounts.errors import NotFound
from console.accounts.models import Organization, User

logger = logging.getLogger(__name__)

DIGITS = 6
"""Numbers are filled up to so many digits."""


def issue_due() -> list[Invoice]:
    """Write the invoice of each organization that was charged before this month and not invoiced yet.

    What is wrong with one keeps none from the others; it is tried again by the next call.
    """
    until = _month_start(timezone.localtime())
    waiting = _waiting().filter(created_at__lt=until, total_minor__gt=0).values("organization")
    written = []
    for organization in Organization.objects.filter(pk__in=waiting).order_by("pk"):
        try:
            invoice = issue(organization=organization, until=until)
        except Exception:
            logger.exception("The invoice of organization %s could not be written; it is tried again.", organization.pk)
        else:
            written += [invoice] if invoice else []
    return written


@transaction.atomic
def issue(*, organization: Organization, until: datetime | None = None, user: User | None = None) -> Invoice | None:
    """One invoice of every receipt that stands on none and was written before `until` (now). None: nothing to invoice.

    One with `until` is written by itself, and mail about it is due. Safe to repeat, and for two at once.
    """
    moment = timezone.now()
    ends = until or moment
    series = _locked_series(Invoice.Kinds.INVOICE)
    receipts = list(_waiting().filter(organization=organization, created_at__lt=ends).order_by("pk"))
    if not sum(receipt.total_minor for receipt in receipts):
        return None
    by_credit = credit.used_for([receipt.hold_id for receipt in receipts])
    tax, rules = tax_for(organization), policy()
    subtotal = sum(receipt.total_minor for receipt in receipts)
    paid_by_credit = sum(by_credit.values())
    due = tax.of(subtotal - paid_by_credit)
    last_day = timezone.localtime(ends) - timedelta(microseconds=1) if until else timezone.localtime(ends)
    invoice = Invoice.objects.create(
        kind=Invoice.Kinds.INVOICE,
        sequence=_next(series),
        number=f"{rules.invoice_prefix}{series.last:0{DIGITS}d}",
        organization=organization,
        currency=receipts[0].currency,
        period_start=min(timezone.localtime(receipt.created_at).date() for receipt in receipts),
        period_end=last_day.date(),
        seller=_seller(),
        customer=_customer(organization),
        tax_name=tax.name,
        tax_percent=tax.percent,
        tax_inclusive=tax.inclusive,
        line_count=len(receipts),
        subtotal_minor=subtotal,
        credits_minor=-paid_by_credit,
        tax_minor=due,
        total_minor=subtotal - paid_by_credit + (0 if tax.inclusive else due),
        issued_by=user.email if user else "",
        issued_at=moment,
    )
    InvoiceLine.objects.bulk_create(
        InvoiceLine(
            invoice=invoice,
            position=position,
            receipt=receipt,
            title=receipt.title,
            amount_minor=receipt.total_minor,
            credit_minor=-by_credit.get(receipt.hold_id, 0),
        )
        for position, receipt in enumerate(receipts, 1)
    )
    _post_tax(invoice)
    if until is not None:  # nobody asked for it: it is told by mail
        InvoiceMail.objects.create(invoice=invoice)
    return invoice


@transaction.atomic
def correct(
    *, invoice: Invoice, amounts: Mapping[int, int], reason: str, user: User | None, after: int | None = None
) -> Invoice:
    """A credit note: for each line (by id) what of it is given back, in minor units, to the wallet.

    What was paid comes back before what credit paid, which comes back as credit that doesn't expire; the tax comes back
    in step, all of it with the last cent. `after`: how many notes it was decided upon, so that the same decision, sent
    twice, gives back once. Raises InvoiceRefused.
    """
    series = _locked_series(Invoice.Kinds.CREDIT_NOTE)
    if after is not None and invoice.notes.count() != after:
        raise InvoiceRefused(_("Another credit note was written meanwhile. Look at what is left, and decide again."))
    if invoice.kind != Invoice.Kinds.INVOICE:
        raise InvoiceRefused(_("A credit note can't be corrected. Correct its invoice."))
    if not reason.strip():
        raise InvoiceRefused(fields={"reason": _("Give the reason: it stands on the credit note.")})
    parts = _parts(invoice, {line: amount for line, amount in amounts.items() if amount})
    given = sum(paid + free for _line, paid, free in parts)
    given_credit = sum(free for _line, _paid, free in parts)
    # The tax that stays is that of what stays; the notes together give back the rest, to the cent.
    before = invoice.notes.aggregate(subtotal=Sum("subtotal_minor"), credits=Sum("credits_minor"), tax=Sum("tax_minor"))
    taxable = invoice.taxable_minor + (before["subtotal"] or 0) + (before["credits"] or 0) - given + given_credit
    tax = Tax(invoice.tax_name, invoice.tax_percent, invoice.tax_inclusive)
    tax_back = invoice.tax_minor + (before["tax"] or 0) - tax.of(taxable)
    note = Invoice.objects.create(
        kind=Invoice.Kinds.CREDIT_NOTE,
        sequence=_next(series),
        number=f"{policy().note_prefix}{series.last:0{DIGITS}d}",
        organization_id=invoice.organization_id,
        currency=invoice.currency,
        period_start=invoice.period_start,
        period_end=invoice.period_end,
        seller=_seller(),
        customer=_customer(invoice.organization),
        tax_name=invoice.tax_name,
        tax_percent=invoice.tax_percent,
        tax_inclusive=invoice.tax_inclusive,
        line_count=len(parts),
        subtotal_minor=-given,
        credits_minor=given_credit,
        tax_minor=-tax_back,
        total_minor=-(given - given_credit) - (0 if invoice.tax_inclusive else tax_back),
        corrects=invoice,
        reason=reason.strip()[:255],
        issued_by=user.email if user else "",
        issued_at=timezone.now(),
    )
    InvoiceLine.objects.bulk_create(
        InvoiceLine(
            invoice=note,
            position=position,
            corrects=line,
            title=line.title,
            amount_minor=-(paid + free),
            credit_minor=free,
        )
        for position, (line, paid, free) in enumerate(parts, 1)
    )
    _post_note(note)
    return note


def invoices_for(organization: Organization) -> QuerySet[Invoice]:
    """Invoices and credit notes, newest first."""
    return Invoice.objects.filter(organization=organization).select_related("corrects")


def invoice_for(organization: Organization, pk: int) -> Invoice:
    """One document. Raises NotFound for another organization's."""
    invoice = invoices_for(organization).filter(pk=pk).first()
    if invoice is None:
        raise NotFound
    return invoice


def uninvoiced_minor(organization: Organization) -> int:
    """What was charged and stands on no invoice yet."""
    return int(_waiting().filter(organization=organization).aggregate(total=Sum("total_minor"))["total"] or 0)


def correctable(invoice: Invoice) -> list[tuple[InvoiceLine, int]]:
    """Each line of an invoice with what of it can still be given back."""
    lines = invoice.lines.annotate(back=Sum("corrections__amount_minor", default=0))
    return [(line, line.amount_minor + line.back) for line in lines]


def _parts(invoice: Invoice, amounts: Mapping[int, int]) -> list[tuple[InvoiceLine, int, int]]:
    """For each line: what comes back as money and what as credit."""
    lines = invoice.lines.annotate(
        back=Sum("corrections__amount_minor", default=0), back_credit=Sum("corrections__credit_minor", default=0)
    ).in_bulk(list(amounts))
    if not amounts or set(lines) != set(amounts):
        raise InvoiceRefused(_("Choose lines of this invoice, and give an amount for each."))
    parts: list[tuple[InvoiceLine, int, int]] = []
    for pk, amount in sorted(amounts.items()):
        line = lines[pk]
        left = line.amount_minor + line.back
        if not 0 < amount <= left:
            raise InvoiceRefused(
                _("Of line %(line)d at most %(left)d minor units can be given back.")
                % {"line": line.position, "left": left}
            )
        paid_left = left + line.credit_minor + line.back_credit
        paid = min(amount, paid_left)
        parts.append((line, paid, amount - paid))
    return parts


def _post_tax(invoice: Invoice) -> None:
    """The tax of an invoice becomes what we owe the tax office."""
    if not invoice.tax_minor:
        return
    owed = ledger.platform_account(Account.Kinds.TAX, invoice.currency)
    if invoice.tax_inclusive:
        revenue = ledger.platform_account(Account.Kinds.REVENUE, invoice.currency)
        entries = [(revenue, -invoice.tax_minor), (owed, invoice.tax_minor)]
    else:
        wallet = _locked_wallet(invoice.organization)
        paid = min(invoice.tax_minor, credit.paid_minor(wallet))
        debt = ledger.receivable_account(wallet)
        entries = [(wallet, -paid), (debt, paid - invoice.tax_minor), (owed, invoice.tax_minor)]
    ledger.post(
        reference=f"tax:{invoice.kind}:{invoice.sequence}",
        kind="tax",
        description=gettext_noop("Tax on an invoice"),
        entries=entries,
    )


def _post_note(note: Invoice) -> None:
    """A credit note's money goes back to the wallet: out of revenue, and its tax out of what we owe the tax office.

    A debt is paid from it first.
    """
    wallet = _locked_wallet(note.organization)
    back = -note.total_minor + note.credits_minor
    revenue = ledger.platform_account(Account.Kinds.REVENUE, note.currency)
    owed = ledger.platform_account(Account.Kinds.TAX, note.currency)
    ledger.post(
        reference=f"credit-note:{note.sequence}",
        kind="credit-note",
        description=note.reason,
        entries=[(wallet, back), (revenue, -back - note.tax_minor), (owed, note.tax_minor)],
    )
    if note.credits_minor:
        credit.give_back(organization=note.organization, amount_minor=note.credits_minor, reason=note.reason)
    receivables.collect(account=wallet, reference=f"credit-note:{note.sequence}")


def _locked_wallet(organization: Organization) -> Account:
    return Account.objects.select_for_update(no_key=True).get(organization=organization, kind=Account.Kinds.WALLET)


def _locked_series(kind: Invoice.Kinds) -> InvoiceSeries:
    """The series' row, locked until the transaction ends: whoever else writes such a document waits here."""
    InvoiceSeries.objects.bulk_create([InvoiceSeries(kind=kind)], ignore_conflicts=True)
    return InvoiceSeries.objects.select_for_update().get(kind=kind)


def _next(series: InvoiceSeries) -> int:
    series.last += 1
    InvoiceSeries.objects.filter(pk=series.pk).update(last=F("last") + 1)
    return series.last


def _waiting() -> QuerySet[Receipt]:
    """Receipts that stand on no invoice."""
    return Receipt.objects.filter(invoice_line=None)


def _seller() -> dict[str, str]:
    rules = policy()
    return {
        "name": rules.seller_name or "Trainyard",
        "address": rules.seller_address,
        "tax_id": rules.seller_tax_id,
        "footer": rules.footer,
    }


def _customer(organization: Organization) -> dict[str, str]:
    details = BillingDetails.objects.filter(organization=organization).first() or BillingDetails()
    return {
        "name": details.name or organization.name,
        "address": details.address,
        "tax_id": details.tax_id,
        "tax_note": details.tax_note,
    }


def _month_start(at: datetime) -> datetime:
    return at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
