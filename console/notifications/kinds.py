"""The kinds of notifications, with who may see them and whether they are mailed."""

from __future__ import annotations

from dataclasses import dataclass

from django.utils.translation import gettext_lazy as _

from console.accounts.roles import Capability
from console.core.errors import Text


@dataclass(frozen=True)
class Kind:
    """A kind of notification. Only members with the capability `needs` may see it.

    `is_mailed` applies to a member who has not chosen which kinds are emailed.
    """

    title: Text
    needs: Capability
    is_mailed: bool


KINDS = {
    "job.succeeded": Kind(_("A job succeeded"), Capability.VIEW, is_mailed=False),
    "job.failed": Kind(_("A job failed"), Capability.VIEW, is_mailed=True),
    "job.cancelled": Kind(_("A job was cancelled"), Capability.VIEW, is_mailed=False),
    "sweep.ended": Kind(_("A sweep ended"), Capability.VIEW, is_mailed=True),
    "notebook.ending": Kind(_("A notebook is about to end"), Capability.RUN, is_mailed=True),
    "files.expiring": Kind(_("Files of jobs will be deleted"), Capability.STORE, is_mailed=True),
    "wallet.topped_up": Kind(_("Money arrived in the wallet"), Capability.PAY, is_mailed=False),
    "wallet.low": Kind(_("The wallet balance is low"), Capability.PAY, is_mailed=True),
    "budget.reached": Kind(_("A share of a budget is used"), Capability.PAY, is_mailed=True),
    "invoice.issued": Kind(_("An invoice was issued"), Capability.PAY, is_mailed=True),
}
"""The kinds by name. Do not change a name: programs that receive webhooks rely on it."""
