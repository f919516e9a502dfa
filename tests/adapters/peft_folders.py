# SPDX-License-Identifier: Apache-2.0
"""Small PEFT folders for tests of files, not of what they compute; made without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE

BASE, OTHER_BASE = "b" * 64, "c" * 64


def peft_folder(folder: Path, content: int, *, lora_rank: int = 2, **fields: Any) -> Path:
    """A folder whose files depend on `content`.  fields: further ones of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": lora_rank, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj"]}
    (folder / CONFIG_FILE).write_text(json.dumps(config | fields))
    weights = np.full((lora_rank, 8), content, dtype=np.float32)
    save_file({"base_model.model.q_proj.lora_A.weight": weights}, folder / WEIGHTS_FILE)
    return folder


def alter(path: Path, place: int = -1) -> None:
    """Flip a bit of the last byte, or of another one, keeping the length."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
