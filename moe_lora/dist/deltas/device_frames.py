# SPDX-License-Identifier: Apache-2.0
"""Device puts to the LoRA Server (`transport.device_puts`): frames in memory, and the LoraBackend.

Members of the group are the server's ranks in order, then the instances, with equal windows:

    for each instance
        requests: the step's frame, then per served site: ids (expert sites), x
        answers: per served site the deltas
        per server rank and served site: number of missing rows

A put copies to the peer's same place.  One place per site suffices: an instance adds all answers before its
next request there.

Puts, base GEMM, waits and additions are stream operations of the step's CUDA graph.  The device records late
answers and missing rows, read by `settled` after the step.  A failed step is repeated over `remote_backend`.
Source: InfiniLoRA sections 3 and 5.1.

Legend: T token rows of a step, K experts per token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch

from moe_lora.core.partition import Partition
from moe_lora.core.shape import ModelShape, Site
from moe_lora.dist.transport.device_puts import (
    POLLS_PER_S,
    PUT_BLOCKS,
    STATUS_BYTES,
    DevicePuts,
    SymmetricWindow,
)
from moe_lora.kernels.operands import StepTables
from moe_lora.kernels.triton.configs import kernels
from moe_lora.lora.backend import AddTo, LoraBackend
from moe_lora.lora.row_routing import RowRouting, Source

from .session import starts

_ALIGN = 256


def has_row_per_expert(site: Site) -> bool:
    """True if x has a row per token and expert."""
    return site.num_experts > 0 and site.name == "down"


@dataclass(frozen=True)
class DeviceFrames:
    """Places in the window.  max_rows: of a step."""

    shape: ModelShape
    partition: Partition
    dtype: torch.dtype
    max_rows: int
    num_clients: int

    @cached_property
    def sites(self) -> tuple[int, ...]:
        """Served sites, in order."""
        return tuple(i for i in range(len(self.shape.sites)) if self.partition.serves(i))

    @property
    def num_ranks(self) -> int:
        return self.partition.layout.num_ranks

    @property
    def size(self) -> int:
        """Members of the group."""
        return self.num_ranks + self.num_clients

    def member(self, client: int) -> int:
        """Member number of an instance."""
        return self.num_ranks + client

    def frame_at(self, client: int) -> int:
        """Offset of a step frame, int64 [1 + 2 T]: T, slots (-1 = no slot), generations."""
        return client * self._client_bytes

    @property
    def frame_bytes(self) -> int:
        """Size of a step frame."""
        return 8 * (1 + 2 * self.max_rows)

    def ids_at(self, client: int, site: int) -> int:
        """Offset of expert ids, int32 [T, K]."""
        return self.frame_at(client) + self._places[site].ids

    def x_at(self, client: int, site: int) -> int:
        """Offset of a site's inputs, [T or T*K, in_features]."""
        return self.frame_at(client) + self._places[site].x

    def answer_at(self, client: int, site: int) -> int:
        """Offset of a site's deltas, [T or T*K, out_features]."""
        return self.frame_at(client) + self._places[site].answer

    def status_at(self, client: int, server_rank: int, site: int) -> int:
        """Offset of an answer's status: PUT_BLOCKS counts of missing rows."""
        number = server_rank * len(self.sites) + self.sites.index(site)
        return self.frame_at(client) + self._statuses + number * PUT_BLOCKS * STATUS_BYTES

    @property
    def num_bytes(self) -> int:
        """Size of the window."""
        return self.num_clients * self._client_bytes

    def asked(self, client: int, site: int | None = None) -> int:
        """Signal, at a server rank, of a step frame or a request."""
        return client * (1 + len(self.sites)) + (0 if site is None else 1 + self.sites.index(site))

    def answered(self, server_rank: int, site: int) -> int:
        """Signal, at an instance, of an answer."""
        return self._num_requests + server_rank * len(self.sites) + self.sites.index(site)

    def answers_of(self, ranks: range, site: int) -> range:
        """The signals of these server ranks."""
        first, step = self.answered(ranks.start, site), len(self.sites)
        return range(first, first + len(ranks) * step, step)

    @property
    def num_signals(self) -> int:
        return self._num_requests + self.num_ranks * len(self.sites)

    @property
    def _num_requests(self) -> int:
        return self.num_clients * (1 + len(self.sites))

    def outputs(self, site: int) -> int:
        """Rows of y of max_rows tokens."""
        experts = self.shape.sites[site].num_experts
        return self.max_rows * (self.shape.num_experts_per_token if experts else 1)

    def inputs(self, site: int) -> int:
        """Rows of x of max_rows tokens."""
        return self.outputs(site) if has_row_per_expert(self.shape.sites[site]) else self.max_rows

    @cached_property
    def _places(self) -> dict[int, _Places]:
        at, found = starts(0, self.frame_bytes, align=_ALIGN)[-1], {}
        for number in self.sites:
            site, inputs, outputs = self.shape.sites[number], self.inputs(number), self.outputs(number)
            widths = inputs * site.in_features, outputs * site.total_out_features
            sizes = 4 * outputs * (site.num_experts > 0), *(width * self.dtype.itemsize for width in widths)
            found[number] = _Places(*starts(at, *sizes, align=_ALIGN))
            at = found[number].end
        return found

    @property
    def _statuses(self) -> int:
        return self._places[self.sites[-1]].end

    @property
    def _client_bytes(self) -> int:
        num_statuses = self.num_ranks * len(self.sites) * PUT_BLOCKS
        return starts(self._statuses, num_statuses * STATUS_BYTES, align=_ALIGN)[-1]


class DeviceHalf:
    """A member's half of puts, with bounded waits."""

    def __init__(
        self,
        group: DevicePuts,
        window: SymmetricWindow,
        frames: DeviceFrames,
        client: int,
        answer_timeout_s: float,
    ) -> None:
        self._exchange = kernels("exchange")
        self._group, self._window, self._frames, self._client = group, window, frames, client
        self._max_polls = max(1, int(answer_timeout_s * POLLS_PER_S))
        self._expected = torch.zeros(frames.num_signals, dtype=torch.int64, device=group.device)
        self.state = torch.zeros(1, dtype=torch.int64, device=group.device)
        self._rows = {site: self._at(site) for site in frames.sites}

    def _at(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """x, ids and deltas."""
        frames, site, view = self._frames, self._frames.shape.sites[number], self._window.rows
        client, outputs, inputs = self._client, frames.outputs(number), frames.inputs(number)
        x = view(frames.x_at(client, number), inputs, site.in_features, frames.dtype)
        out = view(frames.answer_at(client, number), outputs, site.total_out_features, frames.dtype)
        ids = None
        if site.num_experts:
            top_k = outputs // frames.max_rows
            ids = view(frames.ids_at(client, number), frames.max_rows, top_k, torch.int32)
        return x, ids, out

    def _wait(
        self, numbers: range, more: int, max_polls: int, status: tuple[torch.Tensor, int] | None = None
    ) -> None:
        """Wait until each signal is `more` above its last wait."""
        signals = self._exchange.Signals(self._window.words, self._expected, numbers)
        self._exchange.launch_wait(signals, more, self.state, max_polls, status)


class _Places(NamedTuple):
    ids: int
    x: int
    answer: int
    end: int


logger = logging.getLogger(__name__)


class PushedBackend(LoraBackend, DeviceHalf):
    """The backend of a single-process instance.

    num_redone: steps without full answers.  lost: off after a late answer, as puts may still be under way and
    no member can rejoin.
    """

    def __init__(self, group: DevicePuts, frames: DeviceFrames, client: int, answer_timeout_s: float) -> None:
        window = group.alloc(frames.num_bytes, frames.num_signals)
        super().__init__(group, window, frames, client, answer_timeout_s)
        self._frame: torch.Tensor | None = None
        self._is_under_way = False
        self.lost = False
        self.num_steps = self.num_redone = 0
        group.meet()

    def takes(self, routing: RowRouting, num_rows: int, *, decode: bool) -> bool:
        """True if this step's leased rows can use puts."""
        leased = [sources for sources in routing.sources if Source.LEASED in sources]
        return (
            decode
            and not self.lost
            and num_rows <= self._frames.max_rows
            and len(leased) == 1
            and routing.terms.shape[2] == 1
            and not routing.loading.any()
        )

    def settled(self) -> bool:
        """True if the last step got all answers; waits for the step."""
        self._is_under_way = False
        self.num_steps += 1
        state = int(self.state.item())
        if not state:
            return True
        self.num_redone += 1
        if state & self._exchange.LOST:
            self.lost = True
            logger.error(
                "the LoRA Server did not answer puts in time; until all its ranks and instances are started "
                "together again, it is asked over lora_server.transport"
            )
        else:
            self.state.zero_()
            logger.info("the LoRA Server lacked rows of a step, which is computed again")
        return False

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        pushed = (one for (source, _), one in routing.on_device.items() if source == Source.PUSHED)
        self._frame = next(pushed, None)
        if self._frame is None:
            (frame,) = routing.frames_pushed().values()
            self._frame = torch.from_numpy(frame).to(self._group.device)
        self._is_under_way = True
        frames, client = self._frames, self._client
        laid = self._laid(frames.frame_at(client), self._frame)
        for server_rank in range(frames.num_ranks):
            self._group.put_pieces(self._window, [laid], frames.asked(client), server_rank)

    def abandon_step(self) -> None:
        """Half a step ends all puts: servers wait for sites in order."""
        if self._is_under_way and not self.lost:
            self._is_under_way, self.lost = False, True
            logger.error(
                "a step of puts to the LoRA Server failed; until all its ranks and instances are started "
                "together again, rows go over lora_server.transport"
            )

    def _laid(self, offset_bytes: int, values: torch.Tensor) -> tuple[int, int]:
        there = self._window.bytes[offset_bytes : offset_bytes + values.nbytes]
        there.view(values.dtype).view(values.shape).copy_(values)
        return offset_bytes, values.nbytes

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo | None:
        frames, client = self._frames, self._client
        pieces = [self._laid(frames.x_at(client, site), x)]
        if ids is not None:
            pieces.append(self._laid(frames.ids_at(client, site), ids))
        ranks = frames.partition.servers_of_client(0, layer, site)
        for server_rank in ranks:
            self._group.put_pieces(self._window, pieces, frames.asked(client, site), server_rank)
        return partial(self._add_to, range(ranks[0], ranks[-1] + 1), site, ids)

    def _add_to(self, ranks: range, site: int, ids: torch.Tensor | None, y: torch.Tensor) -> None:
        frames, frame = self._frames, self._frame
        assert frame is not None, "begin_step comes first"
        numbers = frames.answers_of(ranks, site)
        first, last = (frames.status_at(self._client, rank, site) for rank in (ranks[0], ranks[-1]))
        status = self._window.bytes[first : last + PUT_BLOCKS * STATUS_BYTES].view(torch.int64)
        self._wait(numbers, PUT_BLOCKS, self._max_polls, (status, PUT_BLOCKS))
        self._exchange.launch_add_rows(y, self._rows[site][2][: len(y)], frame, ids)

    def close(self) -> None:
        self._group.close()
