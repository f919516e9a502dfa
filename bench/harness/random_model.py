# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints, Mixtral-like or (without experts) Llama-like, and PEFT adapters, written to a folder.

Legend: H hidden size, F expert inner size, E experts, R LoRA rank.

Weights have variance 1 / fan-in, so that activations neither die nor explode and top logits are apart; B of
the adapters is small beside the base.  Stored as bf16, drawn from a seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

RANKS = (8, 16, 32, 64)
"""LoRA ranks of the adapters, in turn."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a Mixtral-like model; `intermediate_size` is of one expert.  num_experts 0: a Llama."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_experts: int
    num_experts_per_token: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def num_parameters(self) -> int:
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = 2 * hidden * self.head_dim * (self.num_heads + self.num_kv_heads)
        experts = self.num_experts * (3 * hidden * inner + hidden) if self.num_experts else 3 * hidden * inner
        return self.num_layers * (attention + experts + 2 * hidden) + hidden * (2 * self.vocab_size + 1)

    def describe(self) -> dict[str, int]:
        return {**asdict(self), "num_parameters": self.num_parameters}


FULL = ModelSize(
    hidden_size=1024,
    intermediate_size=2048,
    num_layers=8,
    num_experts=8,
    num_experts_per_token=2,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=8192,
)
QUICK = ModelSize(
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_experts=8,
    num_experts_per_token=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=2048,
)
TINY = ModelSize(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_experts=4,
    num_experts_per_token=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
)


def write_model(path: Path, size: ModelSize, seed: int = 0) -> Path:
    """Write config.json and model.safetensors of a random model; returns the folder."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in _weights(size):
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            fan_in = 1 if "embed" in name else shape[-1]
            tensors[name] = _noise(shape, fan_in**-0.5, generator)
    write_config(path, size)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_config(path: Path, size: ModelSize) -> None:
    """Write config.json alone."""
    from transformers import LlamaConfig, MixtralConfig

    experts = {
        "num_local_experts": size.num_experts,
        "num_experts_per_tok": size.num_experts_per_token,
        "architectures": ["MixtralForCausalLM"],
    }
    make = MixtralConfig if size.num_experts else LlamaConfig
    config = make(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
        **(experts if size.num_experts else {"architectures": ["LlamaForCausalLM"]}),
    )
    config.save_pretrained(path)


def write_adapter(
    path: Path,
    size: ModelSize,
    model_dir: Path,
    lora_rank: int,
    *,
    experts: bool,
    seed: int,
    attention: Sequence[str] = ATTENTION,
) -> Path:
    """Write a PEFT adapter on modules of attention, on the experts (`target_parameters`), or on both; its
    folder."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    config = LoraConfig(
        r=lora_rank,
        lora_alpha=2 * lora_rank,
        target_modules=list(attention),
        target_parameters=list(_EXPERTS) if experts else None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(model_dir),
        inference_mode=True,
    )
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for prefix, rows, d_in, d_out in _lora_pairs(size, lora_rank, experts, attention):
        tensors[f"{prefix}.lora_A.weight"] = _noise((rows, d_in), d_in**-0.5, generator)
        tensors[f"{prefix}.lora_B.weight"] = _noise((d_out, rows), 0.2 * lora_rank**-0.5, generator)
    config.save_pretrained(str(path))
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def write_adapters(
    folder: Path, size: ModelSize, model_dir: Path, num_adapters: int, *, experts: bool
) -> tuple[tuple[str, str], ...]:
    """(name, directory) of `num_adapters` adapters with ranks from `RANKS` in turn."""
    kind = "all" if experts else "attention"
    named = []
    for i in range(num_adapters):
        name = f"{kind}-{i}"
        path = write_adapter(
            folder / name, size, model_dir, RANKS[i % len(RANKS)], experts=experts, seed=1000 * experts + i
        )
        named.append((name, str(path)))
    return tuple(named)


def _noise(shape: tuple[int, ...], std: float, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator).bfloat16()


def _weights(size: ModelSize) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = size.hidden_size, size.intermediate_size
    yield "model.embed_tokens.weight", (size.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (size.vocab_size, hidden)
    for layer in range(size.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for name, (d_in, d_out) in _attention_sizes(size).items():
            yield f"{prefix}.self_attn.{name}.weight", (d_out, d_in)
        if not size.num_experts:
            yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
            yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
            yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
            continue
        moe = f"{prefix}.block_sparse_moe"
        yield f"{moe}.gate.weight", (size.num_experts, hidden)
        for expert in range(size.num_experts):
            yield f"{moe}.experts.{expert}.w1.weight", (inner, hidden)
            yield f"{moe}.experts.{expert}.w3.weight", (inner, hidden)
            yield f"{moe}.experts.{expert}.w2.weight", (hidden, inner)


def _attention_sizes(size: ModelSize) -> dict[str, tuple[int, int]]:
    """(in, out) of each attention projection."""
    hidden, q_size, kv_size = (
        size.hidden_size,
        size.num_heads * size.head_dim,
        size.num_kv_heads * size.head_dim,
    )
    sizes: tuple[tuple[int, int], ...] = (
        (hidden, q_size),
        (hidden, kv_size),
        (hidden, kv_size),
        (q_size, hidden),
    )
    return dict(zip(ATTENTION, sizes, strict=True))


def _lora_pairs(
    size: ModelSize, lora_rank: int, experts: bool, attention: Sequence[str]
) -> Iterator[tuple[str, int, int, int]]:
    """(key, rows of A, in, out) of each pair; the experts of a layer share one pair of R * E rows."""
    hidden, inner, rows = size.hidden_size, size.intermediate_size, lora_rank * size.num_experts
    for layer in range(size.num_layers):
        prefix = f"base_model.model.model.layers.{layer}"
        sizes = _attention_sizes(size)
        for name in attention:
            d_in, d_out = sizes[name]
            yield f"{prefix}.self_attn.{name}", lora_rank, d_in, d_out
        if experts:
            yield f"{prefix}.mlp.experts.base_layer", rows, hidden, 2 * inner
            yield f"{prefix}.mlp.experts", rows, inner, hidden
