# SPDX-License-Identifier: Apache-2.0
"""A request's state in the engine."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moe_lora.cache.pages import BlockTable
from moe_lora.core.request import (
    NO_TOKEN,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    RequestTiming,
)
from moe_lora.engine.adapters.adapter_store import AdapterVersion
from moe_lora.scheduling.views import Waits

if TYPE_CHECKING:
    from .step.prompt_reports import PromptRecord


@dataclass(eq=False)
class Sequence:
    """Prompt and generated tokens, the computed part, and pages.

    tokens[:num_computed] have KV in `table`.  A last token below 0 is unknown: the running step draws it.
    base_tokens: first tokens with the base's KV, before an activated adapter.  unshared: computed on weights
    with another adapter.  seed: None: greedy.  problem: ends the request.  kept: held with the first token
    and all KV.  record: of the prompt's report until the first token, or of all tokens' experts.  Further
    flags: see `Schedulable`.
    """

    request: GenerateRequest
    adapter: AdapterVersion | None
    arrival_s: float
    limit_tokens: int
    seed: int | None
    tokens: list[int] = field(init=False)
    num_computed: int = 0
    num_cached: int = 0
    counted: bool = False
    matched: bool = False
    adapter_hit: bool = True
    cold_tokens: int = 0
    base_tokens: int = 0
    held: bool = False
    kept: bool = False
    awaits_kv: bool = False
    early: bool = False
    unshared: bool = False
    gave_way: bool = False
    computes_prompt: bool = False
    record: PromptRecord | None = None
    table: BlockTable = field(init=False)
    waits: Waits = field(default_factory=Waits)
    first_token_s: float | None = None
    second_token_s: float | None = None
    problem: str | None = None

    def __post_init__(self) -> None:
        request = self.request
        self.tenant, self.share, self.priority = request.tenant, request.share, request.priority
        self.cache_salt = request.cache_salt
        self.held, self.awaits_kv = request.held, request.awaits_kv
        self.tokens = [*request.prompt_token_ids, *request.generated]
        self.adapter_uid = None if self.adapter is None else self.adapter.uid
        """None for the base."""
        self.table = BlockTable(self.adapter_uid)

    @property
    def is_held_by_order(self) -> bool:
        """True in a pause with `keep`, or a move."""
        return self.held

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def num_left(self) -> int:
        """Most tokens still to generate."""
        return self.limit_tokens - len(self.tokens)

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute: all but an answer's last."""
        ends = self.tokens[-1] < 0 and self.num_left <= 0
        return len(self.tokens) - self.num_computed - ends

    def expect(self, number: int) -> None:
        """Add an unknown token: draw `number` of the running step."""
        self.tokens.append(-1 - number)

    def extend(self, tokens: Seq[int]) -> None:
        """Add another instance's tokens."""
        self.tokens += tokens

    def append(self, token: int, now_s: float, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Add the sampled token; returns the finish reason."""
        if self.tokens[-1] < 0:
            self.tokens[-1] = token
        else:
            self.tokens.append(token)
        if self.first_token_s is None:
            self.first_token_s = now_s
        elif self.second_token_s is None:
            self.second_token_s = now_s
        sampling = self.request.sampling
        stops = token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos)
        if stops and self.num_generated >= sampling.min_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.limit_tokens else None

    def timing(self, now_s: float) -> RequestTiming:
        waits = self.waits
        admitted = now_s if waits.admitted_s is None else waits.admitted_s
        first = now_s if self.first_token_s is None else self.first_token_s
        second = first if self.second_token_s is None else self.second_token_s
        return RequestTiming(
            queue_s=waits.queue_s(self.arrival_s, now_s),
            adapter_load_s=waits.adapter_load_s,
            kv_load_s=waits.kv_load_s,
            prefill_s=first - admitted,
            first_decode_s=second - first,
            adapter_wait_s=waits.adapter_wait_s(now_s),
            num_preemptions=waits.num_preemptions,
        )


def check_request(request: GenerateRequest, info: ModelInfo) -> None:
    """Raises ValueError for an impossible request."""
    prompt, generated, sampling = request.prompt_token_ids, request.generated, request.sampling
    limit = info.max_model_len
    most = limit if sampling.hidden_state else limit - 1  # the token after a hidden state is not read
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if len(prompt) > most:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, but prompt and answer together may have {limit}; "
            "shorten it or raise max_model_len"
        )
    if generated and len(generated) >= min(sampling.max_tokens or limit, limit - len(prompt)):
        raise ValueError(f"generated has {len(generated)} tokens, so that the answer can't have another one")
    named: list[tuple[str, Iterable[int]]] = [("prompt", prompt), ("generated", generated)]
    named.append(("stop_token_ids", sampling.stop_token_ids))
    named.append(("logprob_token_ids", sampling.logprob_token_ids))
    if rows := sampling.prompt_logprob_token_ids:
        num, start = max(0, len(prompt) - 1 - sampling.prompt_logprob_start), sampling.prompt_logprob_start
        if start < 0 or len(rows) != num:
            what = f"the prompt of {len(prompt)} tokens has {num} scored rows from {start} on"
            raise ValueError(f"prompt_logprob_token_ids has {len(rows)} rows, but {what}")
        named.append(("prompt_logprob_token_ids", (one for row in rows for one in row if one != NO_TOKEN)))
    if sampling.edits_logits:
        named += sampling.edited_ids()
    for name, ids in named:
        bad = next((t for t in ids if not 0 <= t < info.vocab_size), None)
        if bad is not None:
            raise ValueError(f"{name} has token id {bad}, outside the vocabulary of {info.vocab_size}")
