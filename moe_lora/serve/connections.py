"""Connections that a server can't have: refused at once, and said once."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 8
"""Connections accepted in one turn of the event loop; the first of them is looked at a few turns later."""
_LINGERING = 16
_RESERVE = 5 * ACCEPTED_AT_ONCE + _LINGERING + 16
"""Files for connections that are not looked at yet or being refused, and for what requests open beside."""
_LINGER_S = 0.2
_BODY = b'{"error":{"message":"too many connections; try again later","type":"ServiceUnavailableError",' + (
    b'"param":null,"code":503}}'
)
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


def most_connections(max_files: int, num_open: int) -> int:
    """Connections that may be open beside what is; at least one."""
    return max(1, max_files - num_open - _RESERVE)


def limited(protocol: Any, limit: int) -> Any:
    """A uvicorn protocol that refuses connections above `limit` with a 503, and says so once."""

    class Limited(protocol):
        said = False
        num_lingering = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            if len(self.connections) < limit:
                super().connection_made(transport)
                return
            if not Limited.said:
                Limited.said = True
                logger.error(
                    "%d connections are open, all that the limit on open files leaves room for: more are "
                    "refused with a 503; raise it with ulimit -n",
                    limit,
                )
            transport.write(REFUSAL)
            if Limited.num_lingering >= _LINGERING:
                transport.close()
                return
            # Closed before the request has come, the connection would be reset, and the answer with it.
            Limited.num_lingering += 1
            asyncio.get_running_loop().call_later(_LINGER_S, self._leave, transport)

        def _leave(self, transport: asyncio.Transport) -> None:
            Limited.num_lingering -= 1
            transport.close()

        def data_received(self, data: bytes) -> None:
            if self in self.connections:
                super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            if self in self.connections:
                super().connection_lost(exc)

    return Limited


class QuietLoop:
    """An event loop's exception handler that says once that no file is left, and all else as usual."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif not self._said:
            self._said = True
            logger.error("no connection can be accepted: %s; raise the limit with ulimit -n", error.strerror)
