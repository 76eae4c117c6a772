"""Where allauth meets our accounts. The one rule: nobody signs up without getting an organization of their own."""

from __future__ import annotations

from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from django.db import transaction
from django.forms import Form
from django.http import HttpRequest
from django.utils.translation import get_language

from console.accounts import services
from console.accounts.models import User


class AccountAdapter(DefaultAccountAdapter):  # type: ignore[misc]  # allauth publishes no types
    """Saves the person and their first organization together."""

    def save_user(self, request: HttpRequest, user: User, form: Form, commit: bool = True) -> User:
        """Save a person who signs up; with `commit`, their organization in the same transaction."""
        with transaction.atomic():
            saved: User = super().save_user(request, user, form, commit)
            if commit:
                given: Any = form.cleaned_data.get("organization")
                services.create_organization(user=saved, name=given or saved.email.partition("@")[0])
        return saved

    def login(self, request: HttpRequest, user: User) -> None:
        """Log a person in, and remember the language of their page for what is sent by mail."""
        super().login(request, user)
        services.remember_language(user=user, language=get_language())
