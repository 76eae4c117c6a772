"""The rate limit of the API: requests per minute of one API token, or of one person in browsers and OpenID clients.

`rest_framework.views` imports this module through the settings. So this module may import that one for types only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import redis
from django.conf import settings
from django.core.cache import cache
from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle

from console.accounts.models import ApiToken

if TYPE_CHECKING:
    from rest_framework.views import APIView

WINDOW_SECONDS = 60
"""The window in which API_REQUESTS_PER_MINUTE counts."""


class RequestsPerMinute(BaseThrottle):
    """Counts requests in windows of a minute. DRF's own throttles store the time of each request."""

    def allow_request(self, request: Request, view: APIView) -> bool:
        """Count the request, and return whether it is within the limit. Anonymous requests are not counted."""
        limit = settings.API_REQUESTS_PER_MINUTE
        if not limit or not request.user.is_authenticated:
            return True
        client = f"token:{request.auth.pk}" if isinstance(request.auth, ApiToken) else f"user:{request.user.pk}"
        key = f"api_requests:{client}:{int(time.time()) // WINDOW_SECONDS}"
        try:
            cache.add(key, 0, 2 * WINDOW_SECONDS)  # longer than the window, so that no count expires in it
            return int(cache.incr(key)) <= limit
        except redis.RedisError:  # without Redis nothing is counted, but the API works
            return True

    def wait(self) -> float:
        """Return the seconds until the next window, for the `Retry-After` header."""
        return WINDOW_SECONDS - time.time() % WINDOW_SECONDS + 1  # one more, for clients that come a little early
