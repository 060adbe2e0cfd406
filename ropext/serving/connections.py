"""Bounds on connections: how many are open, and how long a client may take to send a request."""

import asyncio
import errno
import time
from functools import partial
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ropext.base.narration import Say
from ropext.base.systems import free_descriptors

HEADER_SECONDS = 30
BODY_SECONDS = 120  # for the whole body, after the headers
MOST_CONNECTIONS = 256
BACKLOG = 64  # connections that the system holds until they are accepted
SPARE_DESCRIPTORS = 32  # for files and child processes
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SECONDS_BETWEEN_LINES = 60.0


def most_connections() -> int:
    """Return how many connections of clients may be open at once.

    The number is smaller if the process may open few files. Half of the free descriptors are for
    connections that the system accepted and uvicorn is about to close.
    """
    free = free_descriptors()
    if free is None:
        return MOST_CONNECTIONS
    return max(8, min(MOST_CONNECTIONS, (free - SPARE_DESCRIPTORS) // 2))


class BoundedConnection(H11Protocol):
    """A connection of uvicorn that closes if it is one too many or if its client sends too
    slowly."""

    def __init__(self, most: int, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.most = most
        self.stage: object = None  # the request's: h11.IDLE before its headers are complete
        self.deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count a client's new connection, or close it if there are too many."""
        super().connection_made(cast(asyncio.Transport, transport))
        if len(self.connections) > self.most:
            self.transport.abort()
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take the bytes of a client; a new stage of its request gets a new deadline."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request on a client's connection."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline of a client's closed connection."""
        super().connection_lost(exc)
        if self.deadline is not None:
            self.deadline.cancel()

    def _watch(self) -> None:
        """Set the deadline for the current stage of a client's request; an answer has no
        deadline."""
        stage = self.conn.their_state
        if stage is self.stage:
            return
        self.stage = stage
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        seconds = {h11.IDLE: HEADER_SECONDS, h11.SEND_BODY: BODY_SECONDS}.get(stage)
        if seconds is not None:
            self.deadline = self.loop.call_later(seconds, self.transport.abort)


def bounded_connections() -> partial[BoundedConnection]:
    """Return the class of the connections of one uvicorn server, with its limit filled in."""
    return partial(BoundedConnection, most_connections())


class AcceptErrorHandler:
    """A handler for errors of the event loop of `ropext serve`. If no connection can be
    accepted, it prints one line a minute."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.said: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Print that no connection can be accepted; pass any other error of the event loop on."""
        error = context.get("exception")
        is_of_a_socket = "socket" in context and isinstance(error, OSError)
        if error is None or not is_of_a_socket or error.errno not in OUT_OF_DESCRIPTORS:
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if self.said is None or now - self.said >= SECONDS_BETWEEN_LINES:
            self.said = now
            self.say(f"no connection can be accepted for now: {error.strerror}")
