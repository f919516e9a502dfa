# SPDX-License-Identifier: Apache-2.0
"""The remote LoraBackend: rows go to the server ranks of their layer and experts.

Legend: T token rows of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.partition import Partition
from moe_lora.core.shape import ModelShape
from moe_lora.lora.backend import AddTo, LoraBackend
from moe_lora.lora.row_routing import RowRouting, Source

from .host_deltas import HostDeltas
from .session import ClientSession, DeltaRequest, FrameLayout, Sent, SessionLostError, lay_out_request


class RemoteRows:
    """One step's rows at one group of sites.

    adapter: [T] index into `RowRouting.adapters`, -1 = not leased.  slot: [T] int32 server slot, -1 without a
    valid lease.  generation: [T] int64.
    """

    def __init__(self, routing: RowRouting, source: Source, group: int, shape: ModelShape) -> None:
        terms = routing.terms_from(source, group)
        self.adapter, self.slot, self.generation = terms["adapter"], terms["slot"], terms["generation"]
        self._adapters = routing.adapters
        self._sites = shape.sites
        self._tokens: dict[int, np.ndarray] = {}

    def tokens_at(self, site: int) -> np.ndarray:
        """Token rows with deltas at this site, ascending."""
        known = self._tokens.get(site)
        if known is None:
            modules = set(self._sites[site].modules)
            targeted = [not modules.isdisjoint(adapter.targets) for adapter in self._adapters]
            known = np.flatnonzero(np.array([*targeted, False])[self.adapter])
            self._tokens[site] = known
        return known


logger = logging.getLogger(__name__)


class _SiteInput(NamedTuple):
    rows: RemoteRows
    layer: int
    site: int
    x: torch.Tensor


@dataclass
class _Part:
    """sent None: delta was computed here."""

    rows: torch.Tensor
    row_adapter: np.ndarray
    sent: tuple[ClientSession, Sent] | None
    delta: torch.Tensor | None


Shares: TypeAlias = Sequence[tuple[int, np.ndarray]]
"""Servers, with candidate token rows."""


class Division(Protocol):
    """Division of rows among servers."""

    def shares(self, layer: int, site: int, tokens: np.ndarray, slot: np.ndarray) -> Shares:
        """slot: [T] of all rows."""
        ...

    def experts_of(self, server: int) -> range: ...


class ServerPartition:
    """Division among a LoRA Server's ranks, by layer and experts."""

    def __init__(self, partition: Partition, client_rank: int) -> None:
        self._partition = partition
        self.client_rank = client_rank
        self.experts_of = partition.experts_of

    def shares(self, layer: int, site: int, tokens: np.ndarray, slot: np.ndarray) -> Shares:
        """All tokens to each rank; among replicas, by slot."""
        servers = self._partition.servers_of_client(self.client_rank, layer, site)
        dp = self._partition.layout.dp
        if dp == 1:
            return [(server, tokens) for server in servers]
        return [(server, tokens[slot[tokens] % dp == i]) for i, server in enumerate(servers)]


class SessionLink(Protocol):
    """A connection to a server."""

    session: ClientSession | None


class DividedBackend(LoraBackend):
    """LoraBackend over servers that share a source's rows."""

    def __init__(self, shape: ModelShape, source: Source, division: Division) -> None:
        self._shape = shape
        self._source = source
        self._division = division
        self.num_requests = 0

    @property
    def num_fallback_rows(self) -> int:
        """Rows computed by the engine instead of a server."""
        return 0

    def failures(self) -> dict[int, Exception]:
        """See `HostWorkers.failures`."""
        return {}

    def _shares(self, group: int, layer: int, site: int) -> tuple[RemoteRows, Shares]:
        rows = self._once(self._rows, group)
        tokens = rows.tokens_at(site)
        return rows, self._division.shares(layer, site, tokens, rows.slot) if len(tokens) else ()

    def _rows(self, group: int) -> RemoteRows:
        return RemoteRows(self._routing, self._source, group, self._shape)


class RemoteBackend(DividedBackend):
    """Over a LoRA Server's ranks, or over host workers.

    Unanswered requests are computed here from the host store.  `num_host_rows`: from a LoRA Server's host
    workers.  Source: InfiniLoRA sections 3 and 5.1.
    """

    num_fallback_rows = num_host_rows = 0

    def __init__(
        self,
        shape: ModelShape,
        source: Source,
        division: Division,
        links: Mapping[int, SessionLink],
        layout: FrameLayout,
        store: HostStore,
    ) -> None:
        super().__init__(shape, source, division)
        self._links = links
        self._layout = layout
        self._host = HostDeltas(shape, store, layout.shard)

    def follow(self, other: RemoteBackend) -> None:
        """Send later rows to the other's server; between steps."""
        self._division, self._links = other._division, other._links

    def abandon_step(self) -> None:
        for link in self._links.values():
            session = link.session
            if session is not None:
                session.abandon()

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo | None:
        rows, shares = self._shares(self._routing.groups[layer][site], layer, site)
        if not shares:
            return None
        shares = [(server, some) for server, chosen in shares for some in _by_lease(chosen, rows.slot)]
        if ids is None:
            parts = self._send_dense(_SiteInput(rows, layer, site, x), shares)
        else:
            parts = self._send_experts(_SiteInput(rows, layer, site, x), ids, shares)
        return partial(self._add_to, parts)

    def _add_to(self, parts: Sequence[_Part], y: torch.Tensor) -> None:
        for part in parts:
            delta = self._take(part)
            if len(part.rows) == y.shape[0]:
                y.add_(delta.to(y.device))
            else:
                y.index_add_(0, part.rows.to(y.device), delta.to(y))

    def _send_dense(self, given: _SiteInput, shares: Shares) -> list[_Part]:
        parts = []
        for server, chosen in shares:
            for some in _chunks(chosen, self._layout.max_rows):
                parts.append(self._send(server, given, some, some, None, some))
        return parts

    def _send_experts(self, given: _SiteInput, ids: torch.Tensor, shares: Shares) -> list[_Part]:
        top_k = ids.shape[1]
        all_ids = ids.cpu().numpy()
        per_output = given.x.shape[0] != ids.shape[0]
        parts = []
        for server, chosen in shares:
            experts = self._division.experts_of(server)
            mine = all_ids[chosen]
            mine[(mine < experts.start) | (mine >= experts.stop)] = -1
            if per_output:
                places = np.nonzero(mine >= 0)
                outputs = chosen[places[0]] * top_k + places[1]
                flat_ids = mine[places][:, None]
                for part in _chunks(np.arange(len(outputs)), self._layout.max_rows):
                    some, owner = outputs[part], chosen[places[0][part]]
                    parts.append(self._send(server, given, owner, some, flat_ids[part], some))
                continue
            used = np.flatnonzero((mine >= 0).any(1))
            for part in _chunks(used, self._layout.max_rows // top_k):
                places = np.nonzero(mine[part] >= 0)
                some = chosen[part[places[0]]] * top_k + places[1]
                owner = chosen[part]
                parts.append(self._send(server, given, owner, owner, mine[part], some))
        return parts

    def _send(
        self,
        server: int,
        given: _SiteInput,
        tokens: np.ndarray,
        x_rows: np.ndarray,
        ids: np.ndarray | None,
        y_rows: np.ndarray,
    ) -> _Part:
        """tokens [T'] own the rows x_rows [T'] of x, all with or all without leases."""
        rows, layer, site, x = given
        session = self._links[server].session
        leased = rows.slot[tokens[0]] >= 0
        try:
            if session is None or not leased:
                raise SessionLostError
            frame = session.frame()
        except SessionLostError:
            session = None
            frame = torch.empty(self._layout.request_bytes, dtype=torch.uint8)
        top_k = 0 if ids is None else ids.shape[1]
        request = lay_out_request(frame, self._layout, layer, site, len(tokens), top_k, len(y_rows))
        request.slot[:] = rows.slot[tokens]
        request.generation[:] = rows.generation[tokens]
        if ids is not None and request.ids is not None:
            request.ids[:] = ids
        _gather(x, x_rows, request.x)
        part = _Part(torch.from_numpy(y_rows), rows.adapter[tokens], None, None)
        if session is not None:
            try:
                part.sent = session, session.send(request)
                return part
            except SessionLostError:
                logger.debug("a request could not be sent")
        part.delta = self._compute_here(request, part.row_adapter)
        return part

    def _take(self, part: _Part) -> torch.Tensor:
        if part.sent is None:
            assert part.delta is not None
            return part.delta
        session, sent = part.sent
        try:
            delta = session.take(sent)
        except SessionLostError:
            return self._compute_here(sent.request, part.row_adapter)
        self.num_requests += 1
        self.num_host_rows += sent.num_host_rows
        return delta

    def _compute_here(self, request: DeltaRequest, row_adapter: np.ndarray) -> torch.Tensor:
        width = self._shape.sites[request.site].total_out_features
        delta = torch.empty(request.num_rows, width, dtype=self._layout.dtype)
        self._host.compute(request, self._routing.adapters, row_adapter, delta)
        self.num_fallback_rows += request.num_rows
        return delta


def _gather(x: torch.Tensor, rows: np.ndarray, out: torch.Tensor) -> None:
    if len(rows) == x.shape[0]:
        out.copy_(x)
    elif x.is_cpu:
        torch.index_select(x, 0, torch.from_numpy(rows), out=out)
    else:
        out.copy_(x[torch.from_numpy(rows).to(x.device)])


def _by_lease(tokens: np.ndarray, slot: np.ndarray) -> list[np.ndarray]:
    """Non-empty parts: tokens with a lease, tokens without."""
    leased = slot[tokens] >= 0
    parts = (tokens,) if leased.all() else (tokens[leased], tokens[~leased])
    return [some for some in parts if len(some)]


def _chunks(array: np.ndarray, size: int) -> list[np.ndarray]:
    return [array[i : i + size] for i in range(0, len(array), size)]
