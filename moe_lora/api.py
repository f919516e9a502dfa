# SPDX-License-Identifier: Apache-2.0
"""Exports of the library: `from moe_lora import LLM`."""

from __future__ import annotations

from moe_lora.adapters.registry.register import register_adapter
from moe_lora.adapters.registry.registry import Registry
from moe_lora.core.errors import GenerationError
from moe_lora.core.request import SamplingParams
from moe_lora.engine.llm import LLM, AsyncLLM, Completion

from .config import EngineConfig

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "EngineConfig",
    "GenerationError",
    "Registry",
    "SamplingParams",
    "register_adapter",
]
