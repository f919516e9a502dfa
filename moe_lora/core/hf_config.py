# SPDX-License-Identifier: Apache-2.0
"""Reading the sizes out of a Hugging Face config.json, in the old and the new spellings of its keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .wrong_files import other_content, pointer_problem

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MISSING = object()


def read_config(model_dir: Path) -> dict[str, Any]:
    """The checkpoint's config.json.  Raises ConfigError if the file is missing or not JSON."""
    path = model_dir / "config.json"
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist; give the directory of a Hugging Face checkpoint{_instead(model_dir)}"
        )
    return read_json_file(path)


def read_json_file(path: Path) -> Any:
    """Content of a JSON file of a checkpoint.

    Raises ConfigError, with the kind of the file where it is known, if the file is not JSON.
    """
    content = path.read_bytes()
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        if problem := pointer_problem(path, content):
            raise ConfigError(problem) from error
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def _instead(model_dir: Path) -> str:
    """What a folder without config.json holds, as the end of an error."""
    if (model_dir / "adapter_config.json").is_file():
        return "; this one is of an adapter: give its base model, and the adapter by --lora-modules"
    found = other_content(model_dir)
    return f"; {found}" if found else ""


def cut_to(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The config.json of the same model with its first layers only.  Raises ConfigError if it has fewer."""
    key = "num_hidden_layers" if "num_hidden_layers" in config else "n_layers"
    known = _size(config, "num_hidden_layers", "n_layers")
    if num_layers > known:
        raise ConfigError(
            f"num_layers={num_layers} is more than the model's {known}; lower it or leave it out"
        )
    cut = {**config, key: num_layers}
    if config.get("layer_types"):
        cut["layer_types"] = config["layer_types"][:num_layers]
    return cut


FAMILIES = ("llama", "mixtral", "qwen3_moe", "gpt_oss", "dbrx")


def shape_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `ModelShape` for this config.json.

    Raises ConfigError for an unsupported model_type or option, or a missing key.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"config.json must be a JSON object, found {type(config).__name__}")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"model_type={family!r} is not supported; supported are {', '.join(FAMILIES)}")
    hidden_size = _size(config, "hidden_size", "d_model")
    num_heads = _size(config, "num_attention_heads", "n_heads")
    return {
        "family": family,
        "dtype_bytes": _dtype_bytes(config),
        "num_layers": _size(config, "num_hidden_layers", "n_layers"),
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": _size(config, "num_key_value_heads", "attn_config.kv_n_heads", default=num_heads),
        "head_dim": _size(config, "head_dim", default=hidden_size // num_heads),
        "vocab_size": _size(config, "vocab_size"),
        "max_position": _size(config, "max_position_embeddings", "max_seq_len"),
        **(_dense(config) if family == "llama" else _experts(config, family)),
    }


def _get(config: Mapping[str, Any], *names: str, default: Any = _MISSING) -> Any:
    """Value of the first of these keys that is present and not null; a dot walks into a section."""
    for name in names:
        value: Any = config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    if default is _MISSING:
        raise ConfigError(f"config.json has no {' or '.join(names)}, which model_type needs")
    return default


def _size(config: Mapping[str, Any], *names: str, default: Any = _MISSING) -> int:
    """As `_get`, for a whole number of 1 or more."""
    value = _get(config, *names, default=default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {names[0]}={value!r} must be an integer of 1 or more")
    return value


def _dtype_bytes(config: Mapping[str, Any]) -> int:
    name = str(_get(config, "dtype", "torch_dtype", default="bfloat16")).removeprefix("torch.")
    if name not in _DTYPE_BYTES:
        raise ConfigError(f"dtype={name!r} is not supported; use one of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[name]


def _dense(config: Mapping[str, Any]) -> dict[str, int]:
    inner = _size(config, "intermediate_size")
    return {"intermediate_size": inner, "num_experts": 0, "num_experts_per_token": 0}


def _experts(config: Mapping[str, Any], family: str) -> dict[str, int]:
    inner: tuple[str, ...] = ("moe_intermediate_size", "intermediate_size", "ffn_config.ffn_hidden_size")
    if family == "qwen3_moe":
        inner = inner[:1]  # the other is that of dense layers
        dense = _get(config, "mlp_only_layers", default=[])
        if dense or _get(config, "decoder_sparse_step", default=1) != 1:
            raise ConfigError(
                "config.json makes some layers dense (mlp_only_layers or decoder_sparse_step); "
                "only Qwen3-MoE models whose every layer has experts are supported"
            )
    return {
        "intermediate_size": _size(config, *inner),
        "num_experts": _size(config, "num_local_experts", "num_experts", "ffn_config.moe_num_experts"),
        "num_experts_per_token": _size(
            config, "num_experts_per_tok", "experts_per_token", "ffn_config.moe_top_k"
        ),
    }
