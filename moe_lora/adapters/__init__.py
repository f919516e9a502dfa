"""Adapters: PEFT directories read into packed true-rank form, their store in host memory, and a registry.

Names are imported on first use, so that the package itself needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "AdapterConfig": "peft.config",
    "PackedAdapter": "packed",
    "PackedLayer": "packed",
    "RegisteredAdapter": "registry.registered",
    "Registry": "registry.registry",
    "base_model_hash": "registry.base_model",
    "pack_state_dict": "peft.reader",
    "read_adapter": "peft.reader",
    "register_adapter": "registry.publish",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
