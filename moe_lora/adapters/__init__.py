"""Adapters: PEFT directories read into packed true-rank form, and their store in host memory.

Names are imported on first use, so that the package itself needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "AdapterConfig": "config",
    "PackedAdapter": "packed",
    "PackedLayer": "packed",
    "pack_state_dict": "peft_format",
    "read_adapter": "peft_format",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
