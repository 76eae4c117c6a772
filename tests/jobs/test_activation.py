import pytest

from billing.models import Account
from console.accounts.errors import NotAllowed, TermsNotAccepted
from console.accounts.models import ServiceActivation
from console.accounts.services import is_active
from jobs import activation
from runtime.specs import Outcome
from storage.models import Workspace
from tests.factories.accounts import MembershipFactory


def test_it_makes_a_wallet_and_a_first_workspace_once(owner):
    for _ in range(2):
        activation.activate(membership=owner, accept_terms=True)
    assert Account.objects.get(organization=owner.organization).currency == "USD"
    assert Workspace.objects.get(organization=owner.organization).name == "main"
    assert is_active(owner.organization)


@pytest.mark.parametrize(
    ("role", "error"), [("owner", TermsNotAccepted), ("member", NotAllowed), ("billing", NotAllowed)]
)
def test_a_refusal_makes_nothing(db, role, error):
    someone = MembershipFactory(role=role)
    with pytest.raises(error):
        activation.activate(membership=someone, accept_terms=role != "owner")
    assert not ServiceActivation.objects.exists()
    assert not Account.objects.exists()
    assert not Workspace.objects.exists()


def test_a_fault_in_the_middle_makes_nothing(owner, monkeypatch):
    monkeypatch.setattr("storage.catalog.ensure_first_workspace", lambda **_options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        activation.activate(membership=owner, accept_terms=True)
    assert not ServiceActivation.objects.exists()
    assert not Account.objects.exists()


def test_ending_the_service_keeps_what_is_there(customer):
    attempt = customer.started()
    activation.deactivate(membership=customer.membership)
    assert not is_active(customer.organization)
    assert customer.wallet.posted_minor == 100_000
    assert customer.end(attempt, Outcome.COMPLETED).state == "succeeded"
    activation.activate(membership=customer.membership, accept_terms=True)
    assert customer.order()
