"""Which base model lies in a folder, told without reading its gigabytes, and whether an adapter is of it."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from moe_lora.adapters.peft.config import AdapterConfig
from moe_lora.core.errors import AdapterError, ConfigError
from moe_lora.core.shape import ModelShape

NUM_SAMPLES = 64
SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100_000_000
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")
_SAME_BASE = (
    *("family", "num_layers", "hidden_size", "intermediate_size", "num_experts"),
    *("num_heads", "num_kv_heads", "head_dim"),
)


def base_model_hash(model_dir: str | Path) -> str:
    """sha256 over config.json and, of each *.safetensors file by name, its header and samples of its data.

    config.json counts by content, without the name of its folder and the version that wrote it; a header
    without its free text.  Of the data 64 evenly spaced blocks of 4 KiB count, so that a further trained
    model of the same sizes has another hash.  Raises ConfigError if anything can't be read.
    """
    folder = Path(model_dir)
    digest = hashlib.sha256()
    _add(digest, _config_content(folder / "config.json"))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} has no *.safetensors file; a registry tells base models apart by their weights, "
            "so they must lie there also for a front end of its own"
        )
    for path in files:
        try:
            with path.open("rb") as file:
                _add(digest, path.name.encode())
                _add_tensors(digest, file, path)
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    return digest.hexdigest()


def model_shape(model_dir: str | Path) -> ModelShape:
    """Sizes of the base model in a folder.  Raises ConfigError."""
    path = Path(model_dir) / "config.json"
    try:
        return ModelShape.from_hf_config(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_dir}: {error}") from error


def check_base(config: AdapterConfig, shape: ModelShape) -> None:
    """Raises AdapterError for an adapter whose base model lies here and has other sizes."""
    if config.base_model is None:
        return
    base_config = os.path.join(config.base_model, "config.json")
    if not os.path.isfile(base_config):
        return
    key = f"{config.where}: base_model_name_or_path={config.base_model!r}"
    try:
        base = ModelShape.from_hf_config(json.loads(Path(base_config).read_text(encoding="utf-8")))
    except (ValueError, OSError, RecursionError) as error:
        raise AdapterError(f"{key} is not a model that can be compared with the base ({error})") from error
    for field in _SAME_BASE:
        if getattr(base, field) != getattr(shape, field):
            raise AdapterError(
                f"{key} has {field}={getattr(base, field)}, the base model served has "
                f"{getattr(shape, field)}; serve the adapter with the base it was trained for"
            )


def _config_content(path: Path) -> bytes:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; give a folder of a base model") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a JSON object, found {type(content).__name__}")
    return _canonical({key: value for key, value in content.items() if key not in _NOT_THE_MODEL})


def _add_tensors(digest: Any, file: BinaryIO, path: Path) -> None:
    """Header (8 bytes of length, then JSON) and samples of the data behind it."""
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 0 < length <= _MAX_HEADER_BYTES:
        raise ConfigError(f"{path}: not a safetensors file; copy it again")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: its safetensors header can't be read; copy it again") from error
    _add(digest, _canonical(header))
    first, end = 8 + length, path.stat().st_size
    _add(digest, str(end - first).encode())
    for number in range(NUM_SAMPLES):
        file.seek(first + max(0, end - first - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
        digest.update(file.read(SAMPLE_BYTES))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _add(digest: Any, part: bytes) -> None:
    """Parts are told apart by their lengths."""
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)
