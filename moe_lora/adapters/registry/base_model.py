# SPDX-License-Identifier: Apache-2.0
"""Identity of the base model in a folder, without reading all its bytes."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape
from moe_lora.core.wrong_files import header_of, read_json_file
from moe_lora.families import shape_of

NUM_SAMPLES = 64
SAMPLE_BYTES = 4096
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")


def base_model_hash(model_dir: str | Path) -> str:
    """sha256 over config.json and, of each *.safetensors file by name, its header and samples of its data.

    config.json counts without folder name and transformers version; headers without free text.  64 evenly
    spaced 4 KiB blocks of data tell a further trained model.  Raises ConfigError for unreadable files.
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
        return shape_of(read_json_file(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_dir}: {error}") from error


def _config_content(path: Path) -> bytes:
    try:
        content = read_json_file(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; give a folder of a base model") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a JSON object, found {type(content).__name__}")
    return _canonical({key: value for key, value in content.items() if key not in _NOT_THE_MODEL})


def _add_tensors(digest: Any, file: BinaryIO, path: Path) -> None:
    """Header (8 bytes of length, then JSON) and samples of the data."""
    try:
        header, first = header_of(file)
    except ValueError as error:
        raise ConfigError(
            f"{path}: not a safetensors file, its header can't be read ({error}); download the file again"
        ) from error
    _add(digest, _canonical(header))
    end = path.stat().st_size
    _add(digest, str(end - first).encode())
    for number in range(NUM_SAMPLES):
        file.seek(first + max(0, end - first - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
        digest.update(file.read(SAMPLE_BYTES))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _add(digest: Any, part: bytes) -> None:
    """Adds the length too, to separate parts."""
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)
