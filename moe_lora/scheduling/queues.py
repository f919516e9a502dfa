# SPDX-License-Identifier: Apache-2.0
"""Queue of requests before their first step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic

from moe_lora.policies.admission import admission

from .views import Sequence


class RequestQueue(deque[Sequence], Generic[Sequence]):
    """Waiting requests in the order of their arrival, preempted requests first.

    order: sorts the requests that may start.  The default is first come, first served.
    """

    def __init__(self, order: Callable[[Iterable[Sequence]], Iterable[Sequence]] = list) -> None:
        super().__init__()
        self.order = order


def shortest_first(requests: Iterable[Sequence]) -> list[Sequence]:
    """Preempted requests, then the others by `policies.admission.admission.shortest_first`."""
    return sorted(
        admission.shortest_first(requests), key=lambda request: not request.matched or request.gave_way
    )
