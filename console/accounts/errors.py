"""What the floor may refuse, and the root of what a customer may read. Each room has its own root below this one."""

from __future__ import annotations

from collections.abc import Mapping

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

Text = str | Promise


class CustomerError(Exception):
    """Root of every error shown to a customer: a stable `code`, a translated sentence, and the fields at fault.

    `fields` maps a field's name to its sentence. The HTTP status is chosen in `console.api` alone.
    """

    code = "error"
    message: Text = _("Something was wrong with this request.")

    def __init__(self, message: Text | None = None, *, fields: Mapping[str, Text] | None = None) -> None:
        if message is not None:
            self.message = message
        self.fields: dict[str, Text] = dict(fields or {})
        super().__init__(str(self.message))


class AccountsError(CustomerError):
    """Root of the floor's own errors."""

    code = "accounts_error"


class ServiceInactive(AccountsError):
    """The organization has not activated the service (or has deactivated it)."""

    code = "service_inactive"
    message = _("Activate the distributed training service first: nothing can be bought before that.")


class TermsNotAccepted(AccountsError):
    """Activation without accepting the terms."""

    code = "terms_not_accepted"
    message = _("Accept the terms to activate the service.")


class LastOwner(AccountsError):
    """The act would leave an organization with no owner."""

    code = "last_owner"
    message = _("An organization needs an owner: make another member an owner first.")


class InvalidInput(AccountsError):
    """Values that were refused, each at its field."""

    code = "invalid"
    message = _("Some values need correcting.")


class NotFound(AccountsError):
    """No such object, or not this organization's: the two are never told apart."""

    code = "not_found"
    message = _("There is no such object here.")


class NotAllowed(AccountsError):
    """The member's role doesn't allow the act."""

    code = "not_allowed"
    message = _("Your role in this organization doesn't allow this. Ask an owner.")
