"""The sign-up forms. They accept invitations and never reveal who has an account.

They are not in `forms`, because allauth's forms import that module, and this one imports allauth's forms.
"""

from __future__ import annotations

from typing import Any

from allauth.account.forms import SignupForm
from allauth.core import context
from allauth.socialaccount.forms import SignupForm as SocialSignupForm
from django.conf import settings
from django.contrib.auth.hashers import make_password
from django.core.exceptions import ValidationError
from django.http import HttpRequest
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from console.accounts import invitations, services
from console.accounts.models import Invitation


class _DomainRule:
    """A mixin for sign-up forms. It refuses addresses of other email domains than SIGNUP_EMAIL_DOMAINS.

    A person with an invitation may use any domain.
    """

    invitation: Invitation | None = None

    def clean_email(self) -> str:
        """Return the address. Raises ValidationError."""
        email: str = super().clean_email()  # type: ignore[misc]  # a method of the form that this class is mixed into
        if not self.invitation and not services.may_sign_up(email):
            domains = ", ".join(settings.SIGNUP_EMAIL_DOMAINS)
            raise ValidationError(_("Use an address of: %(domains)s.") % {"domains": domains})
        return email


class SingleSignOnForm(_DomainRule, SocialSignupForm):  # type: ignore[misc]  # allauth publishes no types
    """The form that asks for the data that the single sign-on provider did not send."""


class AccountForm(_DomainRule, SignupForm):  # type: ignore[misc]  # as above
    """The form of people who sign up with a password. With `?invitation=<token>` in the URL, the address is fixed.

    `AccountAdapter.save_user` accepts the invitation. A person with an invitation sees no captcha, because the token
    comes from an email to this address.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.invitation = invitations.find(context.request.GET.get("invitation", ""))
        if self.invitation:
            del self.fields["organization"]  # the person joins the inviting organization
            self.fields["email"].initial = self.initial["email"] = self.invitation.email
            self.fields["email"].disabled = True
        elif settings.SIGNUP_CAPTCHA_FIELD:
            self.fields["captcha"] = import_string(settings.SIGNUP_CAPTCHA_FIELD)()

    def try_save(self, request: HttpRequest) -> Any:
        """Save the user. Hash the password also if the address has an account, so that timing reveals nothing."""
        if self.account_already_exists:
            make_password(self.cleaned_data.get("password1"))
        return super().try_save(request)
