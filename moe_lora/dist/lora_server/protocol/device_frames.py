"""How requests and answers lie in memory that devices put to (see `transport.device_puts`).

Members of the group are the server's ranks, in their order, and then the instances.  Every member has the
same window:

    requests, for each instance: the step's frame, then for each served site: ids (expert sites), x
    answers, for each served site: the deltas
    for each server rank and served site: how many rows of the answer are missing

A place is used again only by the next step or layer, whose request an instance sends after it has added the
answers of this one: so one place a site is enough, and which one it is no message has to say.

Legend: T token rows of a step, K experts per token, C instances, S served sites.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from moe_lora.core.shape import ModelShape, Site
from moe_lora.dist.transport.device_puts import PUT_BLOCKS, STATUS_BYTES

from .partition import Partition

_ALIGN = 256


def has_row_per_expert(site: Site) -> bool:
    """Whether x has a row for each token and expert, because it is what the experts' first half left."""
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
        """Served sites, in the order in which a layer reaches them."""
        return tuple(i for i in range(len(self.shape.sites)) if self.partition.serves(i))

    @property
    def num_ranks(self) -> int:
        return self.partition.layout.num_ranks

    @property
    def size(self) -> int:
        """Members of the group."""
        return self.num_ranks + self.num_clients

    def member(self, client: int) -> int:
        """That an instance is."""
        return self.num_ranks + client

    def frame_at(self, client: int) -> int:
        """Bytes to an instance's step frame, int64 [1 + 2 T]: T, slots (-1 = none), generations."""
        return client * self._request_bytes

    @property
    def frame_bytes(self) -> int:
        return 8 * (1 + 2 * self.max_rows)

    def ids_at(self, client: int, site: int) -> int:
        """Bytes to the experts of an instance's rows, int32 [T, K]."""
        return self.frame_at(client) + self._offsets[site][0]

    def x_at(self, client: int, site: int) -> int:
        """Bytes to an instance's inputs of a site, [T or T*K, in_features]."""
        return self.frame_at(client) + self._offsets[site][1]

    def answer_at(self, site: int) -> int:
        """Bytes to the deltas of a site, [T or T*K, out_features]; each server rank puts its rows."""
        return self.num_clients * self._request_bytes + self._answers[site]

    def status_at(self, server_rank: int, site: int) -> int:
        """Bytes to what a server rank says of its answer: PUT_BLOCKS counts of missing rows."""
        number = self.answered(server_rank, site) - self._num_requests
        return self._status_at + number * PUT_BLOCKS * STATUS_BYTES

    @property
    def status_bytes(self) -> range:
        """All of these, one after another in the order of `answered`."""
        return range(self._status_at, self.num_bytes)

    @property
    def num_bytes(self) -> int:
        return self._status_at + self.num_ranks * len(self.sites) * PUT_BLOCKS * STATUS_BYTES

    # Signals

    def asked(self, client: int, site: int | None = None) -> int:
        """Signal, at a server rank, of an instance's step frame, or of its request at a site."""
        return client * (1 + len(self.sites)) + (0 if site is None else 1 + self.sites.index(site))

    def answered(self, server_rank: int, site: int) -> int:
        """Signal, at an instance, of a server rank's answer."""
        return self._num_requests + server_rank * len(self.sites) + self.sites.index(site)

    def answers_of(self, ranks: range, site: int) -> range:
        """The signals of several server ranks."""
        first, step = self.answered(ranks.start, site), len(self.sites)
        return range(first, first + len(ranks) * step, step)

    def status_of(self, signals: range) -> range:
        """Numbers of these answers among those that have a status."""
        first = self._num_requests
        return range(signals.start - first, signals.stop - first, signals.step)

    @property
    def num_signals(self) -> int:
        return self._num_requests + self.num_ranks * len(self.sites)

    @property
    def _num_requests(self) -> int:
        return self.num_clients * (1 + len(self.sites))

    # Sizes

    def outputs(self, site: int) -> int:
        """Rows of y of max_rows tokens."""
        experts = self.shape.sites[site].num_experts
        return self.max_rows * (self.shape.num_experts_per_token if experts else 1)

    def inputs(self, site: int) -> int:
        """Rows of x of max_rows tokens."""
        return self.outputs(site) if has_row_per_expert(self.shape.sites[site]) else self.max_rows

    @cached_property
    def _offsets(self) -> dict[int, tuple[int, int]]:
        """Of ids and x in an instance's requests, by site; at -1 the end."""
        at, found = _aligned(self.frame_bytes), {}
        for number in self.sites:
            site = self.shape.sites[number]
            x_at = at + (_aligned(4 * self.outputs(number)) if site.num_experts else 0)
            found[number] = at, x_at
            at = x_at + _aligned(self.inputs(number) * site.in_features * self.dtype.itemsize)
        found[-1] = at, at
        return found

    @property
    def _request_bytes(self) -> int:
        return self._offsets[-1][0]

    @cached_property
    def _answers(self) -> dict[int, int]:
        """Of the answers among themselves, by site; at -1 the end."""
        at, found = 0, {}
        for number in self.sites:
            found[number] = at
            width = self.shape.sites[number].total_out_features * self.dtype.itemsize
            at += _aligned(self.outputs(number) * width)
        found[-1] = at
        return found

    @property
    def _status_at(self) -> int:
        return self.num_clients * self._request_bytes + self._answers[-1]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
