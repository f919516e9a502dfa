"""A request on its way through the simulated system."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_lora.workload.replay_plan import PlannedRequest


@dataclass(slots=True, eq=False)
class SimRequest:
    """What is asked for, and when what happened to it (seconds; NaN: not yet).

    arrival_s: at the instance that serves it.  adapter, adapter_uid: None for the base model.
    admitted_s: it has left the queue, and the load of its adapter is over where that holds up the step.
    first_token_s, finish_s: first and last token.  decode_ttft_s: queue, adapter load and first decode step,
    without prefill (InfiniLoRA section 2.3, footnote).  at_once: it started with the first step after its
    arrival.  waited_for_adapter: it did not, as its adapter got no slot when it was first looked at; of the
    others KV or the batch had no room.
    num_steps_before: those that its instance had begun when it came.
    """

    index: int
    arrival_s: float
    adapter: str | None
    adapter_uid: int | None
    prompt_tokens: int
    output_tokens: int
    lora_rank: int = 0
    instance: int = -1
    num_steps_before: int = 0
    at_once: bool = False
    waited_for_adapter: bool = False
    admitted_s: float = math.nan
    first_token_s: float = math.nan
    decode_ttft_s: float = math.nan
    finish_s: float = math.nan

    @property
    def num_left(self) -> int:
        """Tokens that it will generate; asked while it waits."""
        return self.output_tokens

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer: what it takes of the KV budget."""
        return self.prompt_tokens + self.output_tokens

    @property
    def tpot_s(self) -> float:
        """(finish - first token) / (output tokens - 1); NaN for a single token."""
        if self.output_tokens < 2:
            return math.nan
        return (self.finish_s - self.first_token_s) / (self.output_tokens - 1)


def from_plan(planned: PlannedRequest, adapter_uid: int | None, lora_rank: int = 0) -> SimRequest:
    """The planned request before anything happens to it.  Raises ValueError for an answer of no token."""
    if planned.output_tokens < 1:
        raise ValueError(f"request {planned.index} has output_tokens={planned.output_tokens}; give 1 or more")
    return SimRequest(
        planned.index,
        planned.arrival_s,
        planned.adapter,
        adapter_uid,
        planned.prompt_tokens,
        planned.output_tokens,
        lora_rank,
    )
