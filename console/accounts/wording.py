"""Sentences of allauth and Django on account pages that `locale/` replaces, because the console uses other terms.

`locale/en` rewords allauth's sentences; `locale/zh_Hans` translates those of allauth and Django. Nothing imports this
module: it keeps the sentences in the Chinese catalog when messages are collected. The English catalog is written by
hand.
"""

from __future__ import annotations

from django.utils.translation import gettext_noop, ngettext_lazy

ALLAUTH = (
    gettext_noop("A new security key has been added."),
    gettext_noop("A new set of Two-Factor Authentication recovery codes has been generated."),
    gettext_noop("A new set of recovery codes has been generated."),
    gettext_noop("A security key has been removed."),
    gettext_noop("A third-party account from %(provider)s has been connected to your account."),
    gettext_noop("A third-party account from %(provider)s has been disconnected from your account."),
    gettext_noop("Account Already Exists"),
    gettext_noop("Account Inactive"),
    gettext_noop("Add Email"),
    gettext_noop("Add Email Address"),
    gettext_noop("Alternative options"),
    gettext_noop(
        "An account already exists with this email address. Please sign in to that account first, then connect "
        "your %s account."
    ),
    gettext_noop("Are you sure you want to sign out?"),
    gettext_noop("Authenticator App"),
    gettext_noop("Authenticator App Activated"),
    gettext_noop("Authenticator App Deactivated"),
    gettext_noop("Authenticator app activated."),
    gettext_noop("Authenticator app deactivated."),
    gettext_noop("Bad Token"),
    gettext_noop("Be patient, you are sending too many requests."),
    gettext_noop("Cancel Change"),
    gettext_noop("Change Email"),
    gettext_noop("Change Password"),
    gettext_noop("Confirm Access"),
    gettext_noop("Confirm Email Address"),
    gettext_noop("Confirmation email sent to %(email)s."),
    gettext_noop("Current Password"),
    gettext_noop("Current email"),
    gettext_noop("Do you really want to remove the selected email address?"),
    gettext_noop("Email"),
    gettext_noop("Email Address"),
    gettext_noop("Email Addresses"),
    gettext_noop("Email Changed"),
    gettext_noop("Email Confirmation"),
    gettext_noop("Email Removed"),
    gettext_noop("Email address %(deleted_email)s has been removed from your account."),
    gettext_noop("Enter an authenticator code:"),
    gettext_noop("Enter your password:"),
    gettext_noop("Forgot Password?"),
    gettext_noop(
        "Forgotten your password? Enter your email address below, and we'll send you an email allowing you to reset it."
    ),
    gettext_noop("Make Primary"),
    gettext_noop("New Password"),
    gettext_noop("New Password (again)"),
    gettext_noop("New Recovery Codes Generated"),
    gettext_noop("Password Changed"),
    gettext_noop("Password Reset"),
    gettext_noop("Password Reset Email"),
    gettext_noop("Password Set"),
    gettext_noop("Please Confirm Your Email Address"),
    gettext_noop(
        'Please confirm that <a href="mailto:%(email)s">%(email)s</a> is an email address for user %(user_display)s.'
    ),
    gettext_noop("Please contact us if you have any trouble resetting your password."),
    gettext_noop("Please reauthenticate to safeguard your account."),
    gettext_noop("Please type your current password."),
    gettext_noop("Primary"),
    gettext_noop("Primary email address set."),
    gettext_noop("Re-send Verification"),
    gettext_noop("Recovery Codes"),
    gettext_noop("Removed email address %(email)s."),
    gettext_noop("Reset My Password"),
    gettext_noop("Save them  in a secure location now — they won't be shown again."),
    gettext_noop("Security Key Added"),
    gettext_noop("Security Key Removed"),
    gettext_noop("Security Keys"),
    gettext_noop("Set Password"),
    gettext_noop("Sign Out"),
    gettext_noop("Signed out of all other sessions."),
    gettext_noop("Stay Signed In"),
    gettext_noop("TOTP Authenticator"),
    gettext_noop("The email address and/or password you specified are not correct."),
    gettext_noop("The following email addresses are associated with your account:"),
    gettext_noop(
        "The password reset link was invalid, possibly because it has already been used.  Please request a <a "
        'href="%(passwd_reset_url)s">new password reset</a>.'
    ),
    gettext_noop("The third-party account has been connected."),
    gettext_noop("The third-party account has been disconnected."),
    gettext_noop("The third-party account is already connected to a different account."),
    gettext_noop("Third-Party Account Connected"),
    gettext_noop("Third-Party Account Disconnected"),
    gettext_noop("This account is inactive."),
    gettext_noop(
        'This email confirmation link expired or is invalid. Please <a href="%(email_url)s">issue a new email '
        "confirmation request</a>."
    ),
    gettext_noop("Too many failed login attempts. Try again later."),
    gettext_noop("Two-Factor Authentication"),
    gettext_noop("Unable to confirm %(email)s because it is already confirmed by a different account."),
    gettext_noop("Unknown Account"),
    gettext_noop("Use a security key"),
    gettext_noop("Verify Your Email Address"),
    gettext_noop(
        "We have sent an email to you for verification. Follow the link provided to finalize the signup process. "
        "If you do not see the verification email in your main inbox, check your spam folder. Please contact us "
        "if you do not receive the verification email within a few minutes."
    ),
    gettext_noop(
        "We have sent you an email. If you have not received it please check your spam folder. Otherwise contact "
        "us if you do not receive it in a few minutes."
    ),
    gettext_noop("You are receiving this mail because the following change was made to your account:"),
    gettext_noop("You cannot activate two-factor authentication until you have verified your email address."),
    gettext_noop("You cannot add an email address to an account protected by two-factor authentication."),
    gettext_noop("You cannot deactivate two-factor authentication."),
    gettext_noop("You cannot disconnect your last remaining third-party account."),
    gettext_noop("You cannot generate recovery codes without having two-factor authentication enabled."),
    gettext_noop("You cannot remove your primary email address (%(email)s)."),
    gettext_noop("You cannot remove your primary email address."),
    gettext_noop(
        "You currently do not have any email address set up. You should really add an email address so you can "
        "receive notifications, reset your password, etc."
    ),
    gettext_noop("You have confirmed %(email)s."),
    gettext_noop("You have signed out."),
    gettext_noop("Your account has no verified email address."),
    gettext_noop("Your account is protected by two-factor authentication. Please enter an authenticator code:"),
    gettext_noop("Your email has been confirmed."),
    gettext_noop("Your password is now changed."),
    gettext_noop("Your primary email address must be verified."),
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
