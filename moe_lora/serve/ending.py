"""What ends a server's requests when it ends itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from .http_errors import ApiError

CUT = "the server is shutting down and does not finish this request; send it again"


class Ending:
    """Ends requests under way, each with an error of its own, when the time to finish them is over."""

    def __init__(self) -> None:
        self.over = False
        self._running: set[asyncio.Task[object]] = set()

    def cut(self) -> None:
        """End what runs with a 503: as the answer, or where one has begun as its last event."""
        self.over = True
        for task in self._running:
            task.cancel()

    @contextmanager
    def ends(self) -> Iterator[None]:
        """While a request's task waits for its engine.  Raises ApiError when it is cut."""
        task = asyncio.current_task()
        assert task is not None
        if self.over:
            raise ApiError(503, CUT)
        self._running.add(task)
        try:
            yield
        except asyncio.CancelledError as error:
            if not self.over:
                raise
            if hasattr(task, "uncancel"):
                task.uncancel()
            raise ApiError(503, CUT) from error
        finally:
            self._running.discard(task)
