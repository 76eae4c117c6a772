"""What billing refuses: stable codes, sentences for a person, a status for each."""

from __future__ import annotations

import inspect

import pytest

from billing import errors
from console.api import STATUS_OF_CODE

KINDS = [
    kind
    for _name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.BillingError) and kind is not errors.InsufficientFunds
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_has_a_sentence_and_a_code(kind):
    wanted = inspect.signature(kind).parameters.values()
    error = kind(
        **{
            each.name: "card_declined"
            for each in wanted
            if each.kind is each.KEYWORD_ONLY and each.default is each.empty
        }
    )
    assert str(error.message)
    assert error.code


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.InsufficientFunds, 402),
        (errors.NoWallet, 403),
        (errors.QuoteExpired, 409),
        (errors.PaymentUnavailable, 503),
        (errors.NotPriced, 400),
        (errors.AmountRefused, 400),
    ],
)
def test_the_status_of_each(kind, status):
    assert STATUS_OF_CODE.get(kind.code, 400) == status


def test_insufficient_funds_says_how_much_is_missing():
    error = errors.InsufficientFunds(available_minor=20, needed_minor=50, message="Too little.")
    assert error.missing_minor == 30


def test_a_conflict_in_the_ledger_is_shown_to_nobody():
    assert not issubclass(errors.LedgerConflict, errors.CustomerError)
