"""HTTP to one console: authentication, retries, errors and event streams.

The token is sent only to the address that the user logged in to: redirects are not followed, and addresses in answers
are not used.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from . import VERSION
from .credentials import Console
from .errors import ApiError, UnexpectedAnswer, Unreachable

TRIES = 6
"""Maximum tries of one request. The pauses between them add up to 15 s, which a restart of a console may take."""
FIRST_PAUSE_SECONDS = 0.5
"""Pause after the first try. Each further pause is twice as long."""
MAX_PAUSE_SECONDS = 15.0
"""Longest pause, even if the header Retry-After asks for more, because a person waits for the command."""
TIMEOUT = httpx.Timeout(60, connect=10)
"""A request fails after 60 seconds without a byte, more than the console needs for any answer, and after 10 seconds
without a connection, so that a wrong address is reported soon."""
STREAM_TIMEOUT = httpx.Timeout(60, connect=10)
"""A stream fails after 60 seconds without a byte. The console sends a comment after 15 seconds of silence."""
BUSY = frozenset({429, 502, 503, 504})
"""Statuses of a console or proxy after which a repeated request may succeed."""
REPEATABLE = frozenset({"GET", "HEAD", "PUT", "DELETE"})
"""HTTP's idempotent methods. Their requests may be repeated after a lost answer, like any with an Idempotency-Key."""


class Event(NamedTuple):
    """A server-sent event; `data` is JSON."""

    name: str
    data: Any


class Transport:
    """Sends requests to paths below `<url>/api/v1/`.

    `transport` is the httpx transport that sends the requests; `pause(seconds)` waits between two tries. Tests replace
    both.
    """

    def __init__(
        self,
        console: Console,
        *,
        transport: httpx.BaseTransport | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = console.url
        self._pause = pause
        self._http = httpx.Client(
            base_url=f"{console.url}/api/v1/",
            headers={
                "Authorization": f"Token {console.token}",
                "Accept": "application/json",
                "User-Agent": f"trainyard-cli/{VERSION}",
            },
            timeout=TIMEOUT,
            follow_redirects=False,
            transport=transport,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> httpx.Response:
        """Send a request, and repeat it after temporary failures. Raises ApiError, Unreachable, UnexpectedAnswer."""
        is_repeatable = method in REPEATABLE or "Idempotency-Key" in (headers or {})
        for try_number in range(1, TRIES + 1):
            try:
                response = self._http.request(method, path, headers=dict(headers or {}), **options)
            except httpx.TransportError as error:
                # Without a connection nothing was sent, so every request may be repeated.
                is_sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
                if try_number == TRIES or (is_sent and not is_repeatable):
                    raise self.unreachable(error) from error
                self._pause(_pause_after(try_number))
                continue
            if response.status_code in BUSY and is_repeatable and try_number < TRIES:
                self._pause(_pause_after(try_number, response.headers.get("Retry-After", "")))
                continue
            self.require_success(response)
            return response
        raise AssertionError  # the last try has returned or raised

    def json(self, method: str, path: str, **options: Any) -> Any:
        """Send a request and return the JSON of its answer. Raises as `request` does."""
        response = self.request(method, path, **options)
        try:
            return response.json()
        except ValueError:
            raise UnexpectedAnswer(f"{self.url} did not answer with JSON. Is it the address of a console?") from None

    @contextmanager
    def stream(
        self, path: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Iterator[httpx.Response]:
        """Open a GET request whose answer is read in parts. It is not repeated. Raises as `request` does."""
        try:
            with self._http.stream(
                "GET", path, headers=dict(headers or {}), timeout=STREAM_TIMEOUT, **options
            ) as response:
                if not response.is_success:
                    response.read()
                self.require_success(response)
                yield response
        except httpx.TransportError as error:
            raise self.unreachable(error) from error

    def events(self, path: str, **options: Any) -> Iterator[Event]:
        """Yield the events of a stream until it ends. Raises as `stream` does."""
        with self.stream(path, headers={"Accept": "text/event-stream"}, **options) as response:
            name, lines = "", list[str]()
            for line in response.iter_lines():
                # A line that begins with a colon is a comment: its field is empty, and it is skipped.
                field, _colon, value = line.partition(":")
                value = value.removeprefix(" ")
                if field == "event":
                    name = value
                elif field == "data":
                    lines.append(value)
                elif not line:
                    if lines:
                        yield Event(name, _parse_json("\n".join(lines)))
                    name, lines = "", []

    def unreachable(self, error: httpx.TransportError) -> Unreachable:
        """Return the error to raise for a request that got no answer."""
        reason = str(error) or type(error).__name__
        return Unreachable(f"{self.url} did not answer: {reason}. Check the address and retry.")

    def require_success(self, response: httpx.Response) -> None:
        """Raise ApiError with the console's reason, unless the status is 2xx."""
        if response.is_success:
            return
        if response.is_redirect:
            raise UnexpectedAnswer(
                f"{self.url} redirects to {response.headers.get('Location', 'another address')}. The token is not sent "
                "there. Log in again with the address that your browser shows for the console."
            )
        try:
            body = response.json()
            fields = {str(name): str(sentence) for name, sentence in body.get("fields", {}).items()}
            error = ApiError(response.status_code, str(body["code"]), str(body["message"]), fields)
        except (ValueError, KeyError, TypeError, AttributeError):  # not the console's form: perhaps a proxy answered
            message = f"{self.url} answered {response.status_code} {response.reason_phrase}".rstrip()
            error = ApiError(response.status_code, f"http_{response.status_code}", f"{message}. Try again later.")
        raise error


def _pause_after(try_number: int, retry_after: str = "") -> float:
    """Return the seconds to wait after a try, counted from 1.

    `retry_after` is the header's value. Only seconds are used; a date is ignored.
    """
    requested_seconds = float(retry_after) if retry_after.isdecimal() else 0.0
    return min(max(FIRST_PAUSE_SECONDS * 2.0 ** (try_number - 1), requested_seconds), MAX_PAUSE_SECONDS)


def _parse_json(text: str) -> Any:
    """Return the data of an event. Raises UnexpectedAnswer."""
    try:
        return json.loads(text)
    except ValueError:
        raise UnexpectedAnswer("The console sent an event that is not JSON.") from None
