"""Activation and deactivation of an organization's service."""

import pytest

from billing.models import Account
from console.accounts.models import ServiceActivation
from console.accounts.services import is_active
from console.core.errors import NotAllowed, TermsNotAccepted
from jobs import activation
from runtime.specs import Outcome
from storage.models import Workspace
from tests.factories.accounts import MembershipFactory


def test_activation_creates_a_wallet_and_a_first_workspace_once(owner):
    for _ in range(2):
        activation.activate(membership=owner, accept_terms=True)
    assert Account.objects.get(organization=owner.organization).currency == "USD"
    assert Workspace.objects.get(organization=owner.organization).name == "main"
    assert is_active(owner.organization)


def test_a_refusal_creates_nothing(db):
    """The owner does not accept the terms; the others have no right to activate."""
    for role, error in (("owner", TermsNotAccepted), ("member", NotAllowed), ("billing", NotAllowed)):
        with pytest.raises(error):
            activation.activate(membership=MembershipFactory(role=role), accept_terms=role != "owner")
    assert not any(model.objects.exists() for model in (ServiceActivation, Account, Workspace))


def test_deactivation_keeps_the_balance_and_lets_runs_end(customer):
    attempt = customer.started()
    activation.deactivate(membership=customer.membership)
    assert not is_active(customer.organization)
    assert customer.wallet.posted_minor == 100_000  # the customer's balance from the start
    assert customer.end(attempt, Outcome.COMPLETED).state == "succeeded"
    activation.activate(membership=customer.membership, accept_terms=True)
    assert customer.order()
