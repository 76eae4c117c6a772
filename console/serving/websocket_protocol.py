"""uvicorn's websocket protocol, with limits on what a client can make this process keep in memory.

uvicorn has no settings for such limits. This subclass overrides methods that uvicorn does not document, and reads
`frames` (the fragments of the message that arrives), as `console.serving.protocol` does for HTTP.
"""

from __future__ import annotations

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from console.serving import notebooks

MAX_UNSENT_BYTES = 2 * notebooks.MAX_MESSAGE_BYTES
"""How much may wait to be sent. The console's own messages wait until the client has read the last one, so only a
client that sends pings and does not read the answers gets here."""
MAX_FRAGMENTS = 1 << 14
"""How many fragments a message may have: 1 KiB each for the largest message. Empty ones do not count for its size."""


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """One websocket, which is cut off when it passes a limit."""

    def handle_ping(self) -> None:
        """Answer a ping, unless too many answers wait to be sent."""
        if self.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.transport.abort()
        elif not self.transport.is_closing():  # asyncio logs each write to a connection that has ended
            super().handle_ping()

    def handle_cont(self, event: Frame) -> None:
        """Keep a fragment, unless its message has too many."""
        if len(self.frames) >= MAX_FRAGMENTS:
            self.frames = []
            self.transport.abort()
        elif not self.transport.is_closing():
            super().handle_cont(event)
