"""Activate distributed training: accept the terms, create wallet and first workspace, grant trial credit.

Safe to repeat. An organization that has not activated it cannot order.
"""

from __future__ import annotations

from django.db import transaction

from billing import credit
from billing.ledger import wallet_account
from billing.selectors import default_currency
from console.accounts import services
from console.accounts.models import Membership, ServiceActivation
from storage import catalog


@transaction.atomic
def activate(*, membership: Membership, accept_terms: bool) -> ServiceActivation:
    """Activate distributed training for the member's organization. Raises TermsNotAccepted."""
    activation = services.activate_service(membership=membership, accept_terms=accept_terms)
    account = wallet_account(organization_id=membership.organization_id, currency=default_currency())
    credit.grant_trial(account=account, user=membership.user)
    catalog.ensure_first_workspace(organization=membership.organization, user=membership.user)
    return activation


def deactivate(*, membership: Membership) -> None:
    """Stop accepting orders. Open jobs continue and are charged; wallet, files and receipts stay."""
    services.deactivate_service(membership=membership)
