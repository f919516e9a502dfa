"""An engine's part in moving a request to another instance: held where it leaves, ready where it comes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from moe_lora.core.clock import Clock
from moe_lora.core.request import TokenOutput
from moe_lora.engine.client.messages import HeldRequest
from moe_lora.scheduling.scheduler import Scheduler

from .sequence import Sequence


class RequestMoves:
    """Requests that are held: they keep their pages and their adapter, and gain no tokens.

    One that leaves is held between two steps until it is resumed or aborted.  One that comes has computed all
    that it knows but the last token when it is announced; the tokens that it is resumed with are computed in
    one step.  sequences: those of the engine, by request id.  Called by the engine's own thread.
    """

    def __init__(
        self, sequences: Mapping[str, Sequence], scheduler: Scheduler[Sequence], clock: Clock
    ) -> None:
        self._sequences = sequences
        self._scheduler = scheduler
        self._clock = clock
        self._coming: list[Sequence] = []

    @property
    def any_held(self) -> bool:
        return any(sequence.held for sequence in self._sequences.values())

    def watch(self, sequence: Sequence) -> None:
        """A request was queued; one that is held is announced when it is ready."""
        if sequence.held:
            self._coming.append(sequence)

    def announce(self) -> list[TokenOutput]:
        """An output without tokens for each request that has become ready."""
        if not self._coming:
            return []
        live = [one for one in self._coming if self._sequences.get(one.request.request_id) is one]
        ready = [one for one in live if one.num_uncomputed == 1 and one in self._scheduler.running]
        self._coming = [one for one in live if one.held and one not in ready]
        return [_sign(sequence) for sequence in ready]

    def hold(self, request_id: str, since: int) -> HeldRequest:
        """Let a request gain no tokens from now on; those of its answer from number `since` on.

        Outputs with all tokens were emitted before.  Raises ValueError if it is not running (any more).
        """
        sequence = self._find(request_id)
        sequence.held = True
        version = None if sequence.adapter is None else sequence.adapter.version
        first = len(sequence.request.prompt_token_ids) + since
        return HeldRequest(
            tokens=tuple(sequence.tokens[first:]),
            adapter_version=version,
            timing=sequence.timing(self._clock.now_s()),
        )

    def resume(self, request_id: str, tokens: Seq[int]) -> None:
        """Let a request go on, with these further tokens of its answer.  Raises ValueError likewise."""
        sequence = self._find(request_id)
        sequence.tokens += tokens
        sequence.held = False

    def _find(self, request_id: str) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise ValueError(f"request {request_id!r} is not running here; it has ended or was moved")
        return sequence


def _sign(sequence: Sequence) -> TokenOutput:
    return TokenOutput(
        request_id=sequence.request.request_id,
        token_ids=(),
        num_cached_tokens=sequence.num_cached,
        adapter_version=None if sequence.adapter is None else sequence.adapter.version,
    )
