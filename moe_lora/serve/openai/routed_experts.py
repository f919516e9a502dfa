# SPDX-License-Identifier: Apache-2.0
"""Chosen experts of tokens in answers (`return_routed_experts`), for router replay."""

from __future__ import annotations

from base64 import b64encode
from collections import defaultdict
from contextlib import aclosing
from io import BytesIO
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from moe_lora.core.request import GenerateRequest, TokenOutput

    from .endpoints import ChoiceFormat
    from .generation import Generation


class ExpertSource:
    """Outputs of another source; keeps the experts of each request."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._rows: defaultdict[str, bytearray] = defaultdict(bytearray)
        self._shape = (1, 1)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        async with aclosing(cast("Any", self._source.generate(request))) as outputs:
            async for output in outputs:
                if output.prompt is not None and output.prompt.experts is not None:
                    num_layers, top_k, rows = output.prompt.experts
                    self._shape = num_layers, top_k
                    self._rows[request.request_id] += rows
                yield output

    def experts(self, generation: Generation, index: int) -> np.ndarray:
        """Of a choice's tokens but the last: [tokens - 1, layers with experts, experts of a token] int16.

        Outputs after a stop string do not count.
        """
        rows = np.frombuffer(self._rows[f"{generation.engine_id}-{index}"], dtype="<i2")
        num_tokens: int = generation.usage_of(index)["total_tokens"]
        return rows.reshape(-1, *self._shape)[: num_tokens - 1]


def with_experts(make: Callable[..., Generation], form: ChoiceFormat, **given: Any) -> Generation:
    """The generation of these fields; the format shows the experts at each choice's end."""
    generation = make(**given)
    source = generation.source = ExpertSource(generation.source or generation.frontend.client)
    encoded = _as_int32 if form.has_bare_experts else _as_npy
    form.show_experts(lambda index: encoded(source.experts(generation, index)))
    return generation


def _as_npy(experts: np.ndarray) -> str:
    """A file of numpy in base64, as in vLLM."""
    file = BytesIO()
    np.save(file, experts)
    return b64encode(file.getvalue()).decode()


def _as_int32(experts: np.ndarray) -> str:
    """The numbers alone in base64, as in SGLang."""
    return b64encode(experts.astype("<i4").tobytes()).decode()
