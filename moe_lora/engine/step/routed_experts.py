# SPDX-License-Identifier: Apache-2.0
"""Chosen experts of a request's tokens, for router replay.

Such a step runs without compiled code and graphs.  Legend: T token rows, N noted rows, L layers with experts,
K chosen experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec import structs

from moe_lora.core.request import MAX_REPORT_BYTES, GenerateRequest, PromptReport
from moe_lora.engine.sequence import Sequence
from moe_lora.models.causal_lm import CausalLM, LayerForward
from moe_lora.models.mlp import MoeMlp
from moe_lora.scheduling.views import Scheduled

from .prompt_reports import PromptRecord, PromptRows, prompt_rows
from .sampler import HostCopy, sent
from .step_batch import StepBatch

if TYPE_CHECKING:
    from moe_lora.core.shape import ModelShape
    from moe_lora.lora.outer import OuterDeltas


def check_experts(num_prompt: int, shape: ModelShape) -> None:
    """Raises ValueError for a dense model, and for a prompt above MAX_REPORT_BYTES."""
    if not shape.num_experts:
        raise ValueError("routed_experts needs a model with experts, and this model is dense; leave it out")
    token_bytes = shape.expert_bytes
    if num_prompt * token_bytes > MAX_REPORT_BYTES:
        what = f"routed_experts of a prompt of {num_prompt} tokens has {num_prompt * token_bytes} bytes, and "
        what += f"one message carries {MAX_REPORT_BYTES}; send at most {MAX_REPORT_BYTES // token_bytes} "
        raise ValueError(f"{what}tokens, or leave it out")


class _Part(NamedTuple):
    """Experts at positions start to end: rows of a copy from first_row on."""

    start: int
    end: int
    copy: HostCopy
    first_row: int

    def rows(self, start: int, end: int) -> torch.Tensor:
        """[end - start, L, K]; waits for the device."""
        first = self.first_row + start - self.start
        return self.copy.read()[first : first + end - start]


class ExpertRecord(PromptRecord):
    """A report with the experts of all tokens; a later compute of a token counts.

    Each output has the experts of tokens not reported so far.
    """

    def __init__(self, request: GenerateRequest, vocab_size: int) -> None:
        super().__init__(request, vocab_size)
        self._num_reported: int | None = None
        self._parts: list[_Part] = []
        if request.generated:
            self._end_prompt()

    def _end_prompt(self) -> None:
        self.num_top, self.num_scored, self.wants_hidden, self.hidden = None, 0, False, None
        self._scores.clear()

    def add_experts(self, start: int, num_tokens: int, copy: HostCopy, first_row: int) -> None:
        self._parts.append(_Part(start, start + num_tokens, copy, first_row))

    def report(self, sequence: Sequence) -> PromptReport:
        """The report of an answer's last token, without experts yet; waits for the device."""
        end, start, found = len(sequence.tokens) - 1, self._num_reported, PromptReport()
        if start is None:  # another instance reported the earlier tokens
            is_first = sequence.num_generated == 1
            start = 0 if is_first else end - 1
            found = self.read() if is_first else found
            self._end_prompt()
            sequence.computes_prompt = False
        self._num_reported = end
        ids = self._read(start, end)
        self._parts = [part for part in self._parts if part.end > end]
        experts = (ids.shape[1], ids.shape[2], ids.numpy().astype("<i2").tobytes())
        return structs.replace(found, experts=experts)

    def _read(self, start: int, end: int) -> torch.Tensor:
        ids = torch.empty(0)
        for part in self._parts:
            first, last = max(start, part.start), min(end, part.end)
            if first < last:
                rows = part.rows(first, last)
                ids = ids if len(ids) else rows.new_full((end - start, *rows.shape[1:]), -1)
                ids[first - start : last - start] = rows
        return ids


class ExpertRows:
    """Noted rows of one step, beside rows of reported prompts.  Other ranks get the prompts' alone.

    spans: record, position of its first token, first row, number of tokens.
    """

    may_compile = False

    def __init__(self, spans: Seq[tuple[ExpertRecord, int, int, int]], prompt: PromptRows | None) -> None:
        self._spans = spans
        self._prompt = prompt

    def __reduce__(self) -> Any:
        return _unchanged, (self._prompt,)

    def run(
        self,
        model: CausalLM,
        batch: StepBatch,
        channels: Seq[torch.Tensor],
        layer_forward: LayerForward,
        outer: OuterDeltas | None,
    ) -> torch.Tensor:
        """The batch's logits; records get their parts."""
        with _noting(model) as noted:
            if self._prompt is None:
                inputs = batch.tokens, batch.positions, batch.live, batch.logit_rows
                logits: torch.Tensor = model(*inputs, channels, layer_forward, outer)
            else:
                logits = self._prompt.run(model, batch, channels, layer_forward, outer)
        ids_TLK = torch.stack(noted, dim=1)
        rows_N = [row for _, _, first, num in self._spans for row in range(first, first + num)]
        copy, done = HostCopy(ids_TLK.index_select(0, sent(rows_N, ids_TLK)).to(torch.int16)), 0
        for record, position, _, num in self._spans:
            record.add_experts(position, num, copy, done)
            done += num
        return logits


def _unchanged(prompt: PromptRows | None) -> PromptRows | None:
    return prompt


@contextmanager
def _noting(model: CausalLM) -> Iterator[list[torch.Tensor]]:
    """The experts at each gate, [T, K] int32, in the order of layers."""
    noted: list[torch.Tensor] = []
    gates: list[Any] = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeMlp)]
    for gate in gates:
        gate.choose = partial(_choose, gate.choose, noted)
    try:
        yield noted
    finally:
        for gate in gates:
            del gate.choose


def _choose(choose: Any, noted: list[torch.Tensor], *args: torch.Tensor) -> Any:
    found = choose(*args)
    noted.append(found[1])
    return found


def expert_rows(plan: Seq[Scheduled[Sequence]]) -> PromptRows | ExpertRows | None:
    """The plan's rows of prompts and noted experts, if any."""
    spans, first_row = [], 0
    for item in plan:
        record = item.sequence.record
        if isinstance(record, ExpertRecord):
            spans.append((record, item.sequence.num_computed, first_row, item.num_tokens))
        first_row += item.num_tokens
    prompt = prompt_rows(plan)
    return ExpertRows(spans, prompt) if spans else prompt
