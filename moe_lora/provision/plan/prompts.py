# SPDX-License-Identifier: Apache-2.0
"""The prompts of a load: lengths, and tokens with KV from earlier requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from moe_lora.provision.lower_bound import Work, work_of
from moe_lora.provision.replayed.prefix_hits import BlockHits, PrefixHits, StatedHits
from moe_lora.workload.conversations import MOONCAKE_BLOCK
from moe_lora.workload.traces.records import TraceRequest

from .stages import PromptsPerRow

CHUNK_TOKENS = 512
"""Prompt tokens of a step; a prompt reads its adapter once a step."""


@dataclass(frozen=True, kw_only=True)
class PromptLoad:
    """Prompts of a load, computed by the instances.

    prompt_tokens: mean.  hit_share: share of prompt tokens in an endless cache.  p95_computed: computed
    tokens of the 95th-percentile prompt.  output_tokens: mean.  work: of a mean request.
    stated: hit_share comes from an option, not from the trace.  longest: most tokens of prompt and answer.
    """

    prompt_tokens: float
    hit_share: float
    p95_computed: float
    output_tokens: float
    work: Work
    stated: bool
    longest: int

    @property
    def computed_tokens(self) -> float:
        """Mean of a request."""
        return self.prompt_tokens * (1 - self.hit_share)

    @property
    def per_row(self) -> PromptsPerRow:
        """Prompt work beside a decode row of a mean step."""
        reads = 1 + self.computed_tokens / CHUNK_TOKENS
        parts = self.computed_tokens, reads, self.work.prompt_pairs
        return PromptsPerRow(*(part / self.output_tokens for part in parts))

    @property
    def prefix_hits(self) -> Callable[[], PrefixHits] | None:
        """Prefix hits of a simulated instance; None without hits."""
        if self.stated:
            return partial(StatedHits, share=self.hit_share)
        return partial(BlockHits, MOONCAKE_BLOCK) if self.hit_share else None


def prompt_load(requests: Sequence[TraceRequest], stated: float | None = None) -> PromptLoad:
    """The prompts of a trace.

    stated: share of each prompt's tokens in computed prefixes; None: by the trace's block hashes, 0 if
    the trace has none.
    """
    if stated is None:
        hits = _block_hits(requests)
    else:
        hits = [min(int(stated * one.prompt_tokens), one.prompt_tokens - 1) for one in requests]
    lengths = [(one.prompt_tokens, hit, one.output_tokens) for one, hit in zip(requests, hits, strict=True)]
    computed = sorted(prompt - hit for prompt, hit, _ in lengths)
    tokens, number = sum(one.prompt_tokens for one in requests), len(requests)
    return PromptLoad(
        prompt_tokens=tokens / number,
        hit_share=sum(hits) / tokens,
        p95_computed=computed[math.ceil(0.95 * number) - 1],
        output_tokens=sum(one.output_tokens for one in requests) / number,
        work=work_of(lengths),
        stated=stated is not None,
        longest=max(one.prompt_tokens + one.output_tokens for one in requests),
    )


def _block_hits(requests: Sequence[TraceRequest]) -> list[int]:
    seen: set[int] = set()
    hits = []
    for one in requests:
        blocks = sum(1 for _ in takewhile(seen.__contains__, one.hash_ids))
        hits.append(min(blocks * MOONCAKE_BLOCK, one.prompt_tokens - 1))
        seen.update(one.hash_ids)
    return hits
