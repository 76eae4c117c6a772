"""uvicorn's HTTP protocol with deadlines for slow clients, and limits on connections.

The deadlines keep slow clients from holding connections for ever. Connections of trusted proxies are not limited by
address, because many clients share them. uvicorn has no settings for such deadlines, so this subclass of its protocol
reads attributes that uvicorn does not document: `conn` (h11's state of the connection), `cycle` (the current request
with its response) and `flow` (whether uvicorn has paused reading).
"""

from __future__ import annotations

import asyncio

import h11
from django.conf import settings
from uvicorn.protocols.http.h11_impl import H11Protocol

from console.observability import addresses
from console.serving import refusals
from console.serving.exchange import SCOPE_KEY, Exchange
from console.serving.limits import Limit
from console.serving.refusals import Refusal

CHECK_SECONDS = 1.0
"""The interval of checks of a connection's deadlines. Each deadline is 10 seconds or more, so this delay is short."""
LINGER_SECONDS = 10.0
"""How long the rest of a body is read and dropped after an early response. If the connection were closed at once, the
kernel would send a TCP reset, and a client that still sends would lose the response. Even on a mobile network this
is enough for many round trips."""
STALLED_SECONDS = 60.0
"""A connection whose client reads nothing of a response for this long is aborted. nginx has the same default."""
CONNECTIONS_BY_ADDRESS = Limit(settings.MAX_CONNECTIONS_PER_ADDRESS, refusals.TOO_MANY_CONNECTIONS)
"""Counts the connections of this process by client address."""
ALL_CONNECTIONS = Limit(settings.MAX_CONNECTIONS, refusals.BUSY)
"""Counts all connections of this process, under the key ""."""


class GuardedProtocol(H11Protocol):
    """One connection, which is closed if its client is too slow. Times are seconds of the event loop's clock."""

    _address: str | None = None
    """The key under which CONNECTIONS_BY_ADDRESS counts this connection; None: only ALL_CONNECTIONS counts it."""
    _is_counted = False
    """Whether the limits count this connection. They do not count a refused one."""
    _is_upgraded = False
    """Whether the connection has become a websocket, which another protocol of uvicorn serves."""
    _received_bytes = 0
    """All bytes received on this connection."""
    _head_since: float | None = None
    """Since when the connection waits for the rest of a request's headers; None while it does not.

    It is also None between two requests, because uvicorn itself closes idle connections (`server.KEEP_ALIVE_SECONDS`).
    """
    _body_window_since: float | None = None
    """When the current window of BODY_SECONDS began, in which the speed of a body is measured."""
    _bytes_before_window = 0
    """All bytes received on this connection before the current window."""
    _early_response_since: float | None = None
    """When a check first found that the response has begun although the request's body is incomplete."""
    _stalled_since: float | None = None
    """When the client stopped reading a response; None while it reads."""
    _unsent_bytes = 0
    """What the transport still had to send at the last check of a connection that is being closed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Accept the connection, or refuse it at a limit."""
        super().connection_made(transport)
        self._head_since = self.loop.time()
        peer = self.client[0] if self.client else ""
        self._address = addresses.connection_key(peer, settings.TRUSTED_PROXIES)
        if not ALL_CONNECTIONS.acquire(""):
            self._refuse(refusals.BUSY)
        elif self._address is not None and not CONNECTIONS_BY_ADDRESS.acquire(self._address):
            ALL_CONNECTIONS.release("")
            self._refuse(refusals.TOO_MANY_CONNECTIONS)
        else:
            self._is_counted = True
            self.loop.call_later(CHECK_SECONDS, self._check_deadlines)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give an upload the bytes that are still buffered, and stop counting the connection."""
        exchange = self.scope.get(SCOPE_KEY) if self.scope else None
        if isinstance(exchange, Exchange) and exchange.body is not None and self.cycle is not None:
            # uvicorn drops the bytes that the application has not received yet. An upload keeps them, so that a client
            # that resumes the upload need not send them again.
            exchange.body.add_remaining(bytes(self.cycle.body), is_complete=not self.cycle.more_body)
        super().connection_lost(exc)
        self._stop_counting()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Pass the connection to uvicorn's websocket protocol, and continue to count it."""
        self._is_upgraded = True
        super().handle_websocket_upgrade(event)

    def _stop_counting(self) -> None:
        """Take the connection out of both limits. Safe to repeat."""
        if self._is_counted:
            self._is_counted = False
            ALL_CONNECTIONS.release("")
            if self._address is not None:
                CONNECTIONS_BY_ADDRESS.release(self._address)

    def data_received(self, data: bytes) -> None:
        """Process received data, unless the connection is being closed; note when the next request's headers begin."""
        # What the client of a refused connection sends must not start a request.
        if self.transport.is_closing():
            return
        self._received_bytes += len(data)
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_since = None
        elif self._head_since is None:
            self._head_since = self.loop.time()

    def pause_writing(self) -> None:
        """Note that the client reads too slowly; asyncio calls this when the write buffer is full."""
        super().pause_writing()
        self._stalled_since = self.loop.time()

    def resume_writing(self) -> None:
        """Note that the client reads again; asyncio calls this when the write buffer has emptied."""
        super().resume_writing()
        self._stalled_since = None

    def shutdown(self) -> None:
        """Finish the request when the server stops. Close a stream at once: it may outlast `server.STOP_SECONDS`."""
        super().shutdown()
        exchange = self.scope.get(SCOPE_KEY) if self.scope else None
        if isinstance(exchange, Exchange) and exchange.stream is not None:
            self.transport.close()

    def _check_deadlines(self) -> None:
        """Close the connection if the client is too slow, else schedule the next check."""
        now = self.loop.time()
        if self.transport.is_closing():
            if self._is_upgraded:  # asyncio calls `connection_lost` of uvicorn's websocket protocol, not of this one
                self._stop_counting()
            elif self._is_counted:
                self._check_closing(now)
            return
        self.loop.call_later(CHECK_SECONDS, self._check_deadlines)
        if self._is_upgraded:  # uvicorn's pings find websockets whose client has gone
            return
        if self._stalled_since is not None and now - self._stalled_since > STALLED_SECONDS:
            self.transport.abort()  # `close` would wait until the client has read the rest
        elif self._is_late(now):
            # A connection that never sent a byte gets no error response, because no request was made. Neither does a
            # client that already gets a response.
            if self._received_bytes and self._early_response_since is None:
                self._refuse(refusals.TOO_SLOW)
            else:
                self.transport.close()

    def _check_closing(self, now: float) -> None:
        """Abort a connection that is being closed if its client has read nothing for STALLED_SECONDS.

        A closed transport waits until the client has read what is left of the response, however long that takes.
        """
        unsent_bytes = self.transport.get_write_buffer_size()
        if self._stalled_since is None or unsent_bytes != self._unsent_bytes:
            self._stalled_since, self._unsent_bytes = now, unsent_bytes
        if now - self._stalled_since > STALLED_SECONDS:
            self.transport.abort()
        else:
            self.loop.call_later(CHECK_SECONDS, self._check_deadlines)

    def _is_late(self, now: float) -> bool:
        """Return whether the client is too slow to send its headers or its body.

        A body must bring BODY_BYTES_PER_SECOND on average in each window of BODY_SECONDS. Each call also updates the
        times from which it measures.
        """
        if self._head_since is not None:
            return now - self._head_since > settings.HEADER_SECONDS
        if self.conn.their_state is not h11.SEND_BODY:
            self._body_window_since = self._early_response_since = None  # no body is arriving
            return False
        if self.cycle.response_started:
            # The application responded before the body was complete. The rest of the body is dropped.
            self._early_response_since = self._early_response_since or now
            return now - self._early_response_since > LINGER_SECONDS
        if self._body_window_since is None or self.flow.read_paused:  # the server is slow, not the client
            self._begin_window(now)
        elif now - self._body_window_since > settings.BODY_SECONDS:
            required = settings.BODY_SECONDS * settings.BODY_BYTES_PER_SECOND
            if self._received_bytes - self._bytes_before_window < required:
                return True
            self._begin_window(now)
        return False

    def _begin_window(self, now: float) -> None:
        """Begin to measure the speed of a body from now on."""
        self._body_window_since, self._bytes_before_window = now, self._received_bytes

    def _refuse(self, refusal: Refusal) -> None:
        """Send an error response, without Django, and close the connection."""
        self.transport.write(refusal.http_bytes)
        self.transport.close()
