"""Who an API request comes from: the token in its `Authorization` header.

The one rule: a header that names a token either works or is refused with 401; it never falls back to a session.
"""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from console.accounts.models import ApiToken, User
from console.accounts.services import token_digest
from console.operations import context
from console.operations.kept import Kept, given

USED_AT_PRECISION = timedelta(minutes=1)
"""`last_used_at` is written at most this often: it says which tokens are in use, not when each request came."""
SCHEMES = {b"token", b"bearer"}
_TOKEN = Kept(
    lambda: ApiToken.objects.select_related("membership__user", "membership__organization__quota").filter(
        digest=given("digest"), revoked_at=None, membership__user__is_active=True
    )
)


class TokenAuthentication(BaseAuthentication):
    """`Authorization: Token ty_...` (or `Bearer`). `request.auth` is the ApiToken, its membership read with it."""

    def authenticate(self, request: Request) -> tuple[User, ApiToken] | None:
        """The token's user and the token; None when the header names no token. Raises AuthenticationFailed."""
        words = get_authorization_header(request).split()
        if not words or words[0].lower() not in SCHEMES:
            return None
        if len(words) != 2:
            raise AuthenticationFailed(_("Send the token as one word: Authorization: Token ty_..."))
        token = _TOKEN.first(digest=token_digest(words[1].decode("latin-1")))
        if token is None:
            raise AuthenticationFailed(_("This API token is unknown or was revoked. Make a new one in the console."))
        self._note_use(token)
        context.add(user=token.membership.user_id, organization=token.membership.organization_id)
        return token.membership.user, token

    def authenticate_header(self, request: Request) -> str:
        """What a 401 says in WWW-Authenticate."""
        return 'Token realm="trainyard"'

    def _note_use(self, token: ApiToken) -> None:
        now = timezone.now()
        if token.last_used_at is None or token.last_used_at < now - USED_AT_PRECISION:
            stale = Q(last_used_at=None) | Q(last_used_at__lt=now - USED_AT_PRECISION)
            ApiToken.objects.filter(stale, pk=token.pk).update(last_used_at=now)
