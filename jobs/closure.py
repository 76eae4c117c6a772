"""Close an organization: after a notice, pay back what is left, delete the data, and end the memberships.

`request` writes the closure's row and stops the service. Until the notice is over, an owner can withdraw the closure.
After that, a periodic task completes it. Every step is safe to repeat, so after a crash the next call continues. Money
that arrives later, such as a payment in progress or a refund that failed, is paid back too. Orders, receipts, invoices,
the ledger and the audit log stay, because accounting needs them.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from billing import auto_topup, credit, customers, invoices, payments, receivables, refunds, storage_charges
from billing import selectors as billing
from billing.amounts import money
from billing.models import Account, Budget, Dispute, TopUp
from console.accounts import services
from console.accounts.emails import deliver, shared_connection
from console.accounts.models import Closure, Membership, Organization, Quota, User
from console.accounts.roles import Capability, Role
from console.core.errors import CustomerError, InvalidInput, NotAllowed, OrganizationClosing
from console.notifications.models import Notification, Webhook
from jobs import packages, results
from jobs.models import Job, MetricPoint, ScriptSnapshot, Sweep
from jobs.states import OPEN
from storage import images, recycle_bin, registries, retention, secret_store
from storage import selectors as storage
from storage.models import Allocation, DatasetShare, DeletedFile, Image, Upload

REASON = gettext_noop("The organization was closed")
"""The reason of the refunds, as the customer reads it."""
logger = logging.getLogger(__name__)


def closure_of(organization: Organization) -> Closure | None:
    """Return the organization's closure; None if none was requested."""
    return Closure.objects.filter(organization=organization).select_related("requested_by").first()


def obstacles(organization: Organization, *, with_payment_pages: bool = False) -> list[str]:
    """Return why the organization cannot be closed now, one sentence each; empty if it can.

    `with_payment_pages`: an open payment page is an obstacle too. Set it after `payments.close_pages`, which closes all
    pages but those where a payment is in progress.
    """
    reasons = []
    if count := Job.objects.filter(organization=organization, state__in=OPEN).count():
        sentence = ngettext(
            "%(count)d job is open. Wait for it to end, or cancel it.",
            "%(count)d jobs are open. Wait for them to end, or cancel them.",
            count,
        )
        reasons.append(sentence % {"count": count})
    if Sweep.objects.filter(organization=organization, ended_at=None).exists():
        reasons.append(_("A sweep is open. Wait for it to end, or stop it."))
    disputes = Dispute.objects.filter(top_up__account__organization=organization, state=Dispute.States.OPEN)
    if disputes.exists():
        reasons.append(_("A bank disputes one of your payments. Wait for its decision."))
    open_payments = TopUp.objects.filter(account__organization=organization, state__in=payments.OPEN_STATES)
    if not with_payment_pages:
        open_payments = open_payments.filter(origin=TopUp.Origins.AUTOMATIC)
    # A payment page without a session was never shown to anybody.
    if open_payments.exclude(origin=TopUp.Origins.CHECKOUT, session_id="").exists():
        reasons.append(_("A payment is in progress. Wait until it arrives or fails."))
    return reasons


def payable_minor(organization: Organization) -> int:
    """Return how much is paid back if the organization closes now, in minor units."""
    account = billing.wallet(organization)
    return credit.paid_minor(account) if account else 0


def request(*, membership: Membership, confirmation: str) -> Closure:
    """Begin the notice after which the organization is closed. Idempotent.

    `confirmation` must be the organization's short name. Raises NotAllowed, InvalidInput, PaymentUnavailable, and
    OrganizationClosing with the obstacles.
    """
    organization = membership.organization
    # Owners have all capabilities, so a token needs all scopes. A token that may only manage must not end everything.
    if not membership.may_grant(Role.OWNER):
        raise NotAllowed
    if confirmation != organization.slug:
        sentence = _("Enter %(name)s to confirm.") % {"name": organization.slug}
        raise InvalidInput(fields={"confirmation": sentence})
    account = billing.wallet(organization)
    if account:
        # Both calls come before the transaction. `close_pages` calls the payment provider. `collect` locks accounts,
        # and in the transaction `invoices.issue` must lock the series of invoices before accounts.
        payments.close_pages(account=account)
        storage_charges.collect(account=account)
    with transaction.atomic():
        services.lock(organization)
        if existing := closure_of(organization):
            return existing
        reasons = obstacles(organization, with_payment_pages=True)
        if account:
            # The invoice is issued now, so that the owner can still download it, and the tax is known before money is
            # paid back.
            invoices.issue(organization=organization, user=membership.user)
            auto_topup.switch_off(account=account)
            account.refresh_from_db()  # the calls above have changed the row
            if owed := receivables.owed_minor(account) + storage_charges.unpaid_minor(account):
                sentence = _("You owe %(amount)s. Top up the wallet to pay it.")
                reasons.append(sentence % {"amount": money(owed, account.currency)})
        if reasons:
            raise OrganizationClosing(" ".join(reasons))  # rolls the transaction back
        services.suspend_service(organization=organization, actor=membership.user)
        closure = Closure.objects.create(
            organization=organization,
            requested_by=membership.user,
            ends_at=timezone.now() + timedelta(days=settings.CLOSURE_NOTICE_DAYS),
        )
        services.record_audit_event(
            organization=organization,
            actor=membership.user,
            action="organization.closure_requested",
            target=organization.slug,
            data={"ends_at": closure.ends_at.isoformat()},
        )
    return closure


def withdraw(*, membership: Membership) -> None:
    """Keep the organization. Idempotent. The service stays inactive.

    Raises NotAllowed, and OrganizationClosing if the notice is over.
    """
    if not membership.allows(Capability.MANAGE):
        raise NotAllowed
    organization = membership.organization
    with transaction.atomic():
        services.lock(organization)
        closure = closure_of(organization)
        if closure is None:
            return
        if closure.is_due:
            raise OrganizationClosing(_("The notice is over. The closure can no longer be withdrawn."))
        closure.delete()
        services.record_audit_event(
            organization=organization,
            actor=membership.user,
            action="organization.closure_withdrawn",
            target=organization.slug,
        )


def complete_due() -> int:
    """Complete the closures whose notice is over, and pay back money that closed organizations got since.

    Return how many closures were completed.
    """
    completed = 0
    for closure in Closure.objects.filter(ends_at__lte=timezone.now(), closed_at=None).select_related("organization"):
        try:
            problem = _complete(closure)
        except CustomerError as error:
            problem = str(error.message)
        except Exception:  # one closure that fails must not stop the others
            logger.exception(
                "The closure of organization %s stopped; the next call continues.", closure.organization_id
            )
            problem = "Internal error: see the log."
        Closure.objects.filter(pk=closure.pk).update(problem=problem)
        completed += not problem
    for account in accounts_to_pay_back():
        try:
            refunds.pay_back(account=account, reason=REASON)
        except Exception:  # one wallet must not keep the others waiting
            logger.exception("The wallet %s could not be paid back; the next call tries again.", account.pk)
    return completed


def accounts_to_pay_back() -> list[Account]:
    """Return the wallets of closed organizations that have money which was paid in, and so must be paid back."""
    wallets = Account.objects.filter(kind=Account.Kinds.WALLET, posted_minor__gt=F("held_minor"))
    closed = wallets.filter(organization__closure__closed_at__isnull=False).select_related("organization")
    return [account for account in closed if credit.paid_minor(account) > 0]


@shared_connection()
def announce() -> int:
    """Mail all members that their organization will be closed; return the number of closures announced."""
    # `deliver` marks the row as emailed and returns whether it sent the emails.
    unannounced = Closure.objects.filter(mailed_at=None, closed_at=None).select_related("organization", "requested_by")
    return sum(
        deliver(Closure.objects.filter(pk=closure.pk), partial(_mail, closure), _members(closure))
        for closure in unannounced
    )


def _complete(closure: Closure) -> str:
    """Complete a closure. Return the sentences that say why it must wait; empty if it was completed."""
    organization = closure.organization
    # With these quotas no more jobs can be ordered. Nothing can be stored, not even by an import or upload in progress.
    no_storage = dict.fromkeys(("max_storage_bytes", "max_files", "max_datasets", "max_workspaces", "max_models"), 0)
    Quota.objects.filter(organization=organization).update(**no_storage, max_open_jobs=0)
    account = billing.wallet(organization)
    if account:
        payments.close_pages(account=account)
    if reasons := obstacles(organization, with_payment_pages=True):
        return " ".join(reasons)
    if account:
        storage_charges.collect(account=account)
        invoices.issue(organization=organization)
        refunds.pay_back(account=account, reason=REASON)
        credit.forfeit(account=account)
    _delete_data(organization)
    _remove_cards(organization)
    with transaction.atomic():
        services.lock(organization)
        if Closure.objects.filter(pk=closure.pk, closed_at=None).update(closed_at=timezone.now()):
            services.end_memberships(organization=organization)
            services.record_audit_event(
                organization=organization, actor=None, action="organization.closed", target=organization.slug
            )
    return ""


def _delete_data(organization: Organization) -> None:
    """Delete everything that members stored and runs wrote. Safe to repeat. Raises InUse, ClusterUnavailable."""
    # A job that has files has an allocation, the row that counts them against the storage quota.
    runs = Allocation.objects.filter(organization=organization, kind=Allocation.Kinds.RUN)
    for job in organization.jobs.filter(pk__in=[allocation.job_pk for allocation in runs]):
        results.remove(job=job, user=None)
        results.discard_count(job.pk)
    MetricPoint.objects.filter(job__organization=organization).delete()
    # The rows stay, because jobs refer to them.
    ScriptSnapshot.objects.filter(organization=organization).update(content=None)
    packages.remove_all(organization)
    for dataset in storage.datasets_for(organization):
        retention.delete_dataset(dataset=dataset)
    for model in storage.models_for(organization):
        retention.delete_model(model=model)
    for workspace in storage.workspaces_for(organization):
        retention.delete_workspace(workspace=workspace)
    for item in storage.deleted(organization):
        retention.remove(item=item)
    for file in DeletedFile.objects.filter(workspace__organization=organization):
        recycle_bin.remove(item=file)
    for secret in organization.secrets.all():
        secret_store.delete_secret(secret=secret)
    for registry in organization.registries.all():
        registries.delete_registry(registry=registry)
    for image in Image.objects.filter(organization=organization, is_active=True):
        images.delete_image(image=image)
    with transaction.atomic():
        DatasetShare.objects.filter(recipient=organization).delete()
        Webhook.objects.filter(organization=organization).delete()
        Notification.objects.filter(organization=organization).delete()
        Budget.objects.filter(organization=organization).delete()
        Upload.objects.filter(organization=organization).delete()


def _remove_cards(organization: Organization) -> None:
    """Remove the saved cards at the payment provider. Raises PaymentUnavailable."""
    for saved in customers.saved_cards(organization):
        customers.remove_card(organization=organization, method_id=saved.card.method_id)


def _members(closure: Closure) -> list[User]:
    """Return the active members of the organization that is closed."""
    members = Membership.objects.filter(organization=closure.organization, user__is_active=True).select_related("user")
    return [member.user for member in members]


def _mail(closure: Closure) -> tuple[str, str]:
    """Return the subject and the text of the email that announces a closure."""
    context = {
        "closure": closure,
        "organization": closure.organization,
        "ends_at": timezone.localtime(closure.ends_at),
        "url": f"{settings.TRAINYARD_URL}/organization/close/",
    }
    subject = _("%(organization)s will be closed") % {"organization": closure.organization}
    return subject, render_to_string("accounts/mail/closure.txt", context)
