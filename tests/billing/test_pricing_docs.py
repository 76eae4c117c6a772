"""The examples of `docs/pricing.md`, computed by the services."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pytest

from billing import costs, invoices
from billing.models import Account, BillingPolicy, Invoice, Price
from billing.pricing import Estimate, Line, Mode, Offer, PriceKind, PriceRow, Purchase, Terms, quote, rate
from billing.usage import Range, Usage
from jobs import catalogue, estimates, free_estimates
from tests.billing.runs import figures, give_credit, issue, posted, run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "pricing.md").read_text()


def table(first_column: str) -> list[dict[str, str]]:
    """Return the rows of the table whose first column has this heading."""
    lines = iter(PAGE.splitlines())
    for line in lines:
        if line.startswith(f"| {first_column} |"):
            names = cells(line)
            next(lines)
            rows = []
            for row in lines:
                if not row.startswith("|"):
                    return rows
                rows.append(dict(zip(names, cells(row), strict=True)))
    raise LookupError(first_column)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def amounts(lines: tuple[Line, ...]) -> str:
    """Format amounts as the page does: 90 + 25, 180 - 90."""
    first, *others = [line.amount_minor for line in lines] or ["–"]
    return str(first) + "".join(f" {'-' if amount < 0 else '+'} {abs(amount)}" for amount in others)


QUOTES = {row["quote"]: row for row in table("quote")}
CHARGES = [
    dict(zip(cells(heading), cells(row), strict=True))
    for heading, rows in re.findall(r"^(\| quote \| seconds used .*)\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for row in rows.splitlines()
]


def offer(row: dict[str, str]) -> Offer:
    mode, nodes = Mode(row["mode"]), int(row["nodes"])
    per_epoch = PriceKind.FIXED_EPOCH if mode is Mode.FIXED else PriceKind.EPOCH
    prices = [
        PriceRow(PriceKind.NODE_HOUR, Decimal(row["hourly"])),
        PriceRow(per_epoch, Decimal(row["epoch"])),
        PriceRow(PriceKind.MINIMUM, Decimal(row["least"])),
    ]
    asked = re.fullmatch(r"(\d+) ([sc])|–", row["asked"])  # seconds, or a ceiling in minor units (c)
    return quote(
        prices,
        Purchase("any", mode, "any", nodes, int(row["epochs"])),
        Estimate(600, 900, "reference"),
        headroom=Decimal(2),
        min_deadline_seconds=300,
        max_deadline_seconds=7 * 24 * 3600,
        max_seconds=int(asked[1]) if asked[2] == "s" else None,
        ceiling_minor=int(asked[1]) if asked[2] == "c" else None,
        included_seconds=None if row["includes"] == "–" else int(row["includes"]),
    )


@pytest.mark.parametrize("name", QUOTES)
def test_a_quote_is_priced_as_the_page_says(name):
    row, made = QUOTES[name], offer(QUOTES[name])
    assert (str(made.deadline_seconds), str(made.ceiling_minor), amounts(made.lines)) == (
        row["deadline"],
        row["ceiling"],
        row["lines"],
    )


@pytest.mark.parametrize("row", CHARGES, ids=lambda row: f"{row['quote']} {row['seconds used']}")
def test_a_run_is_charged_as_the_page_says(row):
    made = offer(QUOTES[row["quote"]])
    usage = Usage(float(row["seconds used"]), completed={"yes": True, "no": False}[row["completed"]])
    charge = rate(usage, made.terms)
    assert amounts(charge.lines) == row["lines"]
    assert str(charge.total_minor) == row["charge"]
    assert str(made.ceiling_minor - charge.total_minor) == row["released"]


def test_the_page_names_every_kind_of_price():
    assert {row["kind"].strip("`") for row in table("kind")} == set(Price.Kinds.values)


def test_the_page_has_the_prices_of_a_new_installation():
    rows = {row["node spec"]: row for row in table("node spec")}
    assert list(rows) == [spec.name for spec in catalogue.SPECS]
    for spec in catalogue.SPECS:
        prices = [Decimal(value) for value in list(rows[spec.name].values())[1:]]
        assert prices == [spec.hourly, spec.hourly * catalogue.DISCOUNT_FACTOR, spec.fixed_epoch]
    assert f"from {catalogue.DISCOUNT_FROM_NODES} nodes on" in PAGE
    assert f"The minimum charge of a run is {catalogue.MIN_CHARGE}." in PAGE


@pytest.mark.parametrize("row", table("ranges"), ids=lambda row: row["ranges"])
def test_ranges_are_charged_as_the_page_says(row):
    parts = [part.split(" x ") for part in row["ranges of seconds x nodes"].split(", ")]
    terms = Terms(Mode.METERED, 4, 1, Decimal(row["hourly"]), Decimal(0), minimum_minor=0, ceiling_minor=10**6)
    charge = rate(Usage.of([Range(float(seconds), int(nodes)) for seconds, nodes in parts], completed=True), terms)
    assert (amounts(charge.lines), str(charge.total_minor)) == (row["lines"], row["charge"])


MONTHS = {row["month"]: row for row in table("month")}


def invoice_month(account: Account, row: dict[str, str]) -> Invoice:
    is_inclusive = {"in": True, "on top": False}[row["prices"]]
    BillingPolicy.objects.create(tax_percent=Decimal(row["tax %"]), tax_inclusive=is_inclusive)
    if credit := int(row["credit used"]):
        give_credit(account, credit)
    run(account, int(row["runs"]))
    return issue(account)


@pytest.mark.django_db
@pytest.mark.parametrize("name", MONTHS)
def test_a_month_is_invoiced_as_the_page_says(account, name):
    row = MONTHS[name]
    subtotal, credits_used, tax, total = figures(invoice_month(account, row))
    assert [str(subtotal + credits_used), str(tax), str(total)] == [row["taxable"], row["tax"], row["total"]]
    account.refresh_from_db()
    assert account.posted_minor == 10_000 - total
    revenue = subtotal - tax if row["prices"] == "in" else subtotal
    assert (posted(Account.Kinds.REVENUE), posted(Account.Kinds.TAX)) == (revenue, tax)


@pytest.mark.django_db
@pytest.mark.parametrize("row", table("note"), ids=lambda row: row["note"])
def test_a_credit_note_gives_back_what_the_page_says(account, row):
    invoice = invoice_month(account, MONTHS[row["of"]])
    line = invoice.lines.get()
    note = invoices.correct(invoice=invoice, amounts={line.pk: int(row["gives back"])}, reason="A fault", user=None)
    assert (str(note.credits_minor), str(-note.tax_minor)) == (row["as credit"], row["tax back"])


def test_the_page_has_the_limits_of_estimates():
    for figure in (
        f"last {estimates.MAX_RUNS} runs",
        f"from {estimates.MIN_RUNS_FOR_START_UP} runs",
        f"{estimates.FEW_RUNS_SPREAD} times p50 at least while they are fewer than {estimates.FEW_RUNS}",
        f"{2**estimates.ASSUMED_SCALING:.2f} times as fast",
        f"wider by {estimates.SCALED_SPREAD}, or {estimates.UNMEASURED_SPREAD} where",
        f"{estimates.OTHER_BATCH_SPREAD} (another batch size) or {estimates.OTHER_DATA_SPREAD} (other data)",
        f"{free_estimates.MAX_SECONDS} seconds at most",
    ):
        assert figure in PAGE.replace("\n", " ")
    assert f"{estimates.FREE_ESTIMATE_SPREAD} times p50" in PAGE
    assert f"times {estimates.REFERENCE_SPREAD} times the product's headroom" in PAGE.replace("\n", " ")
    assert estimates.FREE_ESTIMATE_SPREAD == estimates.REFERENCE_SPREAD
    assert f"average day of the last {costs.FORECAST_DAYS}" in PAGE
