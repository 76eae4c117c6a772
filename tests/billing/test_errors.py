"""Errors of billing: stable codes, sentences for a person, a status for each."""

from __future__ import annotations

import inspect

import pytest

from billing import errors
from console.api import STATUS_OF_CODE

STATUSES = {
    errors.InsufficientFunds: 402,
    errors.NoWallet: 403,
    errors.QuoteExpired: 409,
    errors.PaymentUnavailable: 503,
    errors.NotPriced: 400,
    errors.AmountRefused: 400,
}
KINDS = [kind for _name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.BillingError)]
ARGUMENTS = {"available_minor": 20, "needed_minor": 50, "message": "Too little."}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_has_a_sentence_a_code_and_a_status(kind):
    needed = [
        each.name
        for each in inspect.signature(kind).parameters.values()
        if each.kind is each.KEYWORD_ONLY and each.default is each.empty
    ]
    error = kind(**{name: ARGUMENTS.get(name, "card_declined") for name in needed})
    assert str(error.message)
    assert error.code
    if kind in STATUSES:
        assert STATUS_OF_CODE.get(kind.code, 400) == STATUSES[kind]


def test_a_conflict_in_the_ledger_is_not_a_customers_error():
    assert not issubclass(errors.LedgerConflict, errors.CustomerError)
