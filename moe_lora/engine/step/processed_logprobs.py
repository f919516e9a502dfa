# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of drawn tokens, after edits, temperature and truncation.

Legend: S sequences that sample, P rows with the report, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from moe_lora.core.request import SamplingParams, TokenLogprobs
from moe_lora.engine.sequence import Sequence

from .sampler import sent, truncated_probabilities

_GREEDY = SamplingParams()


def processed_logprobs(
    logits_SV: torch.Tensor, sequences: Seq[Sequence], tokens_S: torch.Tensor
) -> torch.Tensor:
    """out[s] = log(p[token] / sum(p)) with p of `truncated_probabilities`; NaN without the report.

    logits_SV: [S, V] fp32, edited.  tokens_S: [S] int64.  out: [S] fp32.  Greedy: temperature 1.
    """
    rows = [row for row, one in enumerate(sequences) if one.request.sampling.processed_logprobs]
    params = [sequences[row].request.sampling for row in rows]
    rows_P = sent(rows, logits_SV)
    probs_PV = truncated_probabilities(logits_SV[rows_P], [_GREEDY if p.greedy else p for p in params])
    chosen_P = probs_PV.gather(1, tokens_S[rows_P, None])[:, 0]
    out_S = torch.full(tokens_S.shape, math.nan, dtype=torch.float32, device=logits_SV.device)
    out_S[rows_P] = torch.log(chosen_P / probs_PV.sum(dim=1))
    return out_S


def with_processed(reports: Seq[TokenLogprobs | None], processed: Seq[float]) -> list[TokenLogprobs | None]:
    """The reports with values that are not NaN."""
    return [
        report if report is None or math.isnan(value) else replace(report, processed=value)
        for report, value in zip(reports, processed, strict=True)
    ]
