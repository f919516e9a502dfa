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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from moe_lora.config import LoraServerConfig
from moe_lora.core.errors import LoraServerError

from .followers import Followers, ServerOrder

if TYPE_CHECKING:
    from moe_lora.dist.lora_server.attach import LoraServerClient

    from .rank import Rank

logger = logging.getLogger(__name__)
T = TypeVar("T")
Reached: TypeAlias = "Future[LoraServerClient | None]"

REACH_S = 300.0
"""Limit for the connections of a follower."""
_LOOK_S = 0.005
_numbers = itertools.count(1)


class FollowersMove:
    """Rank 0's part of a move; starts the connections.  Raises EngineDeadError."""

    def __init__(self, followers: Followers, server: LoraServerConfig) -> None:
        self._followers, self._number = followers, next(_numbers)
        followers.tell(ServerOrder(self._number, "reach", server))

    def wait(self) -> None:
        """Wait until the followers are connected, in any thread.  Raises LoraServerError."""
        end_s = time.monotonic() + REACH_S
        problems: dict[int, str] = {}
        for dist_rank in range(1, self._followers.num_followers + 1):
            report = _report(self._followers.directory, self._number, dist_rank)
            while not report.exists() and not self._followers.closed and time.monotonic() < end_s:
                time.sleep(_LOOK_S)
            if not report.exists():
                problems[dist_rank] = f"no connection within {REACH_S:g} s"
            elif problem := report.read_text():
                problems[dist_rank] = problem
        for dist_rank, problem in problems.items():
            raise LoraServerError(
                f"rank {dist_rank} of this instance does not reach the next LoRA Server: {problem}"
            )

    def move(self) -> None:
        """Have the followers send rows of later steps to the server; after `wait`, between two steps."""
        self._followers.tell(ServerOrder(self._number, "move"))

    def leave(self) -> None:
        """Have the followers close the new connections."""
        self._followers.tell(ServerOrder(self._number, "leave"))


class FollowedMoves:
    """A follower's part.  directory: of the instance."""

    def __init__(self, rank: Rank, directory: Path) -> None:
        self._rank, self._directory = rank, directory
        self._reached: dict[int, tuple[LoraServerConfig, Reached]] = {}

    def carry_out(self, order: ServerOrder) -> None:
        if order.step == "reach":
            assert order.server is not None
            reached = _in_thread(partial(self._rank.reach, order.server))
            self._reached[order.number] = order.server, reached
            reached.add_done_callback(partial(self._send_report, order.number))
            return
        server, reached = self._reached.pop(order.number)
        if order.step == "move":
            client = reached.result()
            assert client is not None
            _in_thread(self._rank.move_to(server, client).close)
        else:
            _in_thread(partial(_close, reached))

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


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """In a short thread: a lasting thread would keep OpenMP's workers from the steps."""
    thread = ThreadPoolExecutor(1, "server-move")
    done = thread.submit(work)
    thread.shutdown(wait=False)
    return done


def _close(reached: Reached) -> None:
    with suppress(Exception):  # the report has the reason of a failure
        client = reached.result()
        if client is not None:
            client.close()
