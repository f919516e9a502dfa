# SPDX-License-Identifier: Apache-2.0
"""Prompts on instances of their own: a request moves to another instance with its first token.

The decode instances' steps then hold no prompts, except of answers that continue there after a failure.
Source: the setting of InfiniLoRA, section 5; the move is that of `migration`, with KV.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from moe_lora.core.request import GenerateRequest, TokenOutput

from .instances import Instance
from .resumable_request import ResumableRequest
from .routing_client import FleetClient


class PrefillFirstClient(FleetClient):
    """`FleetClient` that sends prompts to the prefill instances, and their answers' rest to the others.

    Without a live instance of one kind the other kind does both.  A failed move is logged, and the answer
    ends where it began.

    prefill_instances: names.  Other arguments: as in `FleetClient`.
    """

    def __init__(self, *args: Any, prefill_instances: Sequence[str], **words: Any) -> None:
        super().__init__(*args, **words)
        self._prefill_instances = frozenset(prefill_instances)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        has_begun = False
        async with aclosing(super().generate(request)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if output.token_ids and not has_begun:
                    has_begun = True
                    if output.finish_reason is None:
                        self._move_on(request.request_id)
                yield output

    def _move_on(self, request_id: str) -> None:
        attempt = self._running[request_id].attempt
        if attempt is not None and self._is_prefill(attempt.instance):
            others = self._instance_registry.candidates(attempt.request.adapter)
            if not all(map(self._is_prefill, others)):
                self.mover.move_on(request_id)

    def _is_prefill(self, instance: Instance) -> bool:
        return instance.name in self._prefill_instances

    def _choose(self, resumable: ResumableRequest, candidates: list[Instance]) -> Instance:
        has_begun = bool(resumable.delivered)
        fitting = [one for one in candidates if self._is_prefill(one) != has_begun]
        return super()._choose(resumable, fitting or candidates)
