"""The five models of InfiniLoRA's table 3, by name.

Layers, experts, top-k, LoRA rank and GPUs per instance are table 3's; the other sizes are those of the
published configurations.  Where table 3 and the published model differ, `note` says how.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A shape with the settings that table 3 serves it with.

    lora_rank: of its adapters.  instance_gpus: GPUs of one LLM instance.  note: what isn't the published
    model's, or is assumed; "" if nothing.
    """

    name: str
    shape: ModelShape
    lora_rank: int
    instance_gpus: int
    note: str = ""


def base_parameters(shape: ModelShape) -> int:
    """Weights of the base model: embedding, output head, and per layer attention, gate, MLP and two norms.

    Biases, and norms inside attention, are left out (less than 0.1 % of any model here).
    """
    heads = shape.num_heads + shape.num_kv_heads
    layer = 2 * shape.hidden_size * shape.head_dim * heads + 2 * shape.hidden_size
    layer += max(1, shape.num_experts) * 3 * shape.hidden_size * shape.intermediate_size
    layer += shape.num_experts * shape.hidden_size
    return shape.num_layers * layer + 2 * shape.vocab_size * shape.hidden_size


def known_model(name: str) -> KnownModel:
    """The model of that name, in any case.  Raises ConfigError with the known names."""
    for model in KNOWN_MODELS:
        if model.name.lower() == name.lower():
            return model
    raise ConfigError(
        f"model {name!r} is neither a folder with a config.json nor a known name; "
        f"known are {', '.join(model.name for model in KNOWN_MODELS)}"
    )


def _model(
    name: str,
    family: str,
    sizes: tuple[int, int, int],
    experts: tuple[int, int],
    heads: tuple[int, int, int],
    tokens: tuple[int, int],
    served: tuple[int, int],
    note: str = "",
) -> KnownModel:
    """sizes: layers, hidden, expert hidden.  experts: number, top-k.  heads: query, KV, head size.

    tokens: vocabulary, longest context.  served: LoRA rank, GPUs per instance.
    """
    shape = ModelShape(
        family=family,
        num_layers=sizes[0],
        hidden_size=sizes[1],
        intermediate_size=sizes[2],
        num_experts=experts[0],
        num_experts_per_token=experts[1],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        vocab_size=tokens[0],
        max_position=tokens[1],
        dtype_bytes=2,
    )
    return KnownModel(name=name, shape=shape, lora_rank=served[0], instance_gpus=served[1], note=note)


KNOWN_MODELS: tuple[KnownModel, ...] = (
    _model(
        "GPT-OSS-20B",
        "gpt_oss",
        (32, 2880, 2880),
        (32, 4),
        (64, 8, 64),
        (201088, 131072),
        (64, 1),
        "32 layers as in table 3; the published model has 24. Weights count as bf16, not as its MXFP4",
    ),
    _model(
        "Qwen3-30B-A3B",
        "qwen3_moe",
        (48, 2048, 768),
        (128, 8),
        (32, 4, 128),
        (151936, 40960),
        (32, 2),
    ),
    _model(
        "Mixtral-8x7B",
        "mixtral",
        (32, 4096, 14336),
        (8, 2),
        (32, 8, 128),
        (32000, 32768),
        (64, 2),
    ),
    _model(
        "Scaled-MoE",
        "mixtral",
        (18, 8192, 8192),
        (32, 4),
        (64, 8, 128),
        (32000, 32768),
        (64, 4),
        "18 layers as in table 3; MegaScale-Infer (arXiv 2504.02263) has 48, 317 B parameters. Hidden sizes "
        "8192 are its; heads, vocabulary and context are assumed, and make 317 B with 48 layers",
    ),
    _model(
        "DBRX",
        "dbrx",
        (40, 6144, 10752),
        (16, 4),
        (48, 8, 128),
        (100352, 32768),
        (64, 4),
    ),
)
