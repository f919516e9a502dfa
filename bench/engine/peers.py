# SPDX-License-Identifier: Apache-2.0
"""transformers and peft as contestants: a cached greedy decode loop, in the best setting each has."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .engine_runs import Prompts

EXPERTS_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


def load_transformers(model_dir: Path, dtype: str) -> Any:
    """The checkpoint in transformers, sdpa attention."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()


def load_peft(base: Any, adapters: Sequence[tuple[str, str]]) -> Any:
    """A peft model with these adapters around a copy of `base` with shared weights."""
    from peft import PeftModel

    shared: dict[int, Any] = {id(weight): weight for weight in base.parameters()}
    twin = copy.deepcopy(base, shared)
    (first, path), *rest = adapters
    # Adapters stay in the model's dtype: peft's default would compute bf16 adapters in fp32.
    options: dict[str, Any] = {"autocast_adapter_dtype": False, "low_cpu_mem_usage": True}
    model = PeftModel.from_pretrained(twin, path, adapter_name=first, **options)
    for name, directory in rest:
        model.load_adapter(directory, adapter_name=name, **options)
    return model.eval()


class Decoder:
    """Greedy decode of equally long rows from a prefilled cache, anew in every call."""

    def __init__(self, model: Any, prompts: Prompts, **model_arguments: Any) -> None:
        from transformers import DynamicCache

        self._model = model
        self._arguments = model_arguments
        self._cache: Any = DynamicCache()
        self._first = self._forward(torch.tensor(prompts))
        layers: list[Any] = self._cache.layers
        self._prefilled = [(layer.keys, layer.values) for layer in layers]

    def __call__(self, num_steps: int) -> float:
        """Seconds of `num_steps` steps."""
        # Steps append by concatenation, so the prefilled tensors stay.
        for layer, (keys, values) in zip(self._cache.layers, self._prefilled, strict=True):
            layer.keys, layer.values = keys, values
        tokens = self._first
        start_s = time.perf_counter()
        for _ in range(num_steps):
            tokens = self._forward(tokens)
        return time.perf_counter() - start_s

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output = self._model(
            input_ids=tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **self._arguments
        )
        return output.logits[:, -1:].argmax(-1)


@dataclass
class GroupedDecoder:
    """peft's only way with expert adapters: adapter by adapter, with its requests as a batch."""

    model: Any
    groups: dict[str, Decoder]

    @classmethod
    def prefill(cls, model: Any, prompts: Prompts, adapters: Sequence[str]) -> GroupedDecoder:
        groups = {}
        for name in dict.fromkeys(adapters):
            model.set_adapter(name)
            rows = [prompt for prompt, adapter in zip(prompts, adapters, strict=True) if adapter == name]
            groups[name] = Decoder(model, rows)
        return cls(model, groups)

    def __call__(self, num_steps: int) -> float:
        """Seconds of `num_steps` tokens for every request; one switch per adapter."""
        start_s = time.perf_counter()
        for name, decoder in self.groups.items():
            self.model.set_adapter(name)
            decoder(num_steps)
        return time.perf_counter() - start_s


def fastest_experts(model: Any, prompts: Prompts, num_steps: int) -> str:
    """Set the fastest experts implementation for these prompts; returns its name."""
    names = list(EXPERTS_IMPLEMENTATIONS)
    if len(prompts) * model.config.num_experts_per_tok > model.config.num_local_experts:
        # It copies an expert's weights per row: gigabytes, without gain for shared experts.
        names.remove("batched_mm")
    decoder = Decoder(model, prompts)
    times = {}
    for name in names:
        model.set_experts_implementation(name)
        decoder(1)
        times[name] = min(decoder(num_steps) for _ in range(2))
    best = min(times, key=times.__getitem__)
    model.set_experts_implementation(best)
    return best


@torch.inference_mode()
def agreement(
    model: Any, prompts: Prompts, answers: Sequence[Sequence[int]], **model_arguments: Any
) -> dict[str, float]:
    """Agreement of the answers with the reference's greedy choice after the same prefix (teacher forcing).

    token_agreement: share of answer tokens equal to its argmax.  worst_logit_gap: largest gap of an answer
    token's logit below the top.
    """
    tokens = torch.tensor([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    length = len(answers[0])
    logits = model(input_ids=tokens[:, :-1], use_cache=False, **model_arguments).logits[:, -length:].float()
    chosen = logits.gather(-1, tokens[:, -length:, None])[..., 0]
    gap = logits.max(-1).values - chosen
    return {
        "num_tokens": float(gap.numel()),
        "token_agreement": (gap == 0).float().mean().item(),
        "worst_logit_gap": gap.max().item(),
    }
