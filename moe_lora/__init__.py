# SPDX-License-Identifier: Apache-2.0
"""Serve many LoRA adapters over one Mixture-of-Experts model.

Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "moe_lora.api",
    "AsyncLLM": "moe_lora.api",
    "Completion": "moe_lora.api",
    "EngineConfig": "moe_lora.config",
    "GenerationError": "moe_lora.core.errors",
    "SamplingParams": "moe_lora.core.request",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "EngineConfig",
    "GenerationError",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
