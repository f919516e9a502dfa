# SPDX-License-Identifier: Apache-2.0
"""An engine's part in a move of a request: held at the source, ready at the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from moe_lora.core.clock import Clock
from moe_lora.core.request import TokenOutput
from moe_lora.engine.client.messages import HeldRequest, KvSent, KvWindow, RequestLoad
from moe_lora.engine.sequence import Sequence
from moe_lora.scheduling.scheduler import Scheduler

from .kv_transfer import KvTransfer, Outgoing

if TYPE_CHECKING:
    from moe_lora.dist.transport.contract import Transport
    from moe_lora.engine.ranks.rank import Rank


class RequestMoves:
    """Held requests: pages and adapter stay, and no tokens are gained.

    A leaving request is held between two steps until a resume or abort.  An arriving request is announced
    once all known tokens but the last are computed, or, awaiting KV, once pages are allocated; a step
    computes the tokens of the resume. sequences: of the engine, by request id.  threads: for `kv_send`; the
    engine's own thread calls the rest.
    """

    def __init__(
        self,
        sequences: Mapping[str, Sequence],
        scheduler: Scheduler[Sequence],
        clock: Clock,
        kv: KvTransfer,
    ) -> None:
        self._sequences = sequences
        self._scheduler = scheduler
        self._clock = clock
        self._kv = kv
        self.threads = kv.threads
        self._coming: list[Sequence] = []

    def watch(self, sequence: Sequence) -> None:
        """Watch a queued request; a held request is announced when ready."""
        if sequence.request.held:
            self._coming.append(sequence)
        if not self._kv.enabled:
            sequence.awaits_kv = False

    def tend(self) -> None:
        """Copy received KV; close windows of ended requests."""
        self._kv.take_in()
        self._kv.drop_all_but(self._sequences)

    def announce(self) -> list[TokenOutput]:
        """An output without tokens for each newly ready request."""
        if not self._coming:
            return []
        live = [one for one in self._coming if self._sequences.get(one.request.request_id) is one]
        ready = [one for one in live if self._is_ready(one)]
        self._coming = [one for one in live if one.held and one not in ready]
        return [_sign(sequence) for sequence in ready]

    def _is_ready(self, sequence: Sequence) -> bool:
        if not sequence.awaits_kv:
            return sequence.num_uncomputed == 1 and sequence in self._scheduler.running
        if sequence not in self._scheduler.loading or sequence.waits.adapter_s is None:
            return False
        if not self._scheduler.reserve(sequence, len(sequence.tokens)):
            return False
        self._kv.expect(sequence)
        return True

    def kv_window(self, request_id: str) -> KvWindow | None:
        """Window for the KV of an announced request; None: the request computes the KV."""
        return self._kv.window(request_id)

    def kv_send(self, request_id: str, descriptor: bytes, layout: str) -> Outgoing:
        """Put a request's KV into its target's window: full blocks while running, the rest once held (see
        `KvTransfer.send`).
        """
        return self._kv.send(self._find(request_id), descriptor, layout)

    def kv_sent(self, outgoing: Outgoing, request_id: str) -> KvSent:
        """The KV put by `kv_send`."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            self._kv.let_go(outgoing)
            raise _not_here(request_id)
        return self._kv.sent(outgoing, sequence)

    def hold(self, request_id: str, since: int) -> HeldRequest:
        """Hold the request; returns the answer's tokens from number `since` on.

        Outputs with all tokens were emitted before.  Raises ValueError if the request is not running.
        """
        sequence = self._find(request_id)
        sequence.held = True
        version = None if sequence.adapter is None else sequence.adapter.version
        first = len(sequence.request.prompt_token_ids) + since
        return HeldRequest(
            tokens=tuple(sequence.tokens[first:]),
            adapter_version=version,
            timing=sequence.timing(self._clock.now_s()),
            unshared=sequence.unshared,
        )

    def resume(
        self, request_id: str, tokens: Seq[int], kv_tokens: int, first_page: int, unshared: bool
    ) -> None:
        """Resume a request with further tokens of the answer, and KV as in `KvSent`.

        KV without room is computed instead.  Raises ValueError likewise.
        """
        sequence = self._find(request_id)
        sequence.extend(tokens)
        if sequence.awaits_kv:
            has_room = self._scheduler.reserve(sequence, kv_tokens)
            taken = has_room and self._kv.finish_taking(request_id, kv_tokens, first_page)
            sequence.table.num_matched = kv_tokens if taken else 0
            sequence.awaits_kv, sequence.unshared = False, taken and unshared
        sequence.held = False

    def close(self) -> None:
        self._kv.close()

    def loads(self) -> list[RequestLoad]:
        """Load of each request, and the waits of requests without a step."""
        now_s = self._clock.now_s()
        return [self._load(sequence, now_s) for sequence in self._sequences.values()]

    def _load(self, sequence: Sequence, now_s: float) -> RequestLoad:
        waits = sequence.waits.admitted_s is None
        return RequestLoad(
            name=sequence.request.request_id,
            adapter=sequence.request.adapter,
            num_tokens=len(sequence.tokens),
            num_generated=sequence.num_generated,
            num_left=sequence.num_left,
            num_bytes=-(-len(sequence.tokens) // self._kv.block_size) * self._kv.page_bytes,
            waited_s=now_s - sequence.arrival_s if waits else None,
            held=sequence.held,
        )

    def _find(self, request_id: str) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise _not_here(request_id)
        return sequence


def make_moves(
    rank: Rank,
    open_transport: Callable[[], Transport] | None,
    sequences: Mapping[str, Sequence],
    scheduler: Scheduler[Sequence],
    clock: Clock,
) -> RequestMoves:
    """Moves of an engine with this first rank.  open_transport: see `KvTransfer`."""
    return RequestMoves(sequences, scheduler, clock, KvTransfer(rank.arena, rank.layout, open_transport))


def _not_here(request_id: str) -> ValueError:
    return ValueError(f"request {request_id!r} is not running here; it has ended or was moved")


def _sign(sequence: Sequence) -> TokenOutput:
    return TokenOutput(
        request_id=sequence.request.request_id,
        token_ids=(),
        num_cached_tokens=sequence.num_cached,
        adapter_version=None if sequence.adapter is None else sequence.adapter.version,
    )
