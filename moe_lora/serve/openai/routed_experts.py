# SPDX-License-Identifier: Apache-2.0
"""Tokens' chosen experts in answers (`return_routed_experts`)."""

from __future__ import annotations

from base64 import b64encode
from collections import defaultdict
from contextlib import aclosing, asynccontextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.lib.format import write_array_header_1_0

from moe_lora.core.request import MAX_REPORT_BYTES
from moe_lora.serve.http_errors import bad_request

from .prompt_side import in_slices

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

    import msgspec

    from moe_lora.core.request import GenerateRequest, TokenOutput

    from .endpoints import ChoiceFormat
    from .generation import Delta, Generation

PART_BYTES = 3 << 14
"""Bytes of experts encoded at once, in a fraction of a millisecond."""
MAX_BYTES = 4 * MAX_REPORT_BYTES
"""Limit of a request's experts, held until the answer ends."""


class ExpertSource:
    """Outputs and deltas of a generation, with experts.

    is_bare: numbers alone, as in SGLang; else a numpy file, as in vLLM.
    """

    def __init__(self, generation: Generation, *, is_bare: bool) -> None:
        self._source = generation.source or generation.frontend.client
        self._deltas, self._generation, self._is_bare = generation.deltas, generation, is_bare
        self._rows: defaultdict[str, list[bytes]] = defaultdict(list)
        self._shape = (1, 1)
        self.encoded: dict[int, msgspec.Raw] = {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        async with aclosing(cast("Any", self._source.generate(request))) as outputs:
            async for output in outputs:
                if output.prompt is not None and output.prompt.experts is not None:
                    num_layers, top_k, rows = output.prompt.experts
                    self._shape = num_layers, top_k
                    self._rows[request.request_id].append(rows)
                yield output

    @asynccontextmanager
    async def deltas(self) -> AsyncIterator[AsyncGenerator[Delta, None]]:
        """The generation's deltas; a choice's last follows the encoding.

        Raises ApiError if several choices may exceed MAX_BYTES.
        """
        if self._generation.num_choices * len(self._generation.prompts) > 1:
            await self._check_choices()
        async with self._deltas() as deltas, aclosing(self._with_experts(deltas)) as found:
            yield found

    async def _check_choices(self) -> None:
        """Without max_tokens, the rest of the context counts."""
        made, info = self._generation, await self._generation.frontend.client.model_info()
        limit = made.sampling.max_tokens
        lengths = [info.max_model_len if limit is None else len(one) + limit for one in made.prompts]
        num_bytes = made.num_choices * sum(lengths) * info.expert_bytes
        if num_bytes > MAX_BYTES:
            what = f"routed experts of the choices may take {num_bytes} bytes, and a request has at most "
            what += f"{MAX_BYTES}; lower max_tokens or n, send several requests, or leave the experts out"
            refusal = bad_request(what, "return_routed_experts")
            raise made.frontend.limits.refusal("request_tokens", refusal)

    async def _with_experts(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        async for delta in deltas:
            if delta.finish_reason is not None:
                self.encoded[delta.index] = await in_slices(self._parts(delta.index))
            yield delta

    def _parts(self, index: int) -> Iterator[bytes]:
        """The experts of a choice's tokens but the last, up to a stop string.

        [tokens - 1, layers with experts, experts of a token] int16, or int32 if bare.
        """
        num_layers, top_k = self._shape
        rows = self._rows.pop(f"{self._generation.engine_id}-{index}", [])
        num_rows = self._generation.usage_of(index)["total_tokens"] - 1
        num_rows = min(num_rows, sum(map(len, rows)) // (2 * num_layers * top_k))
        head = BytesIO()
        if not self._is_bare:
            fields = {"descr": "<i2", "fortran_order": False, "shape": (num_rows, num_layers, top_k)}
            write_array_header_1_0(head, fields)
        rest, num_left = head.getvalue(), 2 * num_rows * num_layers * top_k
        yield b'"'
        for row in rows:
            for start in range(0, min(len(row), num_left), PART_BYTES):
                part = row[start : min(start + PART_BYTES, num_left)]
                rest += np.frombuffer(part, "<i2").astype("<i4").tobytes() if self._is_bare else part
                end = len(rest) - len(rest) % 3
                yield b64encode(rest[:end])
                rest = rest[end:]
            num_left -= min(len(row), num_left)
        yield b64encode(rest) + b'"'


def with_experts(make: Callable[..., Generation], form: ChoiceFormat, **given: Any) -> Generation:
    """A generation with experts at each choice's end."""
    generation = make(**given)
    source = generation.source = ExpertSource(generation, is_bare=form.has_bare_experts)
    generation.deltas = source.deltas  # type: ignore[method-assign]
    form.show_at_end("routed_experts", source.encoded.__getitem__)
    return generation
