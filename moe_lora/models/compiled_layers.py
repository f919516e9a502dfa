# SPDX-License-Identifier: Apache-2.0
"""A decoder layer's compiled code, called without the compiler's checks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._dynamo import lookup_backend

from .causal_lm import DecoderLayer

_Code = Callable[..., Sequence[torch.Tensor]]
_noted = threading.local()  # this thread's last compiled code, its operands and its result


def _noting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> _Code:
    """A graph's usual code; records its calls.

    Engines share compiled code, which outlives them.
    """
    code = lookup_backend("inductor")(graph, inputs)

    def noted(*operands: Any) -> Sequence[torch.Tensor]:
        found = code(*operands)
        _noted.call = code, operands, found
        return found

    return noted


class _Call(NamedTuple):
    """A layer's compiled code and its operands.

    held: weights, in place.  given: place among the operands -> number of a step's tensor.  num_rows: places
    of the number of rows.
    """

    code: _Code
    held: list[torch.Tensor | None]
    given: list[tuple[int, int]]
    num_rows: list[int]


class CompiledLayers:
    """`DecoderLayer.forward` compiled; same arguments, same result.

    The compiler's checks before each call take a quarter of the time outside kernels in a CPU decode step.
    In an engine only the number of rows changes, so the compiler runs once per layer and number of rows (once
    for all above 1 if the code is dynamic).

    Weights may change in place only.  The code keeps its number of threads.
    """

    def __init__(self, num_buckets: int) -> None:
        self._recompile_limit = max(64, 4 * num_buckets)
        self._compiled = torch.compile(DecoderLayer.forward, fullgraph=True, dynamic=False, backend=_noting)
        self._calls: dict[tuple[DecoderLayer, int | None], _Call] = {}

    def __call__(
        self,
        layer: DecoderLayer,
        x: torch.Tensor,
        channel: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        live: torch.Tensor,
    ) -> torch.Tensor:
        num_rows = x.shape[0]
        call = self._calls.get((layer, num_rows))
        if call is None and num_rows > 1:
            call = self._calls.get((layer, None))
        step = (x, channel, cos, sin, live)
        if call is None:
            return self._first(layer, step)
        code, held, given, rows = call
        operands: list[Any] = held.copy()  # a kept reference would fill the memory
        for place, number in given:
            operands[place] = step[number]
        for place in rows:
            operands[place] = num_rows
        return code(*operands)[0]

    def _first(self, layer: DecoderLayer, step: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Call the compiler; record the compiled code if the code was the only effect."""
        torch._dynamo.config.recompile_limit = self._recompile_limit  # per thread
        _noted.call = None
        y = self._compiled(layer, *step)
        noted, _noted.call = _noted.call, None
        if noted is None:
            return y
        code, operands, found = noted
        num_rows, weights = step[0].shape[0], {id(one) for one in (*layer.parameters(), *layer.buffers())}
        held: list[torch.Tensor | None] = [one if id(one) in weights else None for one in operands]
        given = [(i, n) for i, one in enumerate(operands) for n, tensor in enumerate(step) if one is tensor]
        places = {i for i, _ in given} | {i for i, one in enumerate(held) if one is not None}
        rows = [i for i in range(len(operands)) if i not in places]
        known = all(isinstance(operands[i], int) and operands[i] == num_rows for i in rows)
        if known and len(found) == 1 and found[0] is y:
            self._calls[layer, None if rows else num_rows] = _Call(code, held, given, rows)
        return y
