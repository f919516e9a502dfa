# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens.

Legend: S sequences that sample, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from moe_lora.config import EngineConfig
from moe_lora.config.engine import AUTO
from moe_lora.core.errors import ConfigError
from moe_lora.core.request import GenerateRequest, ModelInfo, SamplingParams, TokenOutput, token_logprobs
from moe_lora.engine.adapters.adapter_store import AdapterVersion
from moe_lora.engine.sequence import Sequence

if TYPE_CHECKING:
    from moe_lora.core.request import TokenLogprobs

    from .grammar_masks import Grammars

Take: TypeAlias = Callable[[Sequence, int], TokenOutput]
OnlyTokens: TypeAlias = Callable[[Iterable[Sequence], Take], list[TokenOutput]]
LogitEdit: TypeAlias = Callable[[torch.Tensor, Seq[Sequence], tuple[int, ...]], None]


class HostCopy:
    """Copy of a tensor on the host; a read does not wait for later launches."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values, self._copied = tensor, None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._values


class Drawn:
    """tokens: [S] int64, on the logits' device.

    processed: log probabilities [S] after all edits.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        logprobs_RV: torch.Tensor | None,
        sampling: Seq[SamplingParams],
        processed: HostCopy | None = None,
    ) -> None:
        num_top = [one.logprobs for one in sampling]
        self.tokens = tokens
        self._num_top = num_top
        self._host_tokens = HostCopy(tokens)
        self._report: LogprobReport | None = None
        self._processed = processed
        if logprobs_RV is not None:
            rows = [row for row, num in enumerate(num_top) if num is not None]
            chosen = tokens if len(rows) == len(tokens) else tokens.index_select(0, sent(rows, tokens))
            listed = [sampling[row].logprob_token_ids for row in rows]
            tops = [0 if ids else num_top[row] or 0 for row, ids in zip(rows, listed, strict=True)]
            self._report = LogprobReport(logprobs_RV, chosen, tops, listed)

    def read(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """The tokens and the reports; waits for the device."""
        rows = {} if self._report is None else self._report.rows
        found = (next(token_logprobs(len(one) // 2 - 1, one)) for _, one in sorted(rows.items()))
        reports = [None if num is None else next(found) for num in self._num_top]
        if self._processed is not None:
            from .logit_edits import with_processed

            reports = with_processed(reports, self._processed.read().tolist())
        return self._host_tokens.read().tolist(), reports


def schedules_ahead(
    config: EngineConfig, device: str, *, host: bool | None = None, merges: bool | None = None
) -> bool:
    """True if steps are launched before the last step's tokens are read.

    host, merges None: by the settings, with "auto" as off.  Raises ConfigError if required but impossible.
    """
    host = config.host_workers not in (0, AUTO) if host is None else host
    merges = config.batching not in ("unmerged", AUTO) if merges is None else merges
    reasons = {
        "several ranks, all but one of which are told of tokens": config.num_ranks > 1,
        "a LoRA Server, whose answers a step waits for": config.lora_server is not None,
        "host_workers, whose answers a step waits for": host,
        f"batching={config.batching!r}, which times steps": merges,
        "an emulated step_profile": config.emulation.step_profile is not None,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if config.async_scheduling == "on" and reason is not None:
        raise ConfigError(
            f"async_scheduling='on' does not go together with {reason}; use 'auto' or 'off', or do without it"
        )
    wanted = config.async_scheduling == "on" or (config.async_scheduling == "auto" and device == "cuda")
    return wanted and reason is None


class Sampler:
    """Draws the tokens of one engine.

    seed: of requests without a seed.  on_change: called from another thread when a request may start.
    only_tokens: None without a grammar, and on CUDA, where steps of one token a row are graphs.
    """

    def __init__(self, info: ModelInfo, seed: int, *, ahead: bool, jumps: bool = False) -> None:
        self.ahead = ahead
        self._jumps = jumps
        self.edit: LogitEdit = forbid_ends
        self.on_change: Callable[[], None] = lambda: None
        self.only_tokens: OnlyTokens | None = None
        self._info = info
        self._seeds = torch.Generator().manual_seed(seed)

    def draw(self, logits_SV: torch.Tensor, sequences: Seq[Sequence]) -> Drawn:
        return sample(logits_SV, sequences, self._info.eos_token_ids, self.edit)

    def sequence(
        self, request: GenerateRequest, adapter: AdapterVersion | None, arrival_s: float
    ) -> Sequence:
        """The request's sequence, with the seed of its noise."""
        make: Callable[..., Sequence] = Sequence
        sampling = request.sampling
        if sampling.edits_logits:
            from .logit_edits import EditedSequence, edit_logits

            self.edit = edit_logits
            make = EditedSequence if sampling.grammar is None else self.grammars.sequence
        if adapter is not None and adapter.packed.invocation:
            from moe_lora.engine.activated import activated

            make = activated(make)
        limit_tokens, seed = self._info.max_model_len, sampling.seed
        if sampling.max_tokens is not None:
            limit_tokens = min(limit_tokens, len(request.prompt_token_ids) + sampling.max_tokens)
        if sampling.greedy:
            seed = None
        elif seed is None:
            seed = int(torch.randint(2**62, (1,), generator=self._seeds))
        return make(request, adapter, arrival_s, limit_tokens, seed)

    @cached_property
    def grammars(self) -> Grammars:
        """Created for the first request with a grammar."""
        from .grammar_masks import Grammars

        made = Grammars(self._info, self.on_change)
        if self._jumps:
            self.only_tokens = made.only_tokens
        return made


def sent(values: Any, like: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The values beside `like`; on CUDA from page-locked memory, without a wait."""
    return torch.tensor(values, dtype=dtype, pin_memory=like.is_cuda).to(like.device, non_blocking=True)


def forbid_ends(logits_SV: torch.Tensor, sequences: Seq[Sequence], eos_token_ids: tuple[int, ...]) -> None:
    """Forbid ends below min_tokens."""
    vocab = logits_SV.shape[1]
    forbidden = [
        row * vocab + token
        for row, sequence in enumerate(sequences)
        if sequence.num_generated < sequence.request.sampling.min_tokens
        for token in eos_token_ids + sequence.request.sampling.stop_token_ids
        if 0 <= token < vocab
    ]
    if forbidden:
        logits_SV.view(-1).index_fill_(0, sent(forbidden, logits_SV), -math.inf)


@torch.inference_mode()
def sample(
    logits_SV: torch.Tensor,
    sequences: Seq[Sequence],
    eos_token_ids: tuple[int, ...],
    edit: LogitEdit = forbid_ends,
) -> Drawn:
    """The next token of each sequence, and log probabilities on request.

    logits_SV: [S, V] fp32, overwritten.  Greedy rows take the argmax, further rows the highest probability /
    noise (the exponential race) after temperature, top-k, top-p and min-p.  The noise depends on seed and
    position: equal tokens in any batch and process.  Waits for no device.
    """
    reported = [row for row, one in enumerate(sequences) if one.request.sampling.logprobs is not None]
    logprobs = None
    if reported:
        rows = logits_SV if len(reported) == len(sequences) else logits_SV[sent(reported, logits_SV)]
        logprobs = torch.log_softmax(rows, dim=-1)
    edit(logits_SV, sequences, eos_token_ids)
    has_processed = any(sequences[row].request.sampling.processed_logprobs for row in reported)
    if any(sequence.seed is not None for sequence in sequences):
        tokens = _draw(logits_SV.clone() if has_processed else logits_SV, sequences)
    else:
        tokens = logits_SV.argmax(dim=-1)
    processed = None
    if has_processed and logprobs is not None:
        from .logit_edits import processed_logprobs

        processed = HostCopy(processed_logprobs(logits_SV, sequences, tokens, logprobs))
    return Drawn(tokens, logprobs, [sequence.request.sampling for sequence in sequences], processed)


def _on_device(logits_SV: torch.Tensor) -> bool:
    return logits_SV.is_cuda


def _draw(logits_SV: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """A token of each row; overwrites the logits."""
    if _on_device(logits_SV):
        from moe_lora.kernels.triton.sampling import draw
    else:
        from moe_lora.kernels.cpu.sampling import draw
    sampling = [sequence.request.sampling for sequence in sequences]
    settings = [(0.0 if one.greedy else one.temperature, one.top_p, one.min_p) for one in sampling]
    numbers = [
        (min(one.top_k, logits_SV.shape[1]), sequence.seed or 0, sequence.num_generated)
        for one, sequence in zip(sampling, sequences, strict=True)
    ]
    return draw(logits_SV, sent(settings, logits_SV, torch.float32), sent(numbers, logits_SV))


def truncated_probabilities(logits_SV: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """Probabilities [S, V] after temperature, then top-k, top-p and min-p; not renormalised."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits_SV.device)[:, None]

    probs_SV = torch.softmax(logits_SV / column([p.temperature for p in params]), dim=-1)
    if all(p.top_k == 0 and p.top_p == 1.0 and p.min_p == 0.0 for p in params):
        return probs_SV
    ordered, order = probs_SV.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = place < column([min(p.top_k or ordered.shape[-1], ordered.shape[-1]) for p in params])
    kept = torch.where(keep, ordered, 0.0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    # 1 keeps all, whatever the rounded sum: a row must not depend on other rows' settings.
    keep &= kept.cumsum(dim=-1) - kept < column([math.inf if p.top_p == 1.0 else p.top_p for p in params])
    keep &= ordered >= ordered[:, :1] * column([p.min_p for p in params])
    keep[:, 0] = True
    return torch.zeros_like(probs_SV).scatter(-1, order, torch.where(keep, ordered, 0.0))


class LogprobReport:
    """Log probability and position of each row's chosen token, and the likeliest tokens.

    Rows share a topk and a copy with rows of their num_top alone.  listed: ids in place of the likeliest, by
    row; the chosen token joins them.
    """

    def __init__(
        self,
        logprobs_RV: torch.Tensor,
        chosen_R: torch.Tensor,
        num_top: Seq[int],
        listed: Seq[tuple[int, ...]] = (),
    ) -> None:
        vocab = logprobs_RV.shape[1]
        chosen = logprobs_RV.gather(1, chosen_R[:, None])
        # A sum in int64 takes three times as long.
        position = (logprobs_RV > chosen).sum(1, keepdim=True, dtype=torch.int32) + 1
        rows_of: dict[int | None, list[int]] = {}
        for row, num in enumerate(num_top):
            wide = None if listed and listed[row] else vocab if num < 0 else min(num, vocab)
            rows_of.setdefault(wide, []).append(row)
        self._parts = list[tuple[list[int], HostCopy]]()
        for wide, rows in rows_of.items():
            of = slice(None) if len(rows_of) == 1 else sent(rows, logprobs_RV)
            if wide is None:
                width = max(map(len, listed))
                padded = [(*listed[row], *listed[row][:1] * (width - len(listed[row]))) for row in rows]
                ids = torch.cat([sent(padded, logprobs_RV), chosen_R[of, None]], 1)
                values = logprobs_RV[of].gather(1, ids.clamp(min=0))
            else:
                values, ids = logprobs_RV[of].topk(wide)
            scores = torch.cat([chosen[of], values], 1).view(torch.int32)
            self._parts.append((rows, HostCopy(torch.cat([scores, position[of], ids.int()], 1))))

    @cached_property
    def rows(self) -> dict[int, Any]:
        """Content of `token_logprobs` for each row, an array; waits for the device."""
        return {
            n: one for rows, copy in self._parts for n, one in zip(rows, copy.read().numpy(), strict=True)
        }
