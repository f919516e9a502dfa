# SPDX-License-Identifier: Apache-2.0
"""Reading the config.json of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .wrong_files import other_content, pointer_problem


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

    Raises ConfigError, with the file's kind if known, if the file is not JSON.
    """
    content = path.read_bytes()
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        if problem := pointer_problem(path, content):
            raise ConfigError(problem) from error
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def _instead(model_dir: Path) -> str:
    if (model_dir / "adapter_config.json").is_file():
        return "; this one is of an adapter: give its base model, and the adapter by --lora-modules"
    found = other_content(model_dir)
    return f"; {found}" if found else ""
