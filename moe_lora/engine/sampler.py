"""From logits to tokens.

Legend: S sequences that sample, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
import torch

from moe_lora.core.request import SamplingParams, TokenLogprobs

from .sequence import Sequence


@torch.inference_mode()
def sample(
    logits_SV: torch.Tensor, sequences: Seq[Sequence], eos_token_ids: tuple[int, ...]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """The next token of each sequence, and its log probabilities where asked for.

    logits_SV: [S, V] fp32, overwritten for sequences that may not end yet.  Greedy rows take the argmax;
    the others race with the noise of their seed and position, so that a seed gives the same tokens in any
    batch, and in an answer that goes on in another process.
    """
    report = [sequence.request.sampling.logprobs for sequence in sequences]
    logprobs_SV = torch.log_softmax(logits_SV, dim=-1) if any(n is not None for n in report) else None
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.sampling
        if sequence.num_generated < sampling.min_tokens:
            logits_SV[row, list(eos_token_ids + sampling.stop_token_ids)] = float("-inf")
    tokens = logits_SV.argmax(dim=-1)
    drawn = [row for row, sequence in enumerate(sequences) if not sequence.request.sampling.greedy]
    if drawn:
        tokens[drawn] = _draw(logits_SV[drawn], [sequences[row] for row in drawn])
    chosen = tokens.tolist()
    reports = [
        None if n is None or logprobs_SV is None else _report(logprobs_SV[row], chosen[row], n)
        for row, n in enumerate(report)
    ]
    return chosen, reports


def _draw(logits_SV: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Sample after temperature, top-k, top-p and min-p, by the exponential race (argmax of p / noise)."""
    params = [sequence.request.sampling for sequence in sequences]
    probs_SV = truncated_probabilities(logits_SV, params)
    noise_SV = np.empty(probs_SV.shape, dtype=np.float32)
    for row, sequence in enumerate(sequences):
        assert sequence.seed is not None
        noise_SV[row] = exponential_noise(sequence.seed, sequence.num_generated, probs_SV.shape[-1])
    return (probs_SV / torch.from_numpy(noise_SV).to(probs_SV.device)).argmax(dim=-1)


def exponential_noise(seed: int, position: int, num: int) -> np.ndarray:
    """Draws [num] fp64 > 0 of the exponential distribution: a function of the seed and the draw's position.

    Philox4x64-10 (Salmon et al., SC 2011) in numpy, keyed by the seed, the position in its counter's highest
    word; -log of (x + 1/2) / 2^32 for its 32-bit halves x.  Always made on the host, for CUDA too.
    """
    philox = np.random.Philox(key=seed % 2**64, counter=position << 192)
    halves = philox.random_raw(-(-num // 2)).astype("<u8", copy=False).view("<u4")[:num]
    noise: np.ndarray = -np.log((halves + 0.5) * 2.0**-32)
    return noise


def truncated_probabilities(logits_SV: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """Probabilities [S, V] after temperature, then top-k, top-p and min-p; not renormalised."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits_SV.device)[:, None]

    temperature = column([p.temperature for p in params])
    probs_SV = torch.softmax(logits_SV / temperature, dim=-1)
    if all(p.top_k == 0 and p.top_p == 1.0 and p.min_p == 0.0 for p in params):
        return probs_SV
    ordered, order = probs_SV.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = place < column([min(p.top_k or ordered.shape[-1], ordered.shape[-1]) for p in params])
    kept = torch.where(keep, ordered, 0.0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    # 1 keeps all, whatever the sum is rounded to: a row's tokens must not depend on its neighbours' settings.
    keep &= kept.cumsum(dim=-1) - kept < column([math.inf if p.top_p == 1.0 else p.top_p for p in params])
    keep &= ordered >= ordered[:, :1] * column([p.min_p for p in params])
    keep[:, 0] = True
    return torch.zeros_like(probs_SV).scatter(-1, order, torch.where(keep, ordered, 0.0))


def _report(logprobs_V: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    chosen = logprobs_V[token]
    top = logprobs_V.topk(min(num_top, logprobs_V.shape[-1]))
    return TokenLogprobs(
        logprob=chosen.item(),
        position=int((logprobs_V > chosen).sum()) + 1,
        top=tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
    )
