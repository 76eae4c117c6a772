"""The allauth adapter. Everyone who signs up joins an organization: the inviting one, or their own."""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import urlsplit

from allauth.account.adapter import DefaultAccountAdapter
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from django.conf import settings
from django.core.cache import cache
from django.db import transaction
from django.forms import Form
from django.http import HttpRequest
from django.shortcuts import redirect
from django.urls import Resolver404, resolve
from django.utils.translation import get_language

from console.accounts import invitations, selectors, services
from console.accounts.models import Invitation, User
from console.core import optional_cache
from console.observability import addresses

MAX_LOGIN_FAILURES, LOGIN_WINDOW_SECONDS = 5, 300
"""How many log-ins to one account may fail from one IP address in this window. allauth's own limit, which has the same
numbers, counts by account alone, so anyone could lock the owner out. The setting ACCOUNT_RATE_LIMITS switches
allauth's limit off."""


class AccountAdapter(DefaultAccountAdapter):  # type: ignore[misc]  # allauth publishes no types
    """Saves new users together with their first membership."""

    def save_user(self, request: HttpRequest, user: User, form: Form, commit: bool = True) -> User:
        """Save a new user and, with `commit`, their membership in the same transaction."""
        invitation = invitations.find(request.GET.get("invitation", ""))
        with transaction.atomic():
            saved: User = super().save_user(request, user, form, commit)
            if commit and invitation and invitation.email == saved.email.lower():
                invitations.accept(invitation=invitation, user=saved)
                self.stash_verified_email(request, saved.email)  # the invitation's link was sent to this address
            elif commit:
                _create_organization(saved, form.cleaned_data.get("organization"))
        return saved

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        """Return whether this person may sign up: by the rule of the installation, or with an invitation."""
        return settings.SIGNUP != "closed" or invitations.find(request.GET.get("invitation", "")) is not None

    def pre_authenticate(self, request: HttpRequest, **credentials: Any) -> None:
        """Count the attempt as a failure until `authenticate` succeeds. Raises ValidationError after too many."""
        super().pre_authenticate(request, **credentials)
        email = credentials.get("email", "")
        user = selectors.user_of_address(email=email)
        key = self._attempts_key(user.email if user else email)  # one count for all addresses of a user
        cache.add(key, 0, LOGIN_WINDOW_SECONDS)
        try:
            attempts = cache.incr(key)
        except ValueError:  # the window has ended since `add`, or another log-in has just succeeded
            attempts = 1
        if attempts > MAX_LOGIN_FAILURES:
            raise self.validation_error("too_many_login_attempts")

    def authenticate(self, request: HttpRequest, **credentials: Any) -> User | None:
        """Return the user with these credentials and reset the count of failed attempts; None if they are wrong."""
        user: User | None = super().authenticate(request, **credentials)
        if user is not None:
            optional_cache.delete(self._attempts_key(user.email))
        return user

    def set_password(self, user: User, password: str) -> None:
        """Set a password and clear the count of failed log-ins, so that the user can log in at once."""
        super().set_password(user, password)
        if self.request:  # a management command has no request, and so no IP address by which failures are counted
            optional_cache.delete(self._attempts_key(user.email))

    def _attempts_key(self, email: str) -> str:
        """Return the cache key of the count of attempts at one account from one IP address.

        The key contains a digest, because the typed address may be very long, and must not be stored.
        """
        address = addresses.rate_limit_key(self.get_client_ip(self.request))
        return f"login_attempts:{hashlib.sha256(f'{email.lower()} {address}'.encode()).hexdigest()}"

    def send_mail(self, template_prefix: str, email: str, context: dict[str, Any]) -> None:
        """Send an email whose links use TRAINYARD_URL, not the host of the request."""
        rewritten = {name: self._with_console_url(value) for name, value in context.items()}
        site = {"name": "Trainyard", "domain": settings.TRAINYARD_URL}
        super().send_mail(template_prefix, email, rewritten | {"current_site": site})

    def _with_console_url(self, value: Any) -> Any:
        """Return a URL on the request's host with TRAINYARD_URL instead of the host; return other values unchanged."""
        request_url = str(self.request.build_absolute_uri("/")) if self.request else ""
        if request_url and isinstance(value, str) and value.startswith(request_url):
            return f"{settings.TRAINYARD_URL}/{value.removeprefix(request_url)}"
        return value

    def login(self, request: HttpRequest, user: User) -> None:
        """Log a user in, and store the language of the page for later emails.

        Every kind of log-in ends here, after the address was verified and the second factor checked. A person who
        awaits approval is not logged in.
        """
        if user.awaits_approval:
            raise ImmediateHttpResponse(redirect("account_approval"))
        super().login(request, user)
        services.set_mail_language(user=user, language=get_language())


class SingleSignOnAdapter(DefaultSocialAccountAdapter):  # type: ignore[misc]  # allauth publishes no types
    """Saves people who come by single sign-on together with their first membership."""

    def pre_social_login(self, request: HttpRequest, sociallogin: Any) -> None:
        """Normalize `verified`: some providers send text, and the text "false" would count as true in Python."""
        for address in sociallogin.email_addresses:
            address.verified = address.verified in (True, "true")

    def save_user(self, request: HttpRequest, sociallogin: Any, form: Form | None = None) -> User:
        """Save a new user with their account at the provider, and their membership.

        If the user filled in a form, allauth calls `AccountAdapter.save_user`, which saves the membership.
        """
        invitation = self._find_invitation(request, sociallogin)
        with transaction.atomic():
            user: User = super().save_user(request, sociallogin, form)
            if form is None and invitation:
                invitations.accept(invitation=invitation, user=user)
            elif form is None:
                _create_organization(user)
        return user

    def is_open_for_signup(self, request: HttpRequest, sociallogin: Any) -> bool:
        """Return whether this person may sign up. No form checks the address of a new account, so this method does."""
        if self._find_invitation(request, sociallogin):
            return True
        email = sociallogin.user.email
        return settings.SIGNUP != "closed" and (not email or services.may_sign_up(email))

    def _find_invitation(self, request: HttpRequest, sociallogin: Any) -> Invitation | None:
        """Return the invitation of a sign-up, if it was sent to the new account's address and the provider verified it.

        The invitation's token is in the URL, or in the address of the page that follows the log-in. Anyone can put a
        token there.
        """
        token = request.GET.get("invitation") or _token_in(sociallogin.state.get("next") or "")
        invitation = invitations.find(token)
        verified = {address.email.lower() for address in sociallogin.email_addresses if address.verified}
        is_for_user = invitation and invitation.email == sociallogin.user.email.lower() and invitation.email in verified
        return invitation if is_for_user else None


def _token_in(url: str) -> str:
    """Return the token of an invitation's page; "" for another address."""
    try:
        page = resolve(urlsplit(url).path)
    except (Resolver404, ValueError):
        return ""
    return str(page.kwargs["token"]) if page.url_name == "invitation" else ""


def _create_organization(user: User, name: str | None = None) -> None:
    """Create the organization of a new user without an invitation. Raises ImmediateHttpResponse if sign-up is closed.

    While sign-up is closed, a sign-up that began with an invitation gets here if the invitation has ended since, or is
    for another address.
    """
    if settings.SIGNUP == "closed":
        raise ImmediateHttpResponse(redirect("account_signup"))
    services.create_organization(user=user, name=name or user.email.partition("@")[0])
    services.request_approval(user=user)
