# SPDX-License-Identifier: Apache-2.0
"""Links to the leading one of several controllers."""

from __future__ import annotations

from .peer import Peer


class Fence:
    """Ends links to controllers below the highest epoch so far."""

    def __init__(self) -> None:
        self.epoch = 0
        self._leader: Peer | None = None

    def admit(self, peer: Peer, epoch: int) -> None:
        """Make the peer the leader, and end the former leader's link.

        Raises ConnectionError for a lower epoch, and for another controller of the same one.
        """
        problem, former = "", self._leader
        if epoch < self.epoch:
            problem = (
                f"{peer.name} leads in epoch {epoch}, but epoch {self.epoch} has begun; if the store of "
                "leadership was emptied or left, restart front ends and instances"
            )
        elif epoch == self.epoch and former and former.name != peer.name and not former.ended.is_set():
            problem = f"{peer.name} and another lead in epoch {epoch}: each has a leadership.store of its own"
        if problem:
            peer.abort(problem)
            raise ConnectionError(problem)
        if former is not None:
            former.abort(f"the controller of epoch {epoch} leads")
        self.epoch, self._leader = epoch, peer
