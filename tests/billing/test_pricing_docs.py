"""`docs/pricing.md` says what the code does: its numbers are computed again. No database."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pytest

from billing import costs
from billing.models import Price
from billing.pricing import (
    Estimate,
    Line,
    Mode,
    Offer,
    PriceKind,
    PriceRow,
    Purchase,
    Range,
    Terms,
    Usage,
    quote,
    rate,
)
from billing.taxes import Tax
from jobs import calibration, catalogue, probes

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "pricing.md").read_text()


def table(first_column: str) -> list[dict[str, str]]:
    """The rows of the table whose first column has this heading."""
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
    """As the page writes them: 90 + 25, 180 - 90."""
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
    asked = re.fullmatch(r"(\d+) ([sc])|–", row["asked"])
    return quote(
        prices,
        Purchase("any", mode, "any", nodes, int(row["epochs"])),
        Estimate(600, 900, "reference"),
        headroom=Decimal(2),
        least_seconds=300,
        most_seconds=7 * 24 * 3600,
        max_seconds=int(asked[1]) if asked[2] == "s" else None,
        ceiling_minor=int(asked[1]) if asked[2] == "c" else None,
    )


@pytest.mark.parametrize("name", QUOTES)
def test_a_quote(name):
    row, made = QUOTES[name], offer(QUOTES[name])
    assert (str(made.deadline_seconds), str(made.ceiling_minor), amounts(made.lines)) == (
        row["deadline"],
        row["ceiling"],
        row["lines"],
    )


@pytest.mark.parametrize("row", CHARGES, ids=lambda row: f"{row['quote']} {row['seconds used']}")
def test_a_charge(row):
    made = offer(QUOTES[row["quote"]])
    usage = Usage(float(row["seconds used"]), completed={"yes": True, "no": False}[row["completed"]])
    charge = rate(usage, made.terms)
    assert amounts(charge.lines) == row["lines"]
    assert str(charge.total_minor) == row["charge"]
    assert str(made.ceiling_minor - charge.total_minor) == row["released"]


def test_there_are_examples_of_both_modes_and_every_rule():
    assert len(QUOTES) == 9
    assert len(CHARGES) == 13
    offers = {name: offer(row) for name, row in QUOTES.items()}
    rules = {line.rule for made in offers.values() for line in made.lines}
    for row in CHARGES:
        usage = Usage(float(row["seconds used"]), completed=row["completed"] == "yes")
        rules |= {line.rule for line in rate(usage, offers[row["quote"]].terms).lines}
    assert rules == {"time_used", "epochs_completed", "fixed_price", "minimum", "above_ceiling"}


def test_every_kind_of_price_is_named():
    assert {row["kind"].strip("`") for row in table("kind")} == set(Price.Kinds.values)


def test_what_a_new_installation_sells():
    rows = {row["node spec"]: row for row in table("node spec")}
    assert list(rows) == [spec[0] for spec in catalogue.SPECS]
    for name, *_words, hourly in catalogue.SPECS:
        told = [Decimal(value) for value in list(rows[name].values())[1:]]
        assert told == [hourly, hourly * catalogue.MANY_NODES_DISCOUNT, catalogue.FIXED_EPOCH[name]]
    assert f"from {catalogue.MANY_NODES} nodes on" in PAGE
    assert f"The least charge of a run is {catalogue.LEAST_CHARGE}." in PAGE


@pytest.mark.parametrize("row", table("ranges"), ids=lambda row: row["ranges"])
def test_ranges(row):
    parts = [part.split(" x ") for part in row["ranges of seconds x nodes"].split(", ")]
    terms = Terms(Mode.METERED, 4, 1, Decimal(row["hourly"]), Decimal(0), minimum_minor=0, ceiling_minor=10**6)
    charge = rate(Usage.of([Range(float(seconds), int(nodes)) for seconds, nodes in parts], completed=True), terms)
    assert (amounts(charge.lines), str(charge.total_minor)) == (row["lines"], row["charge"])


MONTHS = {row["month"]: row for row in table("month")}


def tax_of(row: dict[str, str]) -> Tax:
    return Tax("VAT", Decimal(row["tax %"]), inclusive={"in": True, "on top": False}[row["prices"]])


@pytest.mark.parametrize("name", MONTHS)
def test_a_month_on_an_invoice(name):
    row = MONTHS[name]
    taxable = int(row["runs"]) - int(row["credit used"])
    due = tax_of(row).of(taxable)
    total = taxable if row["prices"] == "in" else taxable + due
    assert [str(taxable), str(due), str(total)] == [row["taxable"], row["tax"], row["total"]]


@pytest.mark.parametrize("row", table("note"), ids=lambda row: row["note"])
def test_a_credit_note(row):
    month = MONTHS[row["of"]]
    tax, back = tax_of(month), int(row["gives back"])
    paid = int(month["runs"]) - int(month["credit used"])
    given_credit = max(0, back - paid)
    left = paid - (back - given_credit)
    assert (str(given_credit), str(tax.of(paid) - tax.of(left))) == (row["as credit"], row["tax back"])


def test_the_figures_of_estimates():
    for figure in (
        f"last {calibration.RUNS_LEARNT_FROM} runs",
        f"from {calibration.LEAST_RUNS_FOR_A_START} runs",
        f"{calibration.FEW_RUNS_SPREAD} times p50 at least while they are fewer than {calibration.FEW_RUNS}",
        f"{2**calibration.USUAL_SCALING:.2f} times as fast",
        f"wider by {calibration.SCALED_SPREAD}, or {calibration.UNMEASURED_SPREAD} where",
        f"{calibration.OTHER_BATCH_SPREAD} (another batch size) or {calibration.OTHER_DATA_SPREAD} (other data)",
        f"{probes.PROBE_SECONDS} seconds at most",
    ):
        assert figure in PAGE.replace("\n", " ")
    assert f"{calibration.PROBE_SPREAD} times p50" in PAGE
    assert calibration.PROBE_SPREAD == calibration.REFERENCE_SPREAD
    assert f"average day of the last {costs.FORECAST_DAYS}" in PAGE
