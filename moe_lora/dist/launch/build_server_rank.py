"""From a start message to a LoRA Server rank."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from moe_lora.core.hf_config import read_config
from moe_lora.core.shape import ModelShape
from moe_lora.dist.lora_server.server.server_rank import RankConfig, ServerRank
from moe_lora.engine.ranks.rank import DTYPES, resolved

from .host_roles import StartRank


def build_rank(start: StartRank) -> ServerRank:
    """The `ServerRank` that a start message describes."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    hf_config = read_config(Path(start.config.model_dir))
    config = resolved(start.config, hf_config)
    assert config.lora_server is not None
    profile = config.emulation.step_profile
    return ServerRank(
        RankConfig(
            server=config.lora_server,
            shape=ModelShape.from_hf_config(hf_config),
            dtype=DTYPES[config.dtype],
            device=torch.device(config.device),
            server_rank=start.server_rank,
            expert_parallel=config.expert_parallel,
            starvation_s=config.starvation_s,
            lora_kernel=config.lora_kernel,
            adapters=config.adapters,
            lora_time=None if profile is None else profile.lora,
        )
    )
