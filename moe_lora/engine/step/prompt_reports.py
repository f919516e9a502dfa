# SPDX-License-Identifier: Apache-2.0
"""Reports of prompts: log probabilities of prompt tokens, and the last token's hidden state.

Legend: T token rows, N scored rows, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from moe_lora.core.request import NO_TOKEN, GenerateRequest, PromptReport
from moe_lora.engine.sequence import Sequence
from moe_lora.models.causal_lm import CausalLM, LayerForward
from moe_lora.scheduling.views import Scheduled

from .sampler import HostCopy, LogprobReport, sent
from .step_batch import StepBatch

if TYPE_CHECKING:
    from moe_lora.lora.outer import OuterDeltas

LOGITS_BYTES = 64 << 20
"""Bytes of logits at once: [N, V] fp32."""
MAX_BYTES = 64 << 20
"""Log probabilities of one prompt.  Python's objects have 18 times the bytes."""


class PromptRecord:
    """A request's report, collected over steps; a later compute of a token counts.

    num_scored: without the first token.  Raises ValueError above MAX_BYTES.
    """

    def __init__(self, request: GenerateRequest, vocab_size: int) -> None:
        sampling = request.sampling
        self.prompt = request.prompt_token_ids
        self.num_top = sampling.prompt_logprobs
        self._listed = sampling.prompt_logprob_token_ids
        self._first_listed = sampling.prompt_logprob_start
        self.first_scored = self._first_listed if self.num_top is None else 0
        self.num_scored = 0 if self.num_top is None and not self._listed else len(self.prompt) - 1
        self._width = vocab_size if self.num_top == -1 else min(self.num_top or 0, vocab_size)
        if (num_bytes := 8 * self.num_scored * (1 + self._width)) > MAX_BYTES:
            what = f"prompt_logprobs has {num_bytes} bytes, more than {MAX_BYTES}"
            raise ValueError(f"{what}; shorten the prompt, or lower prompt_logprobs")
        self.wants_hidden = sampling.hidden_state
        self.hidden: HostCopy | None = None
        self._scores: dict[int, tuple[LogprobReport, LogprobReport | None, int]] = {}

    def listed(self, position: int) -> tuple[int, ...]:
        """Token ids to score here."""
        place = position - self._first_listed
        return self._listed[place] if 0 <= place < len(self._listed) else ()

    def add(self, position: int, report: LogprobReport, listed: LogprobReport | None, row: int) -> None:
        """The token after this position has the scores of the row, and of its listed tokens."""
        self._scores[position] = report, listed, row

    def report(self, sequence: Sequence) -> PromptReport:
        """The report beside the first token ends the record."""
        sequence.record, sequence.computes_prompt = None, False
        return self.read()

    def read(self) -> PromptReport:
        """The report, in bytes: numbers of Python would delay all requests.  Waits for the device."""
        scores, hidden = None, None
        if self.num_top is not None:
            found = (self._scores[position] for position in range(self.num_scored))
            scores = self._width, b"".join(report.rows[row] for report, _, row in found)
        if self.hidden is not None:
            hidden = self.hidden.read().numpy().astype("<f4").tobytes()
        return PromptReport(scores, hidden, self._id_logprobs() if self._listed else None)

    def _id_logprobs(self) -> bytes:
        found = np.full((len(self._listed), max(map(len, self._listed))), -np.inf, dtype="<f4")
        for place, ids in enumerate(self._listed):
            _, listed, row = self._scores[self._first_listed + place]
            if listed is not None:
                scores = listed.rows[row][1 : 1 + len(ids)].view(np.float32)
                found[place, : len(ids)] = np.where(np.array(ids) == NO_TOKEN, -np.inf, scores)
        return found.tobytes()


class _Scored(NamedTuple):
    """The row of a record's token."""

    record: PromptRecord
    position: int


class PromptRows:
    """Rows of one step.  Other ranks get `rows` alone, and compute their columns of the logits.

    rows: [N] int64 on the host.  logits_bytes: at once, on all ranks.
    """

    may_compile = True

    def __init__(
        self,
        rows: torch.Tensor,
        scored: Seq[_Scored] = (),
        hidden: Seq[tuple[int, PromptRecord]] = (),
        logits_bytes: int = LOGITS_BYTES,
    ) -> None:
        self.rows = rows
        self._logits_bytes = logits_bytes
        self._scored = scored
        self._hidden = hidden

    def __reduce__(self) -> Any:
        return PromptRows, (self.rows, (), (), self._logits_bytes)

    def run(
        self,
        model: CausalLM,
        batch: StepBatch,
        channels: Seq[torch.Tensor],
        layer_forward: LayerForward,
        outer: OuterDeltas | None,
    ) -> torch.Tensor:
        """The batch's logits; records get their parts."""
        kept: list[torch.Tensor] = []

        def keeping(*args: Any) -> torch.Tensor:
            kept[:] = [layer_forward(*args)]
            return kept[0]

        inputs = batch.tokens, batch.positions, batch.live
        logits: torch.Tensor = model(*inputs, batch.logit_rows, channels, keeping, outer)
        x_TH, first = kept[0], 0
        for rows in self.rows.split(max(1, self._logits_bytes // (4 * model.spec.shape.vocab_size))):
            rows_N = rows.to(x_TH.device)
            if outer is not None:
                outer.begin_step(batch.tables, batch.routing, rows_N)
            # The layers are done: the model adds its head.
            self._score(model(*inputs, rows_N, channels, lambda *_: x_TH, outer), first)
            first += len(rows)
        for row, record in self._hidden:
            record.hidden = HostCopy(model.norm(x_TH[row : row + 1]).float()[0])
        return logits

    def _score(self, logits_NV: torch.Tensor, first: int) -> None:
        scored = self._scored[first : first + len(logits_NV)]
        if not scored:
            return
        targets_N = sent([record.prompt[position + 1] for record, position in scored], logits_NV)
        num_top = [record.num_top or 0 for record, _ in scored]
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        ids = [record.listed(position) for record, position in scored]
        listed = LogprobReport(logprobs_NV, targets_N, [0] * len(ids), ids) if any(ids) else None
        report = LogprobReport(logprobs_NV, targets_N, num_top)
        for row, (record, position) in enumerate(scored):
            record.add(position, report, listed, row)


def prompt_rows(plan: Seq[Scheduled[Sequence]]) -> PromptRows | None:
    """The plan's rows of reported prompts, if any."""
    rows: list[int] = []
    scored: list[_Scored] = []
    hidden: list[tuple[int, PromptRecord]] = []
    first_row = 0
    for item in plan:
        record, start = item.sequence.record, item.sequence.num_computed
        if record is not None:
            first = max(start, record.first_scored)
            positions = range(first, min(start + item.num_tokens, record.num_scored))
            rows += [first_row + position - start for position in positions]
            scored += [_Scored(record, position) for position in positions]
            last = len(record.prompt) - 1 - start
            if record.wants_hidden and 0 <= last < item.num_tokens:
                hidden.append((first_row + last, record))
        first_row += item.num_tokens
    if not rows and not hidden:
        return None
    return PromptRows(torch.tensor(rows, dtype=torch.int64), scored, hidden, LOGITS_BYTES)
