# SPDX-License-Identifier: Apache-2.0
"""POST /v2/embed: embeddings in Cohere's form."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from fastapi import Request
from pydantic import Field, PrivateAttr, model_validator
from starlette.responses import Response

from moe_lora.engine.text.tokenizer_files import read_json
from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request, to_json

from .embedding import EmbeddingFormat, version_of
from .embedding import Endpoints as EmbeddingEndpoints
from .endpoints import while_connected
from .fields import FieldError, check_unknown
from .generation import Delta, Generation
from .prompt_bodies import EmbeddingRequest
from .prompt_side import in_slices

if TYPE_CHECKING:
    from pathlib import Path

    from moe_lora.engine.text.text import Tokenizer

NAMES = {"input": "texts", "dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}
"""Own field -> Cohere's field."""
_NO_TEXTS = ("images", "inputs")
_SIDES = {"END": "right", "START": "left"}


class CohereRequest(EmbeddingRequest):
    """A body of /v2/embed.  input_type: names the texts' prefix."""

    embedding_types: Annotated[
        list[Literal["float", "base64", "binary", "ubinary"]] | None, Field(max_length=4)
    ] = None
    input_type: str | None = None
    _given: Any = PrivateAttr(None)

    @property
    def given(self) -> Any:
        return self._given

    def texts(self, tokenizer: Tokenizer | None) -> list[str | list[int]]:
        """Prompts with their prefix.  Raises ApiError."""
        found, self._given = super().texts(tokenizer), self.input
        if self.input_type is None:
            return found
        prefix = _prefix(self.input_type, None if tokenizer is None else tokenizer.folder)
        if self.messages is not None or not all(isinstance(one, str) for one in found):
            raise bad_request("input_type needs texts; leave it out", "input_type")
        return [f"{prefix}{one}" for one in found]

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in _NO_TEXTS:
            if data.get(name) is not None:
                raise FieldError(name, f"{name} is not supported; send texts")
        found = {**data, **{name: data.get(given) for name, given in NAMES.items()}}
        for name in (*NAMES.values(), *_NO_TEXTS, "truncate"):
            found.pop(name, None)
        side = data.get("truncate", "END")
        if side not in ("NONE", *_SIDES):
            raise FieldError("truncate", f'truncate={side!r:.40} must be "NONE", "START" or "END"')
        if side in _SIDES:
            found["truncation_side"] = _SIDES[side]
            found["truncate_prompt_tokens"] = -1 if data.get("max_tokens") is None else data["max_tokens"]
        check_unknown(found, cls.model_fields)
        return found


def _prefix(input_type: str, folder: Path | None) -> str:
    """The model's prefix for the type.  Raises ApiError."""
    known: Any = None
    if folder is not None:
        known = read_json(folder / "config.json").get("task_instructions")
        known = known or read_json(folder / "config_sentence_transformers.json").get("prompts")
    known = known if isinstance(known, dict) else {}
    if not isinstance(known.get(input_type), str):
        names = ", ".join(sorted(known))
        way_out = f"send one of {names}" if names else "the model's folder names no prefixes; leave it out"
        raise bad_request(f"Unsupported input_type {input_type[:64]!r}: {way_out}", "input_type")
    return str(known[input_type])


class CohereFormat(EmbeddingFormat):
    """Lists of vectors by type."""

    _body: CohereRequest

    async def respond(
        self, request: Request, generation: Generation, head: dict[str, Any], headers: dict[str, str]
    ) -> Response:
        whole = await while_connected(request, generation.whole())
        num_tokens = sum(map(len, generation.prompts))
        answered = {
            "id": head["id"],
            "response_type": "embeddings_by_type",
            "embeddings": await in_slices(self._by_type(whole)),
            "texts": self._body.given,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": num_tokens, "image_tokens": 0},
            },
        }
        if versions := [one for delta in whole for one in version_of(delta).values()]:
            answered["meta"]["adapter_versions"] = versions
        return JsonResponse(answered, headers=headers)

    def _by_type(self, whole: Sequence[Delta]) -> Iterator[bytes]:
        opening = b"{"
        for kind in dict.fromkeys(self._body.embedding_types or ["float"]):
            yield opening + b'"%s":' % kind.encode()
            start = b"["
            for delta in whole:
                yield start + to_json(_shown(self._values(delta), kind))
                start = b","
            yield b"]"
            opening = b","
        yield b"}"


def _shown(values: np.ndarray[Any, Any], kind: str) -> Any:
    """The vector as JSON.  ubinary: eight signs a byte, the first highest; binary: minus 128."""
    if kind == "float":
        return values.tolist()
    if kind == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode()
    signs = np.packbits(values >= 0).astype(int)
    return (signs - 128 if kind == "binary" else signs).tolist()


class Endpoints(EmbeddingEndpoints):
    """Endpoint of one front end."""

    async def embed(self, request: Request) -> Response:
        """Errors name fields as Cohere does."""
        try:
            return await self._answer(request, CohereFormat, CohereRequest)
        except ApiError as error:
            raise error.renamed(NAMES) from error.__cause__
