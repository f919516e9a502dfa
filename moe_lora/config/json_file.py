# SPDX-License-Identifier: Apache-2.0
"""JSON files that users give: what may stand in them is a type, and errors name file, field and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from moe_lora.config.settings import check_names
from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import without_twins

Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]


class FileContent(BaseModel):
    """An object in a file; a field that it does not know is an error."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, given: Any) -> Any:
        if isinstance(given, dict):
            check_names("", given, cls.model_fields)
        return given


def read_object(path: str | Path, writer: str) -> dict[str, Any]:
    """The JSON object in a file.  writer: the command that writes such a file, for who has none.

    Raises ConfigError naming the file.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=without_twins)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; `{writer}` writes one") from error
    except ValueError as error:  # no JSON, or no UTF-8
        raise ConfigError(f"{path}: not a JSON object ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: the file must be a JSON object, not {type(found).__name__}")
    return found


def checked(path: str | Path, kind: Any, given: Any) -> Any:
    """What was read from the file as that type.  Raises ConfigError naming file, field, value and limit."""
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        value = "" if first["type"] in ("missing", "value_error") else f"={str(first['input'])[:80]}"
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}: {place}{value}: {said}") from error
