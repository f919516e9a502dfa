# SPDX-License-Identifier: Apache-2.0
"""A request through an instance, and its TTFT parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from moe_lora.cache.pages import BlockTable
from moe_lora.scheduling.views import Scheduled, Waits
from moe_lora.workload.replay_plan import TurnRequest

PARTS = ("queue", "adapter_cold", "history_cold", "prefill")


@dataclass(slots=True, eq=False)
class CachedRequest:
    """A `scheduling.views.Schedulable`; parts of TTFT as in `RequestTiming`.

    tokens: of prompt and answer so far, num_computed of them with KV in `table`.  num_cached: prompt tokens
    with found KV.  has_started: gained a token here.  num_brought: tokens with moved KV, in a step's budget
    but without time.  Stamps in seconds; NaN: not yet.
    """

    planned: TurnRequest
    tokens: list[int] = field(init=False)
    table: BlockTable = field(init=False)
    num_left: int = field(init=False)
    num_computed: int = 0
    num_cached: int = 0
    matched: bool = False
    adapter_hit: bool = True
    cold_tokens: int = 0
    base_tokens: int = 0
    has_started: bool = False
    load_tokens: int = field(init=False)
    num_brought: int = 0
    held: bool = False
    awaits_kv: bool = False
    early: bool = False
    unshared: bool = False
    gave_way: bool = False
    computes_prompt: bool = False
    waits: Waits = field(default_factory=Waits)
    first_token_s: float = math.nan
    finish_s: float = math.nan

    def __post_init__(self) -> None:
        self.tokens = list(self.planned.prompt)
        self.num_left = len(self.planned.answer)
        self.load_tokens = len(self.tokens)
        self.table = BlockTable(self.planned.adapter)

    @property
    def tenant(self) -> str:
        return self.planned.tenant

    @property
    def share(self) -> float:
        return self.planned.share

    @property
    def priority(self) -> int:
        return self.planned.priority

    @property
    def cache_salt(self) -> str:
        return ""

    @property
    def arrival_s(self) -> float:
        return self.planned.arrival_s

    @property
    def adapter(self) -> str | None:
        return self.planned.adapter

    @property
    def adapter_uid(self) -> str | None:
        return self.planned.adapter

    @property
    def prompt_tokens(self) -> int:
        return len(self.planned.prompt)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    def start_over(self) -> None:
        """Drop all state: another instance computes the tokens as a prompt."""
        self.num_computed = self.cold_tokens = self.num_brought = 0
        self.matched = self.has_started = False
        self.table = BlockTable(self.planned.adapter)
        self.load_tokens = len(self.tokens)

    def continued(self) -> CachedRequest:
        """The request for another instance, held until its KV comes; early: before the first token."""
        moved = CachedRequest(
            self.planned,
            num_cached=self.num_cached,
            held=True,
            awaits_kv=True,
            early=math.isnan(self.first_token_s),
            waits=replace(self.waits),
            first_token_s=self.first_token_s,
        )
        moved.tokens, moved.num_left, moved.load_tokens = list(self.tokens), self.num_left, len(self.tokens)
        return moved

    def follow(self, source: CachedRequest) -> None:
        """Have the source's answer so far."""
        self.tokens, self.num_left = list(source.tokens), source.num_left
        self.first_token_s, self.early = source.first_token_s, False

    def append(self, now_s: float) -> bool:
        """Add the answer's next token; True for the last."""
        answer = self.planned.answer
        if self.num_left == len(answer):
            self.first_token_s = now_s
        self.tokens.append(answer[-self.num_left])
        self.num_left -= 1
        if self.num_left:
            return False
        self.finish_s = now_s
        return True

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def queue_s(self) -> float:
        """Wait for the current step, and for room."""
        return self.waits.queue_s(self.arrival_s, self._admitted_s)

    @property
    def adapter_cold_s(self) -> float:
        """Wait for the adapter, to the next step's start."""
        return self.waits.adapter_load_s

    @property
    def history_cold_s(self) -> float:
        """Wait for the history after the adapter, to the next step's start."""
        return self.waits.kv_load_s

    @property
    def prefill_s(self) -> float:
        """From the first step to the first token."""
        return self.first_token_s - self._admitted_s

    @property
    def tpot_s(self) -> float:
        num_tokens = len(self.planned.answer)
        return (self.finish_s - self.first_token_s) / (num_tokens - 1) if num_tokens > 1 else math.nan

    @property
    def _admitted_s(self) -> float:
        assert self.waits.admitted_s is not None
        return self.waits.admitted_s


@dataclass(slots=True)
class StepCounts:
    """The token rows of one step.

    num_rows: decode rows.  num_prompt_pairs: pairs of a prompt token and an attended token.
    """

    num_rows: int = 0
    num_with_adapter: int = 0
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_prompt_pairs: int = 0
    adapters: set[str] = field(default_factory=set)


LayerTime: TypeAlias = Callable[[StepCounts], tuple[float, float]]
"""Seconds of one layer, and of the LoRA Server's work."""


def step_rows(plan: Iterable[Scheduled[CachedRequest]]) -> StepCounts:
    """Rows of a planned step, without tokens whose KV was moved."""
    found = StepCounts()
    for item in plan:
        request, num_computed = item.sequence, item.sequence.num_computed
        if request.adapter is not None:
            found.num_with_adapter += 1
            found.adapters.add(request.adapter)
        num_tokens = item.num_tokens - min(item.num_tokens, max(0, request.num_brought - num_computed))
        if item.num_tokens == 1 and num_computed >= len(request.planned.prompt):
            found.num_rows += num_tokens
        elif num_tokens:
            found.num_prompts += 1
            found.num_prompt_tokens += num_tokens
            before = num_computed + item.num_tokens - num_tokens
            found.num_prompt_pairs += num_tokens * before + num_tokens * (num_tokens + 1) // 2
    return found
