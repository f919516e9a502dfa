"""From a start message to a LoRA Server rank."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from moe_lora.core.hf_config import read_config
from moe_lora.core.shape import ModelShape
from moe_lora.dist.lora_server.rank import RankConfig, ServerRank
from moe_lora.engine.rank import choose_device, choose_dtype

from .ranks import StartRank


def build_rank(start: StartRank) -> ServerRank:
    """The `ServerRank` that a start message describes."""
    config = start.config
    assert config.lora_server is not None
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    hf_config = read_config(Path(config.model_dir))
    return ServerRank(
        RankConfig(
            server=config.lora_server,
            shape=ModelShape.from_hf_config(hf_config),
            dtype=choose_dtype(config.dtype, hf_config),
            device=choose_device(config.device),
            server_rank=start.server_rank,
            expert_parallel=config.expert_parallel,
            starvation_s=config.starvation_s,
            lora_kernel=config.lora_kernel,
            adapters=config.adapters,
        )
    )
