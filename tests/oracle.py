# SPDX-License-Identifier: Apache-2.0
"""What transformers and peft compute: the tokens and logits that every path of the engine is held to.

Each adapter is applied alone to a fresh model. Results are cached for the session, so that tests that share
(checkpoint, adapter, prompts) pay once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from moe_lora.families import shape_of

from .families import load_model, targets_as_given

MIN_MARGIN = 1e-4
"""Tokens may only be compared where the winner leads by more than this; else a test is a coin toss."""


@dataclass(frozen=True)
class Reference:
    """Greedy continuations, with how clearly they were decided.

    margin: smallest lead of a chosen token's logit over the next. gate_margin: smallest lead of a chosen
    expert's score over the best one not chosen, over all layers and tokens (infinite for a dense model).
    """

    tokens: tuple[tuple[int, ...], ...]
    margin: float
    gate_margin: float

    def check_margins(self) -> None:
        """Fail if a decision on the way was too close to compare; another seed is needed then."""
        assert self.margin > MIN_MARGIN, f"top-2 margin {self.margin}: choose another seed"
        assert self.gate_margin > MIN_MARGIN, f"gate margin {self.gate_margin}: choose another seed"


_Key = tuple[str, str | None, tuple[tuple[int, ...], ...], int]
_KNOWN: dict[_Key, Reference] = {}


def greedy_reference(
    model_dir: Path | str,
    adapter_dir: Path | str | None,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    drafts: Sequence[Sequence[int]] = (),
) -> Reference:
    """Greedy continuation of each prompt in fp32, num_tokens each; end-of-sequence tokens do not end it.

    drafts: continuations under test.  One pass over prompt and draft proves a right draft; a wrong draft
    counts for nothing, and the model decodes token by token.
    """
    adapter = None if adapter_dir is None else str(adapter_dir)
    key = (str(model_dir), adapter, tuple(tuple(p) for p in prompts), num_tokens)
    if key not in _KNOWN:
        _KNOWN[key] = _greedy(key, drafts or [()] * len(prompts))
    return _KNOWN[key]


@torch.inference_mode()
def reference_logits(
    model_dir: Path | str,
    adapter_dir: Path | str | None,
    sequence: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits [len(sequence), vocab] fp32 of one forward pass over the sequence."""
    adapter = None if adapter_dir is None else str(adapter_dir)
    model, _ = _oracle(str(model_dir), adapter, dtype)
    return model(torch.tensor([list(sequence)])).logits[0].float()


@torch.inference_mode()
def reference_hidden(
    model_dir: Path | str, adapter_dir: Path | str | None, sequence: Sequence[int]
) -> torch.Tensor:
    """Hidden states [len(sequence), hidden] fp32 after the final norm."""
    adapter = None if adapter_dir is None else str(adapter_dir)
    model, _ = _oracle(str(model_dir), adapter, torch.float32)
    found = model(torch.tensor([list(sequence)]), output_hidden_states=True)
    return found.hidden_states[-1][0].float()


@torch.inference_mode()
def reference_experts(
    model_dir: Path | str, adapter_dir: Path | str | None, sequence: Sequence[int]
) -> torch.Tensor:
    """Experts chosen by each gate, [len(sequence), layers with experts, experts of a token], ascending."""
    model, margins = _oracle(str(model_dir), None if adapter_dir is None else str(adapter_dir), torch.float32)
    chosen: list[torch.Tensor] = []

    def note(gate: Any, _: Any, output: Any) -> None:
        scores = output[0] if isinstance(output, tuple) else output
        *_, (ranked, top_k) = _decisions(gate, scores.float(), margins.top_k)
        chosen.append(ranked.topk(top_k, dim=-1).indices.flatten(0, -2).sort(dim=-1).values)

    handles = [gate.register_forward_hook(note) for gate in margins.gates]
    model(torch.tensor([list(sequence)]))
    for handle in handles:
        handle.remove()
    return torch.stack(chosen, dim=1)


@torch.inference_mode()
def _greedy(key: _Key, drafts: Sequence[Sequence[int]]) -> Reference:
    model_dir, adapter_dir, prompts, num_tokens = key
    model, gates = _oracle(model_dir, adapter_dir, torch.float32)
    margin, gate_margin, tokens = float("inf"), float("inf"), []
    for prompt, draft in zip(prompts, drafts, strict=True):
        gates.smallest = float("inf")
        found = _proved(model, prompt, draft) if len(draft) == num_tokens else None
        if found is None:
            gates.smallest = float("inf")
            found = _decoded(model, prompt, num_tokens)
        tokens.append(found[0])
        margin, gate_margin = min(margin, found[1]), min(gate_margin, gates.smallest)
    return Reference(tuple(tokens), margin, gate_margin)


def _proved(
    model: Any, prompt: tuple[int, ...], draft: Sequence[int]
) -> tuple[tuple[int, ...], float] | None:
    """The draft and its margin if each token is the best after those before, else None."""
    starts = _starts(model, prompt, len(draft) - 1)
    logits = model(torch.tensor([[*prompt, *draft[:-1]]]), **starts).logits[0, len(prompt) - 1 :]
    best = logits.topk(2)
    tokens = tuple(best.indices[:, 0].tolist())
    return (tokens, float((best.values[:, 0] - best.values[:, 1]).min())) if tokens == tuple(draft) else None


def _decoded(model: Any, prompt: tuple[int, ...], num_tokens: int) -> tuple[tuple[int, ...], float]:
    """Tokens and margin, one step a token."""
    margin, done = float("inf"), []
    step, past = torch.tensor([prompt]), None
    while len(done) < num_tokens:
        out = model(step, past_key_values=past, use_cache=True, **_starts(model, prompt, len(done)))
        past = out.past_key_values
        best = out.logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        done.append(int(best.indices[0]))
        step = torch.tensor([done[-1:]])
    return tuple(done), margin


def _starts(model: Any, prompt: tuple[int, ...], num_more: int) -> dict[str, Any]:
    """Argument of an activated LoRA's forward pass: its start, in tokens from the end of prompt and num_more.

    The start lies in the prompt, as in peft's `generate`, also where the continuation repeats the invocation.
    """
    if not getattr(getattr(model, "active_peft_config", None), "alora_invocation_tokens", None):
        return {}
    from peft.tuners.lora.variants import calculate_alora_offsets

    [start] = calculate_alora_offsets(model.peft_config, model.active_adapter, torch.tensor([prompt]))
    return {"alora_offsets": [None if start is None else start + num_more]}


class _GateMargins:
    """Watches the expert gates of a model for close decisions."""

    def __init__(self, model: Any) -> None:
        self.smallest = float("inf")
        self._config = config = model.config
        ffn = getattr(config, "ffn_config", None)
        text = config.get_text_config()
        top_k = getattr(text, "num_experts_per_tok", 0) or getattr(text, "top_k_experts", 0)
        self.top_k = ffn.moe_top_k if ffn else top_k
        known = ("TopKRouter", "TopkRouter", "DbrxRouter", "TokenChoiceRouter", "Gemma4TextRouter")
        self.gates = [m for m in model.modules() if type(m).__name__.endswith(known)]
        assert bool(self.gates) == bool(self.top_k), "the gates of this model are not known by name"
        for gate in self.gates:
            gate.register_forward_hook(self._see)

    def _see(self, module: Any, args: Any, output: Any) -> None:
        scores = output[0] if isinstance(output, tuple) else output
        if type(module).__name__ == "Gemma4TextRouter":
            scores = scores.log()
        if scores.shape[-1] == self.top_k == _num_experts(self._config):
            return  # all experts are chosen
        assert scores.shape[-1] > self.top_k, "these are not scores of all experts"
        corrected = [(scores.sigmoid() + args[1], self.top_k)] if len(args) > 1 else None
        for ranked, num_chosen in corrected or _decisions(module, scores.float(), self.top_k):
            top = ranked.topk(num_chosen + 1, dim=-1).values
            self.smallest = min(self.smallest, float((top[..., -2] - top[..., -1]).min()))


def _num_experts(config: Any) -> int:
    return shape_of({**config.to_dict(), "dtype": "float32"}).num_experts


def _decisions(gate: Any, logits: torch.Tensor, top_k: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Scores and number of the chosen: of experts, and of groups of experts where there are groups."""
    corrected = getattr(gate, "moe_statics", None)
    if corrected is not None:
        yield corrected(logits.softmax(-1)), top_k
        return
    correction = getattr(gate, "e_score_correction_bias", None)
    in_groups = correction is not None or getattr(gate, "topk_method", "") == "group_limited_greedy"
    if not in_groups:
        yield logits, top_k
        return
    scores, num_summed = logits, 1  # in the order of their softmax
    if correction is not None:
        scores, num_summed = logits.sigmoid() + correction, 2
    num_groups, top_groups = gate.num_group, gate.topk_group
    if top_groups < num_groups:
        by_group = scores.unflatten(-1, (num_groups, -1))
        groups = by_group.topk(num_summed, dim=-1).values.sum(-1)
        yield groups, top_groups
        kept = groups >= groups.topk(top_groups, dim=-1).values[..., -1:]
        scores = by_group.masked_fill(~kept.unsqueeze(-1), -1e9).flatten(-2)
    yield scores, top_k


@lru_cache(maxsize=512)
def _oracle(model_dir: str, adapter_dir: str | None, dtype: torch.dtype) -> tuple[Any, _GateMargins]:
    """A model of its own for the adapter: peft can't hold two with different target_parameters."""
    model = load_model(model_dir, dtype)
    gates = _GateMargins(model)
    if adapter_dir is None:
        return model, gates
    from peft import PeftModel

    targets = json.loads((Path(adapter_dir) / "adapter_config.json").read_text())["target_modules"]
    with targets_as_given(model.config.model_type, targets):
        model = PeftModel.from_pretrained(model, adapter_dir)
    if model.config.model_type == "dbrx":
        model = model.merge_and_unload()  # peft's unmerged forward fails on DBRX's experts
    return model.eval(), gates
