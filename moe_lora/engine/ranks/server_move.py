# SPDX-License-Identifier: Apache-2.0
"""The ranks of an instance move to the next LoRA Server between the same two steps.

A follower connects beside steps and reports in a file, so steps and answers never wait.  Then rank 0 orders
the move.  Orders and steps share a connection, so the order sets the step.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from moe_lora.config import LoraServerConfig
from moe_lora.core.errors import LoraServerError
from moe_lora.core.processes import in_thread

from .followers import Followers, ServerOrder

if TYPE_CHECKING:
    from moe_lora.dist.lora_server.attach import LoraServerClient

    from .rank import Rank

logger = logging.getLogger(__name__)
Reached: TypeAlias = "Future[LoraServerClient | None]"

_LOOK_S = 0.005
_numbers = itertools.count(1)


class FollowersMove:
    """Rank 0's part of a move; starts the connections, within limit_s.  Raises EngineDeadError."""

    def __init__(self, followers: Followers, server: LoraServerConfig, limit_s: float) -> None:
        self._followers, self._number, self._limit_s = followers, next(_numbers), limit_s
        self._end_s = time.monotonic() + limit_s
        followers.tell(ServerOrder(self._number, "reach", server, limit_s))

    def wait(self) -> None:
        """Wait until the followers are connected, in any thread.  Raises LoraServerError."""
        missing = set(range(1, self._followers.num_followers + 1))
        while missing:
            is_over = self._followers.closed or time.monotonic() >= self._end_s
            for dist_rank in sorted(missing):
                report = _report(self._followers.directory, self._number, dist_rank)
                if (is_there := report.exists()) or is_over:
                    problem = report.read_text() if is_there else f"no connection within {self._limit_s:g} s"
                    if problem:
                        what = f"rank {dist_rank} of this instance does not reach the next LoRA Server"
                        raise LoraServerError(f"{what}: {problem}")
                    missing.remove(dist_rank)
            time.sleep(_LOOK_S)

    def move(self) -> None:
        """Have the followers send rows of later steps to the server; after `wait`, between two steps."""
        self._followers.tell(ServerOrder(self._number, "move"))

    def close(self) -> None:
        """Have the followers close the new connections."""
        self._followers.tell(ServerOrder(self._number, "close"))


class FollowedMoves:
    """A follower's part.  directory: of the instance."""

    def __init__(self, rank: Rank, directory: Path) -> None:
        self._rank, self._directory = rank, directory
        self._reached: dict[int, tuple[LoraServerConfig, Reached]] = {}

    def carry_out(self, order: ServerOrder) -> None:
        if order.step == "reach":
            assert order.server is not None
            reached = in_thread(partial(self._rank.reach, order.server, order.limit_s))
            self._reached[order.number] = order.server, reached
            reached.add_done_callback(partial(self._send_report, order.number))
            return
        server, reached = self._reached.pop(order.number)
        if order.step == "move":
            client = reached.result()
            assert client is not None
            in_thread(self._rank.move_to(server, client).close)
        else:
            in_thread(partial(_close, reached))

    def _send_report(self, number: int, reached: Reached) -> None:
        """After the result: the move waits for no thread."""
        error = reached.exception()
        if error is not None:
            logger.warning("rank %d does not reach the next LoRA Server: %s", self._rank.dist_rank, error)
        report = _report(self._directory, number, self._rank.dist_rank)
        draft = report.with_suffix(".draft")
        draft.write_text("" if error is None else str(error) or type(error).__name__)
        os.replace(draft, report)


def _report(directory: Path, number: int, dist_rank: int) -> Path:
    """Empty, or the reason why the rank has no connection."""
    return directory / f"server-{number}-{dist_rank}"


def _close(reached: Reached) -> None:
    with suppress(Exception):  # the report has the reason of a failure
        client = reached.result()
        if client is not None:
            client.close()
