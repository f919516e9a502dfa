"""Adapters of stated ranks with random values, for timing.

Legend: N copies of a matrix, R LoRA rank.
"""

from __future__ import annotations

import torch

from moe_lora.adapters.packed import PackedAdapter, Pair, assemble, pack_layer
from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import DEFAULT_TARGETS, MAX_LORA_RANK, ModelShape, Site

_STD = 0.02


def random_adapter(
    shape: ModelShape,
    dtype: torch.dtype,
    name: str,
    lora_rank: int,
    *,
    seed: int,
    targets: tuple[str, ...] = DEFAULT_TARGETS,
) -> PackedAdapter:
    """An adapter on whole sites; its layers have the same values.  Raises ConfigError for a bad rank."""
    if not 1 <= lora_rank <= MAX_LORA_RANK:
        raise ConfigError(f"lora_rank={lora_rank} must lie between 1 and {MAX_LORA_RANK}")
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        _pair(site, module, lora_rank, generator)
        for site in (shape.site(target) for target in targets)
        for module in range(len(site.modules))
    ]
    layer = pack_layer(pairs, shape, dtype, name)
    return assemble(name, [layer] * shape.num_layers, shape)


def _pair(site: Site, module: int, lora_rank: int, generator: torch.Generator) -> Pair:
    num_copies = max(1, site.num_experts)

    def matrices(width: int) -> torch.Tensor:
        return torch.randn(num_copies, lora_rank, width, generator=generator) * _STD

    return Pair(
        site=site,
        modules=(module,),
        experts=range(num_copies),
        shrink=matrices(site.in_features),
        expands=(matrices(site.out_features[module]),),
        scale=1.0,
        source="random",
    )
