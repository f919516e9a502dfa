# SPDX-License-Identifier: Apache-2.0
"""After an error of one rank in a CPU step, all ranks leave the step and meet anew.

The rank closes its group, so the waiting ranks raise too.  Rank 0 opens a new group.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moe_lora.engine.step.runner import ModelRunner
from moe_lora.engine.step.step_batch import StepBatch

from .exchange import RENDEZVOUS, RankLostError
from .followers import Followers
from .rank import Rank

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 60.0
"""A rank may still compute a part of a layer."""


@dataclass(frozen=True)
class LeaveGroup:
    """Leave the group and the failed step; answer with the error, if any."""


@dataclass(frozen=True)
class JoinGroup:
    """Join the other ranks again.  number: of groups before."""

    number: int


class Regroup:
    """Rank 0's part."""

    def __init__(self, rank: Rank, followers: Followers) -> None:
        self._rank = rank
        self._followers = followers
        self._number = 0

    def __call__(self, error: Exception) -> Exception:
        """Have all ranks leave a step after `error` of this rank, and meet anew.

        Returns the first error.  Raises EngineDeadError.
        """
        self._number += 1
        _leave(self._rank, error)
        self._followers.tell(LeaveGroup())
        found = [error, *self._followers.answers(min(LEAVE_TIMEOUT_S, self._followers.timeout_s))]
        self._followers.tell(JoinGroup(self._number))
        self._followers.meet(partial(self._rank.meet, _meeting(self._followers.directory, self._number)))
        causes = (one for one in found if one is not None and not isinstance(one, RankLostError))
        return next(causes, error)


class FollowedSteps:
    """A follower's steps, and the error of a failed step."""

    def __init__(self, rank: Rank, runner: ModelRunner, directory: Path) -> None:
        self._rank = rank
        self._runner = runner
        self._directory = directory
        self._error: Exception | None = None

    def run(self, batch: StepBatch) -> None:
        """Compute this rank's part; between an error and `join`, drop steps."""
        if self._error is not None:
            return
        try:
            self._runner.execute(batch)
        except Exception as error:
            if not self._runner.can_repeat(error):
                raise
            if not isinstance(error, RankLostError):
                logger.exception("a step failed on rank %d", self._rank.dist_rank)
            self._error = error
        if self._error is not None:
            _leave(self._rank, self._error)

    def leave(self) -> Exception | None:
        """Leave the group; returns the failed step's error."""
        error, self._error = self._error, None
        self._rank.leave()
        self._runner.drop_step()
        return error

    def join(self, message: JoinGroup) -> None:
        """Meet the other ranks."""
        self._rank.meet(_meeting(self._directory, message.number))


def _leave(rank: Rank, error: Exception | None) -> None:
    """Close the rank's group: it closes once nothing refers to it, the frames of `error` included."""
    earlier: list[BaseException | None] = [error]
    known: set[int] = set()
    while earlier:
        one = earlier.pop()
        if one is not None and id(one) not in known:
            known.add(id(one))
            traceback.clear_frames(one.__traceback__)
            earlier += [one.__cause__, one.__context__]
    rank.leave()


def _meeting(directory: Path, number: int) -> Path:
    return directory / f"{RENDEZVOUS}-{number}"
