"""API authentication by the token in the `Authorization` header.

A request with an invalid token gets a 401, even if it also has a valid session.
All views accept API tokens. Views with `ClientTokenAuthentication` also accept access tokens of OpenID clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from allauth.idp.oidc.models import Token
from django.conf import settings
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied
from rest_framework.request import Request

from console.accounts import openid, selectors
from console.accounts.models import ApiToken, Membership, User
from console.accounts.roles import Capability
from console.accounts.services import TOKEN_PREFIX, token_digest
from console.observability import context

LAST_USED_PRECISION = timedelta(minutes=1)
"""Minimum interval between updates of `last_used_at`: most requests then write nothing."""
SCHEMES = {b"token", b"bearer"}
"""The schemes of the `Authorization` header with which a request may send an API token, in lower case."""
ORGANIZATION_HEADER = "Trainyard-Organization"
"""The header in which a request with an access token of an OpenID client names the organization, by its slug."""


class TokenAuthentication(BaseAuthentication):
    """Accepts `Authorization: Token ty_...` (or `Bearer`). `request.auth` is the ApiToken with its membership."""

    def authenticate(self, request: Request) -> tuple[User, ApiToken] | None:
        """Return the token's user and the token, or None without a token header. Raises AuthenticationFailed."""
        parts = get_authorization_header(request).split()
        if not parts or parts[0].lower() not in SCHEMES:
            return None
        if len(parts) != 2:
            raise AuthenticationFailed(_("The token must not contain spaces: Authorization: Token ty_..."))
        valid = selectors.valid_tokens().filter(membership__in=selectors.usable_memberships())
        tokens = valid.select_related("membership__user", "membership__organization__quota")
        # latin-1 decodes every byte, so a header with any bytes is an unknown token and no error of the server.
        token = tokens.filter(digest=token_digest(parts[1].decode("latin-1"))).first()
        if token is None:
            raise AuthenticationFailed(
                _("This API token is unknown, expired or revoked. Create a new one in the console.")
            )
        token.membership.scopes = token.scope_set()
        self._record_use(token)
        context.add(user=token.membership.user_id, organization=token.membership.organization_id)
        return token.membership.user, token

    def authenticate_header(self, request: Request) -> str:
        """Return the WWW-Authenticate header of a 401."""
        return 'Token realm="trainyard"'

    def _record_use(self, token: ApiToken) -> None:
        """Store when the token was used. Of several requests at once, only the first writes."""
        now = timezone.now()
        if token.last_used_at is None or token.last_used_at < now - LAST_USED_PRECISION:
            is_outdated = Q(last_used_at=None) | Q(last_used_at__lt=now - LAST_USED_PRECISION)
            ApiToken.objects.filter(is_outdated, pk=token.pk).update(last_used_at=now)


@dataclass(frozen=True)
class ClientAccess:
    """The value of `request.auth` for a request with an access token of an OpenID client.

    `membership` is that of the person for whom the client acts, in the organization of the request.
    """

    membership: Membership


class ClientTokenAuthentication(BaseAuthentication):
    """Accepts `Authorization: Bearer` with an access token of an OpenID client that has the scope `notebooks`.

    The client acts for the person, in the organization that the header ORGANIZATION_HEADER names. For a person with
    one organization it may leave the header out. In a view's list of authentication classes this one must come before
    TokenAuthentication, which refuses unknown tokens.
    """

    def authenticate(self, request: Request) -> tuple[User, ClientAccess] | None:
        """Return the person and their membership; None if the header has no token of an OpenID client.

        Raises AuthenticationFailed for an invalid token, PermissionDenied for one without the scope or a membership.
        """
        # Without OPENID_PRIVATE_KEY the console is no OpenID provider. A token with TOKEN_PREFIX is an API token.
        scheme, _separator, value = get_authorization_header(request).partition(b" ")
        if scheme.lower() != b"bearer" or value.startswith(TOKEN_PREFIX.encode()) or not settings.OPENID_PRIVATE_KEY:
            return None
        token = Token.objects.lookup(Token.Type.ACCESS_TOKEN, value.decode("latin-1"))
        # A token that names resources (RFC 8707) is for those alone.
        if token is None or token.user is None or not token.user.is_active or token.get_resources():
            raise AuthenticationFailed(_("This access token is unknown or expired. Log in again."))
        # An administrator may have taken a scope from the client after it got the token.
        granted = set(token.get_scopes()) & set(token.client.get_scopes())
        if openid.NOTEBOOKS not in granted:
            raise PermissionDenied(_("This access token has no scope for notebooks."))
        membership = self._find_membership(request, token.user)
        membership.scopes = frozenset({Capability.VIEW, Capability.RUN})  # what the views of notebooks need
        context.add(user=token.user.pk, organization=membership.organization_id)
        return token.user, ClientAccess(membership)

    def authenticate_header(self, request: Request) -> str:
        """Return the WWW-Authenticate header of a 401."""
        return 'Bearer realm="trainyard"'

    def _find_membership(self, request: Request, user: User) -> Membership:
        """Return the membership in which the token acts. Raises PermissionDenied."""
        slug = request.headers.get(ORGANIZATION_HEADER, "")
        usable = openid.accessible_memberships(user)
        chosen = [each for each in usable if each.organization.slug == slug] if slug else usable
        if not usable:
            raise PermissionDenied(_("You belong to no organization, or lack the second factor that it requires."))
        if len(chosen) != 1:
            raise PermissionDenied(_("Name one of your organizations in the header Trainyard-Organization."))
        return chosen[0]
