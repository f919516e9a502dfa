# SPDX-License-Identifier: Apache-2.0
"""PEFT's files with the names, shapes and config of mlx-lm, by its published rule."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from moe_lora.adapters.peft.files import CONFIG_FILE, MLX_FILE, WEIGHTS_FILE

_PARTS = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "lora_magnitude_vector": "m"}
_STACKED = re.compile(r"mlp\.experts\.(\w+_proj)$")
_EXPERTS = {
    "mixtral": "block_sparse_moe.switch_mlp",
    "minimax_m2": "block_sparse_moe.switch_mlp",
    "afmoe": "mlp.experts",
    "gpt_oss": "mlp.experts",
}
TRAINING = {
    "train": True,
    "data": "data",
    "optimizer": "adam",
    "optimizer_config": {"adam": {}},
    "mask_prompt": False,
    "iters": 600,
    "report_to": None,
}
"""Fields that mlx-lm writes beside."""


def as_mlx(plain: Path, folder: Path, family: str = "", tensors: Any = None, **fields: Any) -> Path:
    """A copy of PEFT's folder; tensors: by PEFT's names with stacked experts, None: the folder's.

    fields: of the config.
    """
    config = json.loads((plain / CONFIG_FILE).read_text())
    found = {}
    for key, tensor in (load_file(plain / WEIGHTS_FILE) if tensors is None else tensors).items():
        part = next(part for part in _PARTS if key.endswith(f".{part}"))
        module = key.removeprefix("base_model.model.").removesuffix(f".{part}")
        module = _STACKED.sub(rf"{_EXPERTS.get(family, 'mlp.switch_mlp')}.\1", module)
        if family in _EXPERTS and "switch" in _EXPERTS[family] and module.endswith(".mlp.gate"):
            module = module.replace(".mlp.gate", ".block_sparse_moe.gate")
        found[f"{module}.{_PARTS[part]}"] = (tensor.T if tensor.dim() == 2 else tensor).contiguous()
    made = {
        **TRAINING,
        "fine_tune_type": "dora" if config.get("use_dora") else "lora",
        "model": config["base_model_name_or_path"],
        "num_layers": -1,
        "lora_parameters": {
            "rank": config["r"],
            "scale": config["lora_alpha"] / config["r"],
            "dropout": 0.0,
        },
        **fields,
    }
    return written(folder, found, made)


def written(folder: Path, tensors: Any, fields: Any) -> Path:
    """A folder of mlx-lm, with a checkpoint of an earlier step."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / MLX_FILE)
    (folder / "0000100_adapters.safetensors").write_bytes(b"an earlier step")
    (folder / CONFIG_FILE).write_text(json.dumps(fields))
    return folder
