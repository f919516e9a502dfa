# SPDX-License-Identifier: Apache-2.0
"""POST /v1/embeddings and /pooling: last tokens' hidden states after the final norm."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import Request
from starlette.responses import Response

from moe_lora.core.request import SamplingParams
from moe_lora.engine.text.tokenizer_files import read_json
from moe_lora.serve.http_errors import JsonResponse, bad_request, to_json

from .endpoints import ChoiceFormat, answer, while_connected
from .generation import Delta, Generation
from .preparing import Prepared, Preparer, check_prompt
from .prompt_bodies import MAX_INPUTS, EmbeddingRequest, ReadBody, read_body
from .prompt_side import check_report, in_slices, shortened

if TYPE_CHECKING:
    from moe_lora.serve.frontend import Frontend

MAX_PLACES = 256
"""Most vectors in an answer's header."""
TYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, hidden_state=True)


class EmbeddingFormat(ChoiceFormat):
    """A list of vectors, by default of length 1."""

    id_prefix = "embd-"
    object_name, key, is_unit = "embedding", "embedding", True

    def __init__(self, body: EmbeddingRequest) -> None:
        super().__init__(None, with_token_ids=False)
        is_unit = body.normalize if body.use_activation is None else body.use_activation
        if is_unit is not None:
            self.is_unit = is_unit
        self._body = body

    async def respond(
        self, request: Request, generation: Generation, head: dict[str, Any], headers: dict[str, str]
    ) -> Response:
        """The vectors of the prompts, encoded in slices."""
        is_json = self._body.encoding_format in (None, "float", "base64")
        whole = await while_connected(request, generation.whole())
        num_tokens = sum(map(len, generation.prompts))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
        if is_json:
            data = await in_slices(self._parts(whole))
            return JsonResponse({**head, "object": "list", "data": data, "usage": usage}, headers=headers)
        parts = [self._encoded(self._values(delta)) for delta in whole]
        if self._body.encoding_format == "bytes":
            head |= {"data": self._places(parts, whole), "usage": usage}
            headers = {**headers, "metadata": json.dumps(head)}
        return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)

    def _places(self, parts: Sequence[bytes], whole: Sequence[Delta]) -> list[dict[str, Any]]:
        """Each vector's place in an answer of bytes."""
        body, found, start = self._body, list[dict[str, Any]](), 0
        embed_type = body.embed_dtype or "float32"
        for part, delta in zip(parts, whole, strict=True):
            end = start + len(part)
            entry = {"embed_dtype": embed_type, "endianness": body.endianness or "native"}
            place = {"start": start, "end": end, "shape": [len(part) // TYPE_BYTES[embed_type]]}
            found.append({"index": delta.index, **entry, **place, **version_of(delta)})
            start = end
        return found

    def _parts(self, whole: Sequence[Delta]) -> Iterator[bytes]:
        opening = b"["
        for delta in whole:
            entry = {"object": self.object_name, "index": delta.index, self.key: self._vector(delta)}
            yield opening + to_json({**entry, **version_of(delta)})
            opening = b","
        yield b"]"

    def _vector(self, delta: Delta) -> Any:
        values = self._values(delta)
        if self._body.encoding_format != "base64":
            return values.tolist()
        return base64.b64encode(self._encoded(values)).decode()

    def _values(self, delta: Delta) -> np.ndarray[Any, Any]:
        check_report(delta)
        assert delta.prompt is not None
        assert delta.prompt.hidden is not None
        values = np.frombuffer(delta.prompt.hidden, "<f4")[: self._body.dimensions]
        if self.is_unit:
            values = (values / (np.linalg.norm(values.astype(np.float64)) or 1.0)).astype("<f4")
        return values

    def _encoded(self, values: np.ndarray[Any, Any]) -> bytes:
        return as_bytes(values, self._body.embed_dtype or "float32", self._body.endianness or "native")


def version_of(delta: Delta) -> dict[str, int]:
    """An adapter's version field, or empty."""
    return {} if delta.adapter_version is None else {"adapter_version": delta.adapter_version}


class PoolingFormat(EmbeddingFormat):
    """A list of hidden states."""

    id_prefix = "pooling-"
    object_name, key, is_unit = "pooling", "data", False


class Endpoints:
    """Methods answer one path each."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend = frontend
        self._preparer = preparer

    async def embed(self, request: Request) -> Response:
        """Vectors, by default of length 1."""
        return await self._answer(request, EmbeddingFormat)

    async def pool(self, request: Request) -> Response:
        """Hidden states, unchanged by default."""
        return await self._answer(request, PoolingFormat)

    async def _answer(
        self,
        request: Request,
        form: type[EmbeddingFormat],
        kind: type[EmbeddingRequest] = EmbeddingRequest,
    ) -> Response:
        frontend = self._frontend
        found = await read_body(request, kind, frontend, self._preparer)
        prompts = await self._prompts(found)
        request.state.prepared = Prepared(
            body=found.body,
            sampling=_SAMPLING,
            prompts=prompts,
            answer_tokens=[1] * len(prompts),
            ignored=found.ignored,
        )
        return await answer(frontend, request, form(found.body))

    def _check(self, body: EmbeddingRequest, num_inputs: int) -> None:
        """Raises ApiError for an unsupported body."""
        if body.task not in (None, "embed"):
            raise bad_request(
                f'Unsupported task: {body.task[:64]!r}; send "embed", or leave task out', "task"
            )
        if num_inputs > MAX_INPUTS:
            what = f"input has {num_inputs} inputs; send at most {MAX_INPUTS} at once"
            raise self._frontend.limits.refusal("choices", bad_request(what, "input"))
        if body.encoding_format == "bytes" and num_inputs > MAX_PLACES:
            what = f'encoding_format="bytes" names the places of at most {MAX_PLACES} vectors in a header'
            raise bad_request(f'{what}; send fewer inputs, or "bytes_only"', "encoding_format")
        if body.dimensions is not None:
            folder = Path(self._frontend.cluster.engine.model_dir)
            check_dimensions(body.dimensions, read_json(folder / "config.json"))

    async def _prompts(self, found: ReadBody) -> list[tuple[int, ...]]:
        info = await self._frontend.client.model_info()
        self._check(found.body, len(found.prompts))
        prompts = [tuple(shortened(one, found.body, info, 0)) for one in found.prompts]
        for one in prompts:
            check_prompt(one, _SAMPLING, info, found.body.prompt_field)
        return prompts


def check_dimensions(given: int, config: Mapping[str, Any]) -> None:
    """Raises ApiError for a width outside training."""
    widths, most = config.get("matryoshka_dimensions") or (), config.get("hidden_size", 0)
    if given in widths or (config.get("is_matryoshka") and not widths and 1 <= given <= most):
        return
    what = f"dimensions={given} is not a width of this model's embeddings"
    if widths:
        what += f"; allowed are {', '.join(map(str, widths))}"
    elif config.get("is_matryoshka"):
        what += f"; allowed are 1 to {most}"
    else:
        what += "; leave dimensions out (config.json lists widths in matryoshka_dimensions)"
    raise bad_request(what, "dimensions")


def as_bytes(values: np.ndarray[Any, Any], embed_type: str, endianness: str) -> bytes:
    """The vector in this type, rounded to nearest, ties to even.

    values: [H] fp32.  endianness: native, little or big.  Beyond the range: infinity, or 448 in fp8_e4m3.
    """
    if embed_type == "float32":
        found = values
    elif embed_type == "float16":
        with np.errstate(over="ignore"):
            found = values.astype(np.float16)
    elif embed_type == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        found = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        found = _as_fp8(values, *((3, 0x7E) if embed_type == "fp8_e4m3" else (2, 0x7C)))
    order = "=" if endianness == "native" else ">" if endianness == "big" else "<"
    return found.astype(found.dtype.newbyteorder(order)).tobytes()


def _as_fp8(values: np.ndarray[Any, Any], mantissa_bits: int, last: int) -> np.ndarray[Any, Any]:
    """Codes of one byte: sign, exponent, mantissa.  last: the largest finite code."""
    codes = np.arange(last + 1)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (6 - mantissa_bits)) - 1
    is_normal = exponent > 0
    fraction = is_normal + mantissa / (1 << mantissa_bits)
    table = np.ldexp(fraction, np.where(is_normal, exponent, 1) - bias)
    middles, sizes = (table[1:] + table[:-1]) / 2, np.abs(values.astype(np.float64))
    found = np.searchsorted(middles, sizes, side="left")
    found += np.isin(sizes, middles) & (found % 2 == 1)
    return (found + np.signbit(values) * 0x80).astype(np.uint8)
