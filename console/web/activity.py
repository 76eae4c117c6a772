"""Descriptions of the actions in the audit log, for *Recent activity* and the page of the log."""

from __future__ import annotations

from typing import Any

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from billing.amounts import money
from console.accounts.models import AuditEvent, Membership

DESCRIPTIONS: dict[str, Promise] = {
    "organization.created": _("Created the organization"),
    "organization.renamed": _("Renamed the organization to %(to)s"),
    "organization.second_factor_required": _("Required a second factor of all members"),
    "organization.second_factor_optional": _("No longer requires a second factor of members"),
    "organization.shells_enabled": _("Let members open shells"),
    "organization.shells_disabled": _("No longer lets members open shells"),
    # The service is the training service of this console, which an organization activates before its first order.
    "service.activated": _("Activated the service"),
    "service.deactivated": _("Deactivated the service"),
    "organization.closure_requested": _("Asked to close the organization"),
    "organization.closure_withdrawn": _("Withdrew the closure of the organization"),
    "organization.exported": _("Exported the data of the organization"),
    "account.exported": _("Exported the data of their account"),
    "organization.closed": _("The organization was closed"),
    "account.closed": _("%(target)s deleted their account"),
    "member.invited": _("Invited %(target)s"),
    "member.joined": _("%(target)s joined the organization"),
    "member.role_changed": _("Changed the role of %(target)s to %(role)s"),
    "member.removed": _("Removed %(target)s"),
    "invitation.revoked": _("Revoked the invitation of %(target)s"),
    "invitation.declined": _("%(target)s declined the invitation"),
    "service_account.created": _("Created the service account %(target)s"),
    "service_account.role_changed": _("Changed the role of the service account %(target)s to %(role)s"),
    "service_account.disabled": _("Disabled the service account %(target)s"),
    "service_account.enabled": _("Enabled the service account %(target)s"),
    "service_account.deleted": _("Deleted the service account %(target)s"),
    "token.created": _("Created the API token %(target)s"),
    "token.revoked": _("Revoked the API token %(target)s"),
    "account.logged_in": _("Logged in"),
    "account.log_in_failed": _("A log-in failed: wrong password"),
    "account.factor_failed": _("A log-in failed: wrong code"),
    "account.password_changed": _("Changed the password"),
    "account.addresses_changed": _("Changed the email addresses: %(target)s"),
    "account.factor_added": _("Added a second factor: %(target)s"),
    "account.factor_removed": _("Removed a second factor: %(target)s"),
    "account.codes_renewed": _("Created new recovery codes"),
    "account.client_authorized": _("Logged in to another service: %(target)s"),
    "account.client_ended": _("Ended the access of another service: %(target)s"),
    "account.provider_connected": _("Connected single sign-on: %(target)s"),
    "account.provider_disconnected": _("Disconnected single sign-on: %(target)s"),
    "account.session_ended": _("Ended a session"),
    "budget.changed": _("Changed the budget of the organization"),
    "debt.written_off": _("An administrator wrote off a debt"),
    "credit.granted": _("An administrator granted credit: %(amount)s"),
    "credit.trial_granted": _("Received trial credit: %(amount)s"),
    "credit.redeemed": _("Redeemed a voucher: %(amount)s"),
    "voucher.created": _("Created a voucher: %(amount)s"),
    "refund.started": _("Started a refund: %(amount)s"),
    "order.placed": _("Ordered job %(target)s"),
    "job.cancelled": _("Cancelled job %(target)s"),
    "notebook.opened": _("Opened notebook %(target)s"),
    "notebook.extended": _("Extended notebook %(target)s"),
    "shell.opened": _("Opened a shell in node %(node)s of job %(target)s"),
    "shell.closed": _("Closed a shell in node %(node)s of job %(target)s"),
    "sweep.placed": _("Ordered sweep %(target)s"),
    "sweep.stopped": _("Stopped sweep %(target)s"),
    "sweep.stopped_by_operator": _("An administrator stopped sweep %(target)s: %(why)s"),
    "webhook.created": _("Created the webhook %(target)s"),
    "webhook.deleted": _("Deleted the webhook %(target)s"),
    "factors.reset": _("An administrator removed the second factors of %(target)s"),
    "approval.requested": _("%(target)s signed up and waits for approval"),
    "approval.given": _("An administrator approved %(target)s"),
    "cluster.drained": _("Drained the cluster %(target)s"),
    "cluster.resumed": _("Resumed the cluster %(target)s"),
    "job.stopped_by_operator": _("An administrator stopped job %(target)s"),
    "job.moved_by_operator": _("An administrator moved job %(target)s"),
    "job.log_read_by_operator": _("An administrator read the log of job %(target)s"),
    "job.page_opened_by_operator": _("An administrator opened the page of job %(target)s"),
    "job.changed": _("Changed the details of job %(target)s"),
    "job.results_removed": _("Deleted the results of job %(target)s"),
    "image.created": _("Registered the image %(target)s"),
    "image.changed": _("Changed the image %(target)s"),
    "image.deleted": _("Deleted the image %(target)s"),
    "registry.saved": _("Saved the credentials of the registry %(target)s"),
    "registry.deleted": _("Deleted the credentials of the registry %(target)s"),
    "secret.created": _("Created the secret %(target)s"),
    "secret.changed": _("Changed the secret %(target)s"),
    "secret.deleted": _("Deleted the secret %(target)s"),
    "dataset.created": _("Created the dataset %(target)s"),
    "dataset.published": _("Published version %(version)s of the dataset %(target)s"),
    "workspace.import_started": _("Started an import of a git repository as the workspace %(target)s"),
    "dataset.import_started": _("Started an import into the dataset %(target)s"),
    "dataset.shared": _("Created a code that shares the dataset %(target)s"),
    "dataset.share_taken": _("Another organization entered a code of the dataset %(target)s"),
    "dataset.share_revoked": _("Revoked a share of the dataset %(target)s"),
    "dataset.share_accepted": _("Added the shared dataset %(target)s"),
    "dataset.share_left": _("Gave up the shared dataset %(target)s"),
    "dataset.made_public": _("Made the dataset %(target)s public"),
    "dataset.withdrawn": _("Withdrew the public dataset %(target)s"),
    "dataset.deleted": _("Deleted the dataset %(target)s"),
    "dataset.version_deleted": _("Deleted the dataset version %(target)s"),
    "dataset.version.restored": _("Restored the dataset version %(target)s"),
    "dataset.version.removed": _("Permanently deleted the dataset version %(target)s"),
    "model.created": _("Created the model %(target)s"),
    "model.published": _("Published version %(version)s of the model %(target)s"),
    "model.deleted": _("Deleted the model %(target)s"),
    "model.version_deleted": _("Deleted the model version %(target)s"),
    "model.version.restored": _("Restored the model version %(target)s"),
    "model.version.removed": _("Permanently deleted the model version %(target)s"),
    "workspace.created": _("Created the workspace %(target)s"),
    "workspace.deleted": _("Deleted the workspace %(target)s"),
    "workspace.restored": _("Restored the workspace %(target)s"),
    "workspace.removed": _("Permanently deleted the workspace %(target)s"),
}
"""Description by action. Placeholders are the event's target and data, see `describe`."""
MEMBER_BUDGET = _("Changed the budget of %(member)s")
"""The description of `budget.changed` for the budget of one member."""
NOTEBOOK_STOPPED = _("Stopped notebook %(target)s")
"""The description of `job.cancelled` for a notebook: members end a notebook by cancelling its job."""


def describe(event: AuditEvent) -> str:
    """Return the description of an event in the reader's language. An action without a description shows its code."""
    text = DESCRIPTIONS.get(event.action)
    if text is None:
        return str(event)
    if event.action == "budget.changed" and event.data.get("member"):
        text = MEMBER_BUDGET
    elif event.action == "job.cancelled" and event.data.get("is_notebook"):
        text = NOTEBOOK_STOPPED
    role = event.data.get("to", "")  # the new role; for other actions another text, such as a new name
    kind, _colon, number = event.target.partition(":")  # pages show the target "job:12" as "#12"
    defaults = dict.fromkeys(
        ("version", "member", "why", "node", "amount"), ""
    )  # events that an older version wrote lack some
    values: dict[str, Any] = defaults | event.data
    values["target"] = f"#{number}" if kind in {"job", "sweep"} else event.target
    if {"amount_minor", "currency"} <= event.data.keys():
        values["amount"] = money(event.data["amount_minor"], event.data["currency"])
    values["role"] = dict(Membership.Roles.choices).get(role, role)
    return str(text) % values
