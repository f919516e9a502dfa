# SPDX-License-Identifier: Apache-2.0
"""Converts a training loop's PEFT objects and state dicts to the form of an adapter's files.

Imports neither torch nor peft.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape

from .base import EMBEDDING, resized
from .names import without_wrappers
from .places import Shaped

_BASE_WEIGHT = re.compile(r"(?:base_model\.model\.)?(?:model|transformer|lm_head)\.")
_TRAINED = ("lora_", "modules_to_save", "trainable_tokens_delta")

Tensor = TypeVar("Tensor", bound=Shaped)


def config_fields(config: Any, where: str) -> dict[str, Any]:
    """The fields of adapter_config.json.

    config: these fields, PEFT's LoraConfig, or the `peft_config` of a PEFT model with one adapter.  Raises
    AdapterError with `where` for anything else.
    """
    if isinstance(config, Mapping) and config and all(map(_is_peft_config, config.values())):
        if len(config) > 1:
            raise AdapterError(
                f"{where}: the configs of {len(config)} adapters ({', '.join(map(str, config))}); "
                "give one of them, such as model.peft_config['default']"
            )
        [config] = config.values()
    if _is_peft_config(config):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise AdapterError(
            f"{where}: expected the fields of adapter_config.json or a PEFT LoraConfig, "
            f"found {type(config).__name__}"
        )
    return {key: _plain(value) for key, value in config.items()}


def lora_tensors(state_dict: Mapping[str, Tensor], shape: ModelShape, where: str) -> dict[str, Tensor]:
    """The adapter's tensors of a state dict, possibly of the whole PEFT model.

    Leaves out base weights, as PEFT's saving does; the config names trained base weights and is refused.
    Raises AdapterError for embeddings of another size than the base's.
    """
    wrapped = any(
        ".base_layer." in key and not EMBEDDING.fullmatch(key) and not _is_trained(key) for key in state_dict
    )
    if not wrapped:
        return dict(state_dict)
    for key, tensor in state_dict.items():
        if EMBEDDING.fullmatch(key) and tensor.shape[0] != shape.vocab_size:
            raise resized(key, tensor, shape, where)
    return {
        key: tensor
        for key, tensor in state_dict.items()
        if _is_trained(key) or not _BASE_WEIGHT.match(without_wrappers(key))
    }


def _is_trained(key: str) -> bool:
    return any(mark in key for mark in _TRAINED)


def _is_peft_config(value: Any) -> bool:
    return hasattr(value, "peft_type") and callable(getattr(value, "to_dict", None))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    return value
