"""Invitations to an organization, sent by mail and accepted by the recipient only.

The inviter cannot see whether the address has an account: row, response and mail are the same in both cases. The link
in the mail holds the row's id, signed; the row holds the time of expiry.
"""

from __future__ import annotations

from datetime import timedelta

from celery import shared_task
from django.conf import settings
from django.core import signing
from django.db import transaction
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from console.accounts import emails, selectors, services
from console.accounts.models import Invitation, Membership, Organization, User
from console.core.enqueue import send_on_commit
from console.core.errors import InvalidInput, InvitationNotForYou, NotFound, TooManyInvitations
from console.installation.selectors import installation

VALID_FOR = timedelta(days=7)
"""How long a recipient may accept an invitation: a week outlasts most absences. The inviter can send a new one."""
MAX_OPEN = 100
"""Largest number of unexpired open invitations of an organization: more than any team needs at once."""
MAX_PER_DAY = 50
"""Largest number of invitations that a person may send in 24 hours, since they reach strangers' mailboxes."""
SIGNING_SALT = "console.accounts.invitation"
"""Other signed values of the console have other salts, so that none of them is accepted as an invitation."""


def invite(*, organization: Organization, email: str, role: str, actor: User) -> Invitation:
    """Invite an address, revoking earlier invitations to it. Raises InvalidInput, TooManyInvitations."""
    role, email = services.checked_role(role), email.strip().lower()
    if organization.memberships.filter(user__email=email).exists():
        raise InvalidInput(fields={"email": gettext_lazy("This person is already a member.")})
    now = timezone.now()
    with transaction.atomic():
        services.lock(organization)
        selectors.open_invitations(organization=organization).filter(email=email).update(revoked_at=now)
        open_count = selectors.open_invitations(organization=organization).filter(expires_at__gt=now).count()
        sent_in_a_day = Invitation.objects.filter(invited_by=actor, created_at__gt=now - timedelta(days=1)).count()
        if open_count >= MAX_OPEN or sent_in_a_day >= MAX_PER_DAY:
            raise TooManyInvitations
        invitation = Invitation.objects.create(
            organization=organization, email=email, role=role, invited_by=actor, expires_at=now + VALID_FOR
        )
        services.record_audit_event(
            organization=organization, actor=actor, action="member.invited", target=email, data={"role": role}
        )
        send_on_commit(send_due)
    return invitation


def revoke(*, invitation: Invitation, actor: User | None) -> None:
    """Revoke an invitation. Idempotent."""
    _end_invitation(invitation, actor, "invitation.revoked")


def decline(*, invitation: Invitation, actor: User | None) -> None:
    """Decline an invitation. Idempotent."""
    _end_invitation(invitation, actor, "invitation.declined")


def accept(*, invitation: Invitation, user: User) -> Membership:
    """Accept an invitation. An existing membership keeps its role.

    Raises NotFound if the invitation has ended, InvitationNotForYou if it was sent to another address.
    """
    if user.email.lower() != invitation.email:
        raise InvitationNotForYou
    now = timezone.now()
    with transaction.atomic():
        rows = Invitation.objects.filter(pk=invitation.pk, accepted_at=None, revoked_at=None, expires_at__gt=now)
        if not rows.update(accepted_at=now):
            raise NotFound
        membership, _is_new = Membership.objects.get_or_create(
            user=user, organization=invitation.organization, defaults={"role": invitation.role}
        )
        services.record_audit_event(
            organization=invitation.organization,
            actor=user,
            action="member.joined",
            target=user.email,
            data={"role": membership.role},
        )
    return membership


def find(token: str) -> Invitation | None:
    """Return the invitation of a link; None if the link is forged, or if the invitation has ended or expired."""
    try:
        pk = signing.loads(token, salt=SIGNING_SALT)
    except signing.BadSignature:
        return None
    invitations = Invitation.objects.select_related("organization", "invited_by")
    return invitations.filter(pk=pk, accepted_at=None, revoked_at=None, expires_at__gt=timezone.now()).first()


def token_of(invitation: Invitation) -> str:
    """Return the token of an invitation's link. Only the email contains it: it proves access to the mailbox."""
    return signing.dumps(invitation.pk, salt=SIGNING_SALT)


@shared_task(name="console.accounts.invitations.send_due")
@emails.shared_connection()
def send_due() -> int:
    """Send the emails of new invitations and return their number."""
    due = Invitation.objects.filter(mailed_at=None, accepted_at=None, revoked_at=None, expires_at__gt=timezone.now())
    return sum(_send_mail(invitation) for invitation in due.select_related("organization", "invited_by"))


def _send_mail(invitation: Invitation) -> bool:
    """Send the email of an invitation, and return whether it was sent."""
    recipient: emails.Recipient | None = User.objects.filter(email=invitation.email, is_active=True).first()
    if recipient is None:  # a person without an account gets the inviter's language and time zone
        inviter = invitation.invited_by or User()
        recipient = emails.Guest(invitation.email, inviter.language, inviter.time_zone, inviter.browser_time_zone)

    def render() -> tuple[str, str]:
        context = {
            "invitation": invitation,
            "installation": installation(),
            "url": f"{settings.TRAINYARD_URL}{reverse('invitation', args=[token_of(invitation)])}",
        }
        subject = _("Invitation to %(organization)s") % {"organization": invitation.organization}
        return subject, render_to_string("accounts/mail/invitation.txt", context)

    rows = Invitation.objects.filter(pk=invitation.pk)
    return emails.deliver(rows, render, [recipient])


def _end_invitation(invitation: Invitation, actor: User | None, action: str) -> None:
    """End an invitation that is still open, and write `action` to the audit log. Declined ones get `revoked_at` too."""
    with transaction.atomic():
        rows = Invitation.objects.filter(pk=invitation.pk, accepted_at=None, revoked_at=None)
        if rows.update(revoked_at=timezone.now()):
            services.record_audit_event(
                organization=invitation.organization, actor=actor, action=action, target=invitation.email
            )
