"""The console as an OpenID provider, by allauth's `idp.oidc`: for clients that administrators register in `/admin/`.

A client logs people in through the console. Its access tokens are for allauth's endpoints. The console's API accepts
them for notebooks alone, and only with the scope NOTEBOOKS: see `authentication.ClientTokenAuthentication`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from allauth.account import signals as account_signals
from allauth.idp.oidc.adapter import DefaultOIDCAdapter
from allauth.idp.oidc.models import Client, Token
from celery import shared_task
from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import URLValidator
from django.dispatch import receiver
from django.utils.translation import gettext_lazy as _

from console.accounts import second_factors, selectors
from console.accounts.models import Membership, User
from console.sign_in import LOCAL_HOSTS

ORGANIZATIONS, NOTEBOOKS = "organizations", "notebooks"
"""The scopes that this console defines, besides OpenID Connect's."""
SCOPES = {
    "openid": _("Know who you are"),
    "email": _("See your email address"),
    "profile": _("See your name"),
    ORGANIZATIONS: _("See which organizations you belong to"),
    NOTEBOOKS: _("Start, see and stop notebooks, which your organization pays for"),
}
"""All scopes, with what the consent page says about each."""
GRANT_TYPES = (Client.GrantType.AUTHORIZATION_CODE, Client.GrantType.REFRESH_TOKEN)
"""The grant types of every client. allauth has two more, which are off: device codes, for devices without a browser,
and client credentials, for access without a person."""


class ProviderAdapter(DefaultOIDCAdapter):  # type: ignore[misc]  # allauth publishes no types
    """Names this console as the issuer, and states what its clients may know about a person."""

    scope_display = SCOPES

    def get_issuer(self) -> str:
        """Return the console's address, whichever host name a request has."""
        return settings.TRAINYARD_URL

    def get_claims(
        self, purpose: str, user: User, client: Client, scopes: Iterable[str], email: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the claims about a person.

        allauth leaves out the address of a user without a row of EmailAddress, such as one whom an administrator added.
        """
        scopes = set(scopes)
        claims: dict[str, Any] = super().get_claims(purpose, user, client, scopes, email=email, **kwargs)
        if "email" in scopes and "email" not in claims:
            claims |= {"email": user.email, "email_verified": False}
        if ORGANIZATIONS in scopes:
            claims[ORGANIZATIONS] = [
                {"slug": each.organization.slug, "name": each.organization.name, "role": each.role}
                for each in accessible_memberships(user)
            ]
        return claims

    def populate_server_metadata(self, data: dict[str, Any]) -> None:
        """Remove unsupported grant types from the discovery document, and name the supported scopes."""
        data.pop("device_authorization_endpoint", None)
        data["grant_types_supported"] = sorted(str(each) for each in GRANT_TYPES)
        data["response_types_supported"] = [Client.ResponseType.CODE.value]
        data["scopes_supported"] = list(SCOPES)


def accessible_memberships(user: User) -> list[Membership]:
    """Return the memberships in which a person may act now, oldest first.

    A membership in an organization that requires a second factor is left out if the person has none.
    """
    memberships = selectors.usable_memberships().filter(user=user).select_related("organization", "user")
    return [each for each in memberships.order_by("pk") if not second_factors.is_missing(each)]


def is_redirect_uri(text: str) -> bool:
    """Return whether a client may have this redirect URI: complete, and encrypted unless its host is this machine."""
    try:
        URLValidator(schemes=["http", "https"])(text)
    except ValidationError:
        return False
    url = urlsplit(text)
    is_encrypted_or_local = url.scheme == "https" or url.hostname in LOCAL_HOSTS
    return is_encrypted_or_local and text.isascii() and not url.username and not url.fragment


def clients_of(user: User) -> list[Client]:
    """Return the clients that may act for a person now, by name."""
    return list(Client.objects.filter(pk__in=Token.objects.valid().filter(user=user).values("client")).order_by("name"))


def revoke_client_tokens(*, user: User, client: Client | None = None) -> None:
    """End the access of a client, or of every client, to a person's account."""
    tokens = Token.objects.filter(user=user)
    if client is not None:
        tokens = tokens.filter(client=client)
    tokens.delete()


@receiver([account_signals.password_changed, account_signals.password_set, account_signals.password_reset])
def _revoke_after_password_change(user: User, **_extra: Any) -> None:
    """End all access, as sessions end too: someone who knew the old password may have authorized a client."""
    revoke_client_tokens(user=user)


@shared_task(name="console.accounts.openid.forget_expired_tokens")
def forget_expired_tokens() -> None:
    """Delete tokens that have expired."""
    Token.objects.expired().delete()
