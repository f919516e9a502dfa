"""A request on its way through an instance that has a cache, and where its time to the first token went."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from moe_lora.cache.tables import BlockTable
from moe_lora.workload.conversations import TurnRequest


@dataclass(slots=True, eq=False)
class CachedRequest:
    """Stamps in seconds; NaN: not yet; all of the first time, if it was put back since.

    held_s: it holds its adapter, whose bytes may be on their way.  adapter_s, history_s: the step could have
    begun in which adapter and history were there.  num_total: tokens of prompt and answer so far, of which
    num_computed have KV in `table`.  num_cached: tokens of its prompt whose KV it found.  adapter_here_s:
    when its adapter was found there, this time.
    """

    planned: TurnRequest
    tokens: tuple[int, ...] = field(init=False)
    table: BlockTable = field(init=False)
    num_computed: int = 0
    num_total: int = 0
    matched: bool = False
    num_cached: int = 0
    adapter_here_s: float | None = None
    held_s: float = math.nan
    adapter_s: float = math.nan
    history_s: float = math.nan
    first_token_s: float = math.nan
    finish_s: float = math.nan

    def __post_init__(self) -> None:
        self.tokens = self.planned.prompt + self.planned.answer
        self.num_total = len(self.planned.prompt)
        self.table = BlockTable(self.planned.adapter)

    @property
    def arrival_s(self) -> float:
        return self.planned.arrival_s

    @property
    def adapter_uid(self) -> str:
        return self.planned.adapter

    @property
    def num_uncomputed(self) -> int:
        return self.num_total - self.num_computed

    @property
    def is_done(self) -> bool:
        return self.num_total == len(self.tokens)

    def note_start(self, now_s: float) -> None:
        """It computes from now on."""
        if math.isnan(self.history_s):
            assert self.adapter_here_s is not None
            self.adapter_s, self.history_s = self.adapter_here_s, now_s

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def queue_s(self) -> float:
        """Waited for the step under way, and for room."""
        return self.held_s - self.arrival_s

    @property
    def adapter_cold_s(self) -> float:
        """Waited for its adapter's bytes, to the next step's begin."""
        return self.adapter_s - self.held_s

    @property
    def history_cold_s(self) -> float:
        """Waited for its history's bytes, the adapter being there, to the next step's begin."""
        return self.history_s - self.adapter_s

    @property
    def prefill_s(self) -> float:
        """From its first step to its first token."""
        return self.first_token_s - self.history_s

    @property
    def tpot_s(self) -> float:
        num_tokens = len(self.planned.answer)
        return (self.finish_s - self.first_token_s) / (num_tokens - 1) if num_tokens > 1 else math.nan
