"""Sentences of allauth and Django on account pages that `locale/` translates anew: their own wording differs from ours.

Nothing imports this module. It keeps the sentences in the catalog when messages are collected.
"""

from __future__ import annotations

from django.utils.translation import gettext_noop, ngettext_lazy

ALLAUTH = (
    gettext_noop("Add Email"),
    gettext_noop("Add Email Address"),
    gettext_noop("Change Email"),
    gettext_noop("Change Password"),
    gettext_noop("Confirm Email Address"),
    gettext_noop("Current email"),
    gettext_noop("Do you really want to remove the selected email address?"),
    gettext_noop("Email Address"),
    gettext_noop("Email Addresses"),
    gettext_noop("Email Changed"),
    gettext_noop("Email Confirmation"),
    gettext_noop("Email Removed"),
    gettext_noop("Email address %(deleted_email)s has been removed from your account."),
    gettext_noop("Make Primary"),
    gettext_noop("Please Confirm Your Email Address"),
    gettext_noop("Primary"),
    gettext_noop("Primary email address set."),
    gettext_noop("Re-send Verification"),
    gettext_noop("Removed email address %(email)s."),
    gettext_noop("The following email addresses are associated with your account:"),
    gettext_noop("Verify Your Email Address"),
    gettext_noop("You cannot remove your primary email address (%(email)s)."),
    gettext_noop("You have confirmed %(email)s."),
    gettext_noop("Your email has been confirmed."),
    gettext_noop("You cannot activate two-factor authentication until you have verified your email address."),
    gettext_noop("You cannot add an email address to an account protected by two-factor authentication."),
    gettext_noop("You cannot deactivate two-factor authentication."),
    gettext_noop("You cannot generate recovery codes without having two-factor authentication enabled."),
    gettext_noop("Your account has no verified email address."),
    gettext_noop("Your password is now changed."),
)
DJANGO = (
    gettext_noop("Your old password was entered incorrectly. Please enter it again."),
    ngettext_lazy(
        "Your password must contain at least %(min_length)d character.",
        "Your password must contain at least %(min_length)d characters.",
        "min_length",
    ),
    gettext_noop("Your password can’t be too similar to your other personal information."),
    gettext_noop("Your password can’t be a commonly used password."),
    gettext_noop("Your password can’t be entirely numeric."),
)
