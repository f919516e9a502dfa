# SPDX-License-Identifier: Apache-2.0
"""Prompts on separate instances (InfiniLoRA section 5); with its first token a request moves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from moe_lora.core.request import GenerateRequest, TokenOutput

from .instances import Instance
from .resumable_request import Attempt, ResumableRequest
from .routing_client import FleetClient

if TYPE_CHECKING:
    from .controller.routes import Routes


class ByPhase:
    """A `Router` among prefill instances before a request begins, then among others."""

    def __init__(self, routes: Routes, running: Mapping[str, ResumableRequest]) -> None:
        self._router, self._running = routes.router, running
        self._prefill_instances = frozenset(routes.config.prefill_instances)

    def is_prefill(self, instance: Instance) -> bool:
        return instance.name in self._prefill_instances

    def choose(self, request: Any, instances: Sequence[Any]) -> Any:
        is_begun = self._running[request.request_id].is_begun
        fitting = [one for one in instances if self.is_prefill(one) != is_begun]
        return self._router.choose(request, fitting or instances)


class PrefillFirstClient(FleetClient):
    """`FleetClient` with moves after a prefill instance's first token."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self._router = self._by_phase = ByPhase(self._routes, self._running)
        if self._routes.has_server:
            self._instance_registry.note_slots(self._by_phase.is_prefill)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        has_begun = False
        request = replace(request, prefill_only=len(self._kinds(request.adapter)) == 2)
        async with aclosing(cast("Any", super().generate(request))) as outputs:
            async for output in outputs:
                if output.finish_reason is None and not has_begun:
                    has_begun = bool(output.token_ids)
                    self._move_on(self._running[request.request_id], is_ahead=not has_begun)
                if output.token_ids or output.finish_reason is not None:
                    yield output

    def _kinds(self, adapter: str | None) -> set[bool]:
        """True: prefill instances have the adapter; False: others have."""
        undrained = self._instance_registry.undrained
        return {self._by_phase.is_prefill(one) for one in undrained if adapter not in one.missing}

    def _move_on(self, resumable: ResumableRequest, *, is_ahead: bool) -> None:
        attempt = cast("Attempt", resumable.attempt)
        if self._by_phase.is_prefill(attempt.instance) and False in self._kinds(attempt.request.adapter):
            (self.mover.move_ahead if is_ahead else self.mover.move_on)(resumable, attempt)
        elif attempt.request.prefill_only and not is_ahead:
            self.mover.resume(attempt)
