"""The additional sign-up field. allauth's forms import this module, so this module must not import allauth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django import forms
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

if TYPE_CHECKING:
    from console.accounts.models import User


class SignUpForm(forms.Form):
    """The base of allauth's sign-up form (`ACCOUNT_SIGNUP_FORM_CLASS`)."""

    organization = forms.CharField(
        label=_("Organization"),
        max_length=100,
        required=False,
        help_text=_("Leave empty to use the first part of your email address. You can change it later."),
        widget=forms.TextInput(attrs={"autocomplete": "organization"}),
    )

    field_order = ("email", "organization", "password1", "password2")

    def signup(self, request: HttpRequest, user: User) -> None:
        """Do nothing: `adapter.AccountAdapter` creates the membership with the user."""
