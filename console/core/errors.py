"""Errors shown to customers: their root class, and the errors of accounts. Other packages have modules `errors` too."""

from __future__ import annotations

from collections.abc import Mapping

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

Text = str | Promise
"""A sentence for a person. A Promise is translated when it is shown, in the reader's language."""


class CustomerError(Exception):
    """Root of the errors shown to customers.

    Each has a `code` for programs, which never changes, a translated `message`, and further messages by the name of the
    invalid field. `console.core.error_codes` has the HTTP status of each code.
    """

    code = "error"
    message: Text = _("The request failed. Check its values and try again.")

    def __init__(self, message: Text | None = None, *, fields: Mapping[str, Text] | None = None) -> None:
        if message is not None:
            self.message = message
        self.fields: dict[str, Text] = dict(fields or {})
        super().__init__(str(self.message))


class AccountsError(CustomerError):
    """Root of the errors of `console.accounts`, some of which other packages raise too."""

    code = "accounts_error"


class ServiceInactive(AccountsError):
    """The organization's service is not active."""

    code = "service_inactive"
    message = _("Activate the distributed training service before you buy.")


class OrganizationClosing(AccountsError):
    """The organization is being closed, cannot be closed yet, or its closure can no longer be withdrawn.

    `jobs.closure` closes organizations, after a notice period.
    """

    code = "organization_closing"
    message = _("This organization is being closed. An owner can withdraw the closure.")


class SoleOwner(AccountsError):
    """The account cannot be deleted: it is the only owner of an organization, or belongs to an administrator.

    Each case has a message of its own. LastOwner is about changes of members.
    """

    code = "sole_owner"


class TermsNotAccepted(AccountsError):
    """The terms were not accepted."""

    code = "terms_not_accepted"
    message = _("Accept the terms to activate the service.")


class LastOwner(AccountsError):
    """The change of a member's role, or the member's removal, would leave an organization without an owner."""

    code = "last_owner"
    message = _("An organization needs at least one owner. Make another member an owner first.")


class InvalidInput(AccountsError):
    """Invalid values, with a message per field."""

    code = "invalid"
    message = _("Some values are invalid. Correct them and try again.")


class TooManyInvitations(AccountsError):
    """The person or organization has reached its limit of invitations."""

    code = "too_many_invitations"
    message = _("Too many invitations. Revoke open invitations or try again tomorrow.")


class InvitationNotForYou(AccountsError):
    """The invitation was sent to another address."""

    code = "not_allowed"
    message = _("This invitation is for another email address. Log in with that address.")


class NotFound(AccountsError):
    """The object does not exist or belongs to another organization; the two are not distinguished."""

    code = "not_found"
    message = _("This object does not exist in your organization.")


class SecondFactorRequired(AccountsError):
    """The organization requires a second factor that the member has not set up."""

    code = "second_factor_required"
    message = _("This organization requires a second factor. Set one up under Security, then try again.")


class NotAllowed(AccountsError):
    """The member's role does not allow the action."""

    code = "not_allowed"
    message = _("Your role in this organization doesn't allow this. Ask an owner.")
