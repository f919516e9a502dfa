# SPDX-License-Identifier: Apache-2.0
"""The sampling defaults of a checkpoint: generation_config.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from moe_lora.core.errors import ConfigError
from moe_lora.core.request import SamplingParams

from .tokenizer_files import read_json

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
DEFAULTED = ("temperature", "top_p", "top_k", "min_p")
"""Fields that become defaults of requests."""
NEUTRAL: dict[str, Any] = {
    "diversity_penalty": 0,
    "do_sample": True,
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
    "length_penalty": 1,
    "max_length": 20,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "typical_p": 1,
}
"""Values of other fields without an effect; for further fields: null, false, 0 and empty values."""
NO_EFFECT = frozenset(
    {
        "_from_model_config",
        "bos_token_id",
        "cache_implementation",
        "decoder_start_token_id",
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    }
)
"""Fields without an effect on sampled tokens.  `read_eos_token_ids` reads the end tokens."""


def read_sampling_defaults(model_dir: str | Path) -> dict[str, int | float]:
    """The `DEFAULTED` fields of the checkpoint's generation_config.json, as `SamplingParams` takes them.

    Raises ConfigError for a value out of range.
    """
    path = Path(model_dir) / FILE
    entries = read_json(path)
    return {name: _checked(name, entries[name], path) for name in DEFAULTED if entries.get(name) is not None}


def unused_fields(model_dir: str | Path) -> dict[str, Any]:
    """Fields of generation_config.json that change tokens but have no effect here."""
    return {name: value for name, value in read_json(Path(model_dir) / FILE).items() if _asks(name, value)}


def log_generation_config(model_dir: str | Path) -> None:
    """Log the defaults of requests, and the fields without an effect."""
    if defaults := read_sampling_defaults(model_dir):
        logger.info("generation_config.json: where a request is silent, %s", _listed(defaults))
    if unused := unused_fields(model_dir):
        logger.warning("generation_config.json: no effect here: %s", _listed(unused))


def _listed(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in fields.items())


def _asks(name: str, value: Any) -> bool:
    if name in DEFAULTED or name in NO_EFFECT:
        return False
    return value not in (None, NEUTRAL[name]) if name in NEUTRAL else bool(value)


def _checked(name: str, value: Any, path: Path) -> int | float:
    advice = "mend the file, or start with --generation-config none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{path}: {name}={value!r} must be a number; {advice}")
    if name == "top_k":
        if isinstance(value, float) and not value.is_integer():
            raise ConfigError(f"{path}: top_k={value!r} must be a whole number; {advice}")
        value = 0 if value == -1 else int(value)
    try:
        SamplingParams(**{name: value})
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; {advice}") from error
    return value
