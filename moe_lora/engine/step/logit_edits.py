# SPDX-License-Identifier: Apache-2.0
"""Edits of logits by a request's tokens and fields.

Order and formulas are vLLM's: allowed tokens, bad words, ends, bias, penalties.

Legend: S sequences that sample, V vocabulary, N edited logits, P rows with the report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from moe_lora.core.request import UNFOLLOWABLE, FinishReason, SamplingParams, TokenLogprobs
from moe_lora.engine.sequence import Sequence

from .sampler import forbid_ends, sent, truncated_probabilities

MAX_GAP_TOKENS = 4
"""Most tokens before a reasoning's mark."""
MAX_LATE_TOKENS = 3
"""Most tokens that end a character between a reasoning's limit and its mark."""


class Mask(NamedTuple):
    """words: [ceil(V / 32)] uint32, bit i of word w allows token 32 w + i.  forced: tokens of a complete
    answer, allowed even below min_tokens.
    """

    words: np.ndarray
    forced: tuple[int, ...] = ()
    problem: str | None = None


def bits_of(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """The tokens as words of a `Mask`."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    found = np.fromiter(tokens, np.int64)
    bits[found[found < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


class EditedSequence(Sequence):
    """A sequence with edits: its next step needs the last token, so a launch ahead leaves it out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._in_answer: dict[int, int] = {}
        self._num_counted = 0
        self._allowed: np.ndarray | None = None
        self._has_thought = self.request.sampling.thinking is None
        self._num_late = -1
        """Tokens since the reasoning's limit."""
        bias = self.request.sampling.logit_bias or {}
        self.bias = np.array([[*bias], [*bias.values()]])
        """[2, N] fp64: tokens and biases."""

    def expect(self, number: int) -> None:
        super().expect(number)
        self.held = self.num_left > 0

    def append(self, token: int, now_s: float, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        self.held = self.kept
        reason = super().append(token, now_s, eos_token_ids)
        return reason if self.problem is None else "error"

    def mask(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Mask | None:
        """The next token's mask; None: any token.  Sets the problem without an allowed token."""
        found = self._mask(vocab_size, eos_token_ids)
        if found is not None and found.problem is None and not found.words.any():
            what = "allowed tokens, bad words, min_tokens and a grammar exclude every token"
            found = found._replace(problem=f"{UNFOLLOWABLE}: {what}")
        if found is not None:
            self.problem = found.problem
        return found

    def _mask(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Mask | None:
        sampling = self.request.sampling
        if not self._has_thought and (closing := self._closing_token()) is not None:
            return Mask(bits_of((closing,), vocab_size))
        excluded = {*self._forbidden()}
        if self.num_generated < sampling.min_tokens:
            excluded.update(eos_token_ids, sampling.stop_token_ids)
        if sampling.allowed_token_ids is None and not excluded:
            return None
        if self._allowed is None:
            allowed = sampling.allowed_token_ids
            self._allowed = bits_of(range(vocab_size) if allowed is None else allowed, vocab_size)
        return Mask(self._allowed & ~bits_of(excluded, vocab_size) if excluded else self._allowed)

    def _forbidden(self) -> Iterator[int]:
        """Last tokens of bad words that the answer has begun."""
        num_prompt, tokens = len(self.request.prompt_token_ids), self.tokens
        for word in self.request.sampling.bad_word_ids:
            first = len(tokens) - len(word) + 1
            if first >= num_prompt and tuple(tokens[first:]) == word[:-1]:
                yield word[-1]

    def _closing_token(self) -> int | None:
        """The next token of the mark that ends a reasoning beyond its limit; None: any token."""
        limit, tokens, start = self.request.sampling.thinking, self.tokens, len(self.request.prompt_token_ids)
        assert limit is not None
        if limit.opening:
            most = len(limit.opening) + MAX_GAP_TOKENS
            found = _end_of(limit.opening, tokens[start : start + most], start)
            if found is None:
                self._has_thought = self.num_generated >= most
                return None
            start = found
        closing, self._num_late = limit.closing, len(tokens) - start - limit.num_tokens
        if self._num_late < 0:
            return None
        most_late = MAX_LATE_TOKENS + len(closing)
        thought = tokens[start : start + limit.num_tokens + most_late]
        if _end_of(closing, thought, start) is None and self._num_late < most_late:
            overlaps = range(min(len(closing) - 1, len(thought)), 0, -1)
            return closing[next((num for num in overlaps if tuple(thought[-num:]) == closing[:num]), 0)]
        self._has_thought = True
        return None

    def _may_close_later(self) -> bool:
        """True if a character may end before the mark."""
        return not self._has_thought and 0 <= self._num_late < MAX_LATE_TOKENS

    def penalties(self) -> np.ndarray:
        """[4, N] fp64: tokens, factors, losses by frequency and by presence."""
        sampling = self.request.sampling
        factor, presence = sampling.repetition_penalty, sampling.presence_penalty
        found = np.empty((4, 0))
        if (factor, presence, sampling.frequency_penalty) != (1.0, 0.0, 0.0):
            self._count(with_prompt=factor != 1.0)
            num = len(self._in_answer)
            found = np.empty((4, num))
            found[0] = np.fromiter(self._in_answer.keys(), np.float64, num)
            counts = np.fromiter(self._in_answer.values(), np.float64, num)
            found[1:] = np.full(num, factor), sampling.frequency_penalty * counts, presence * (counts > 0)
        return found

    def _count(self, *, with_prompt: bool) -> None:
        """Count further tokens.  with_prompt: prompt tokens have count 0."""
        prompt, counts = self.request.prompt_token_ids, self._in_answer
        if not self._num_counted:
            counts.update(dict.fromkeys(prompt if with_prompt else (), 0))
            self._num_counted = len(prompt)
        for token in self.tokens[self._num_counted :]:
            counts[token] = counts.get(token, 0) + 1
        self._num_counted = len(self.tokens)


def _end_of(mark: tuple[int, ...], tokens: Seq[int], first: int) -> int | None:
    """The place after the mark.  first: place of tokens[0]."""
    places = range(len(tokens) - len(mark) + 1)
    found = next((at for at in places if tuple(tokens[at : at + len(mark)]) == mark), None)
    return None if found is None else first + found + len(mark)


@torch.inference_mode()
def edit_logits(logits_SV: torch.Tensor, sequences: Seq[Sequence], eos_token_ids: tuple[int, ...]) -> None:
    """Edit the rows of edited sequences; forbid ends below min_tokens in all rows."""
    vocab, flat = logits_SV.shape[1], logits_SV.view(-1)
    edited = [(row * vocab, one) for row, one in enumerate(sequences) if isinstance(one, EditedSequence)]
    forbid_ends(logits_SV, sequences, eos_token_ids)
    masks = [(start, mask) for start, one in edited if (mask := one.mask(vocab, eos_token_ids)) is not None]
    if masks:
        _apply_masks(logits_SV, masks)
    forced = [start + token for start, mask in masks for token in mask.forced]
    if forced:
        flat.index_fill_(0, sent(forced, flat), 0.0)
    if any(one.bias.size for _, one in edited):
        places = np.concatenate([start + one.bias[0].astype(np.int64) for start, one in edited])
        values = np.concatenate([one.bias[1] for _, one in edited])
        places_N = sent(places, flat)
        flat[places_N] = flat[places_N] + sent(values, flat, torch.float32)
    losses = [(start, one.penalties()) for start, one in edited]
    losses_4N = np.concatenate([np.empty((4, 0)), *(found for _, found in losses)], axis=1)
    if losses_4N.size:
        starts = np.repeat([start for start, _ in losses], [found.shape[1] for _, found in losses])
        places_N = sent(starts + losses_4N[0].astype(np.int64), flat)
        factor_N, frequency_N, presence_N = sent(losses_4N[1:], flat, torch.float32)
        logits_N = flat[places_N]
        logits_N = torch.where(logits_N > 0, logits_N / factor_N, logits_N * factor_N)
        flat[places_N] = logits_N - frequency_N - presence_N


def _apply_masks(logits_SV: torch.Tensor, masks: Seq[tuple[int, Mask]]) -> None:
    vocab = logits_SV.shape[1]
    rows = [start // vocab for start, _ in masks]
    if not logits_SV.is_cuda:
        from moe_lora.kernels.cpu.sampling import mask as mask_rows

        mask_rows(logits_SV, rows, [mask.words for _, mask in masks])
        return
    rows_N = sent(rows, logits_SV)
    words = sent(np.stack([mask.words.view(np.int32) for _, mask in masks]), logits_SV, torch.int32)
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    allowed_NV = bits.reshape(len(masks), -1)[:, :vocab].bool()
    logits_SV[rows_N] = logits_SV[rows_N].masked_fill(~allowed_NV, -math.inf)


_GREEDY = SamplingParams()


def processed_logprobs(
    logits_SV: torch.Tensor, sequences: Seq[Sequence], tokens_S: torch.Tensor, logprobs_RV: torch.Tensor
) -> torch.Tensor:
    """out[s] = log(p[token] / sum(p)) with p of `truncated_probabilities`; NaN without the report.

    logits_SV: [S, V] fp32, edited.  tokens_S: [S] int64.  logprobs_RV: [R, V] fp32; rows that want processed
    values alone are overwritten.  out: [S] fp32.  Greedy: temperature 1.
    """
    reported = [one.request.sampling for one in sequences if one.request.sampling.logprobs is not None]
    rows = [row for row, one in enumerate(sequences) if one.request.sampling.processed_logprobs]
    params = [sequences[row].request.sampling for row in rows]
    rows_P = sent(rows, logits_SV)
    probs_PV = truncated_probabilities(logits_SV[rows_P], [_GREEDY if p.greedy else p for p in params])
    logprobs_PV = torch.log(probs_PV / probs_PV.sum(dim=1, keepdim=True))
    alone = [place for place, one in enumerate(params) if one.processed_logprobs == "alone"]
    if alone:
        places = [place for place, one in enumerate(reported) if one.processed_logprobs == "alone"]
        logprobs_RV[sent(places, logits_SV)] = logprobs_PV[sent(alone, logits_SV)]
    out_S = torch.full(tokens_S.shape, math.nan, dtype=torch.float32, device=logits_SV.device)
    out_S[rows_P] = logprobs_PV.gather(1, tokens_S[rows_P, None])[:, 0]
    return out_S


def with_processed(reports: Seq[TokenLogprobs | None], processed: Seq[float]) -> list[TokenLogprobs | None]:
    """The reports with values other than NaN."""
    return [
        report if report is None or math.isnan(value) else replace(report, processed=value)
        for report, value in zip(reports, processed, strict=True)
    ]
