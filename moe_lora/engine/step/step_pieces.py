# SPDX-License-Identifier: Apache-2.0
"""A step's launches in pieces: graphs, and calls of the host between.

Not run on a GPU: tests replace `CudaRecorder` by a stand-in.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol, TypeAlias

import torch

from moe_lora.engine.ranks.exchange import Exchanges, ExpertExchange, Sums
from moe_lora.lora.backend import AddTo, LoraBackend, OuterBackend

Piece: TypeAlias = Callable[[], object]
Compute: TypeAlias = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Records launches for replays."""

    def session(self, compute: Compute) -> AbstractContextManager[None]:
        """A context for recordings of `compute`."""
        ...

    def begin(self) -> None:
        """Start the record of launches."""
        ...

    def end(self) -> Piece:
        """Stop the record; the result replays the launches in the same memory."""
        ...


_LITTLE_MEMORY = 4 << 30
"""Bytes of free device memory, below which a capture first frees cached memory."""


@contextmanager
def _no_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CudaRecorder:
    """`Recorder` of CUDA graphs with a common pool of memory: no two run at once.

    A graph may read an earlier graph's results, and reuse freed memory: replays keep the order.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()  # freed memory is reused on its own stream only
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captures = False

    @contextmanager
    def session(self, compute: Compute) -> Iterator[None]:
        current, side = torch.cuda.current_stream(), self._side
        side.wait_stream(current)
        with torch.cuda.stream(side):
            compute()
            torch.cuda.synchronize()
            if torch.cuda.mem_get_info()[0] < _LITTLE_MEMORY or not self._captures:
                gc.collect()
                torch.cuda.empty_cache()
            self._captures = True
            with _no_collection():  # within a capture it can't free memory
                yield
        current.wait_stream(side)

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads copy meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Piece:
        graph, self._graph = self._graph, None
        assert graph is not None, "begin comes first"
        graph.capture_end()
        return graph.replay


class StepCapture:
    """Records a step's launches, and the host's calls between."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pieces: list[Piece] = []
        self.running = False

    def __call__(self, compute: Compute) -> tuple[list[Piece], torch.Tensor]:
        """Pieces that replay `compute` in order, and the result."""
        self._pieces = pieces = []
        with self._recorder.session(compute):
            self._recorder.begin()
            self.running = True
            try:
                out = compute()
            finally:
                self.running = False
                pieces.append(self._recorder.end())
        return pieces, out

    def cut(self, call: Piece) -> None:
        """Run the host's call at each replay, between earlier and later launches."""
        assert self.running, "only a step under capture is cut"
        self._pieces += [self._recorder.end(), call]
        self._recorder.begin()


class KeptMemory:
    """Fixed memory by role and shape."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, torch.Size, torch.dtype], torch.Tensor] = {}

    def of(self, role: object, like: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Memory of this role and shape, with the type and device of `like`."""
        key = role, shape, like.dtype
        if key not in self._kept:
            self._kept[key] = like.new_empty(shape)
        return self._kept[key]

    def copy(self, role: object, x: torch.Tensor) -> torch.Tensor:
        return self.of(role, x, x.shape).copy_(x)


class HostCalled(OuterBackend):
    """LoraBackend over a backend called by the host: each call cuts a captured step.

    At a replay the backend adds deltas to zeros; the next graph adds the result to y, with the same bits as
    the backend's own `add_to`, if the backend adds to each element once.
    """

    def __init__(self, backend: LoraBackend, capture: StepCapture) -> None:
        super().__init__(backend)
        self._capture = capture
        self._memory = KeptMemory()
        self._zero: set[int] = set()
        """Addresses of deltas equal to zero."""

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo | None:
        if not self._capture.running:
            return self.inner.begin(layer, site, x, ids)
        kept_x = self._memory.copy((site, "x"), x)
        kept_ids = None if ids is None else self._memory.copy((site, "ids"), ids)
        begun: list[AddTo | None] = []
        self._capture.cut(partial(self._begin, begun, layer, site, kept_x, kept_ids))
        return partial(self._add_to, begun, x)

    def _add_to(self, begun: list[AddTo | None], x: torch.Tensor, y: torch.Tensor) -> None:
        deltas = self._memory.of("deltas", x, y.shape)
        self._capture.cut(partial(self._compute, begun, deltas))
        y.add_(deltas)

    def _begin(
        self, begun: list[AddTo | None], layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None
    ) -> None:
        begun[:] = [self.inner.begin(layer, site, x, ids)]

    def _compute(self, begun: list[AddTo | None], deltas: torch.Tensor) -> None:
        add_to, address = begun.pop(), deltas.data_ptr()
        if address not in self._zero:
            deltas.zero_()
            self._zero.add(address)
        if add_to is not None:
            self._zero.remove(address)
            add_to(deltas)


def between_graphs(exchanges: Exchanges, capture: StepCapture) -> Exchanges:
    """The exchanges between ranks, each a cut of a captured step: a host starts them.

    Graphs leave the data in fixed memory, with the same bits.
    """
    experts, sums = exchanges.experts, exchanges.sums
    return Exchanges(
        None if experts is None else _ExpertsBetween(experts, capture),
        None if sums is None else _SumsBetween(sums, capture),
    )


class _ExpertsBetween:
    """`ExpertExchange` of `between_graphs`."""

    def __init__(self, experts: ExpertExchange, capture: StepCapture) -> None:
        self._experts = experts
        self._in_place = _InPlace(capture)

    def fill(self, y: torch.Tensor, ids: torch.Tensor) -> None:
        self._in_place(y, partial(self._experts.fill, ids=ids))


class _SumsBetween:
    """`Sums` of `between_graphs`."""

    def __init__(self, sums: Sums, capture: StepCapture) -> None:
        self._sums = sums
        self._capture = capture
        self._in_place = _InPlace(capture)
        self._memory = KeptMemory()

    def add_up(self, y: torch.Tensor) -> None:
        self._in_place(y, self._sums.add_up)

    def gather(self, logits: torch.Tensor, vocab_size: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if not self._capture.running:
            return self._sums.gather(logits, vocab_size, out)
        kept = self._memory.copy("part", logits)
        if out is None:
            out = self._memory.of("whole", logits, torch.Size((len(logits), vocab_size)))
        self._capture.cut(partial(self._sums.gather, kept, vocab_size, out))
        return out


class _InPlace:
    """Exchanges in y's memory; in a captured step in fixed memory."""

    def __init__(self, capture: StepCapture) -> None:
        self._capture = capture
        self._memory = KeptMemory()

    def __call__(self, y: torch.Tensor, exchange: Callable[[torch.Tensor], None]) -> None:
        if not self._capture.running:
            exchange(y)
            return
        kept = self._memory.copy("y", y)
        self._capture.cut(partial(exchange, kept))
        y.copy_(kept)
