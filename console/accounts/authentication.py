"""API authentication by the token in the `Authorization` header. An invalid token is a 401, never a session."""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from console.accounts import selectors
from console.accounts.models import ApiToken, User
from console.accounts.services import token_digest
from console.observability import context

USED_AT_PRECISION = timedelta(minutes=1)
"""Minimum interval between updates of `last_used_at`, which shows whether a token is in use."""
SCHEMES = {b"token", b"bearer"}


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
        related = valid.select_related("membership__user", "membership__organization__quota")
        token = related.filter(digest=token_digest(parts[1].decode("latin-1"))).first()
        if token is None:
            raise AuthenticationFailed(
                _("This API token is unknown, expired or revoked. Create a new one in the console.")
            )
        token.membership.scopes = token.limits()
        self._record_use(token)
        context.add(user=token.membership.user_id, organization=token.membership.organization_id)
        return token.membership.user, token

    def authenticate_header(self, request: Request) -> str:
        """Return the WWW-Authenticate header of a 401."""
        return 'Token realm="trainyard"'

    def _record_use(self, token: ApiToken) -> None:
        now = timezone.now()
        if token.last_used_at is None or token.last_used_at < now - USED_AT_PRECISION:
            is_outdated = Q(last_used_at=None) | Q(last_used_at__lt=now - USED_AT_PRECISION)
            ApiToken.objects.filter(is_outdated, pk=token.pk).update(last_used_at=now)
