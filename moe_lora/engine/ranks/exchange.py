# SPDX-License-Identifier: Apache-2.0
"""Exchanges of an instance's ranks within a step: rows of experts, summands, logits.

Legend: T token rows, K experts per token, N output width, P ranks.

Expert rows are moved, never added up: each rank sums the same bits in the same order as a rank with all
experts.

- `RowExchange` (CPU) sends a rank's rows to every rank: T*K*(P-1)/P rows in and out with even routing.

- `ReduceExchange` (CUDA) sums all T*K rows as integers, with one nonzero summand each: exact, at twice the
bytes.  Sizes don't depend on the ids, so a CUDA graph can hold the exchange.

- `RankSums` (tensor parallelism) adds in rank order, independent of arrival.  Of S bytes a summand, each rank
sends (P-1) S in one round, or from `TWO_ROUNDS_BYTES` on 2 (P-1)/P S in two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from moe_lora.config import EngineConfig
from moe_lora.core.errors import EngineDeadError

Backend: TypeAlias = Any
"""A ProcessGroup; torch's stubs lack their methods."""

LOOPBACK = "127.0.0.1"
RENDEZVOUS = "rendezvous"


class RowExchange:
    """Own rows to every other rank."""

    def __init__(self, group: Backend, num_experts: int) -> None:
        self.group = group
        self._dist_rank, self._size = group.rank(), group.size()
        self._experts_per_rank = num_experts // self._size
        self.num_messages = self.sent_bytes = 0

    def fill(self, y: torch.Tensor, ids: torch.Tensor) -> None:
        """Write every row of another rank.  Called by all ranks, in the same order.

        y: [T*K, N]; this rank's rows are set, the rest is zero.  ids: [T, K] int32, expert of each row, -1
        for padding; equal on all ranks.  Raises EngineDeadError if a rank does not answer.
        """
        holder = ids.reshape(-1).div(self._experts_per_rank, rounding_mode="floor")
        rows = [(holder == peer).nonzero(as_tuple=True)[0] for peer in range(self._size)]
        peers = [peer for peer in range(self._size) if peer != self._dist_rank]
        arriving = {peer: y.new_empty(len(rows[peer]), y.shape[1]) for peer in peers if len(rows[peer])}
        own = y[rows[self._dist_rank]]
        try:
            works = [self.group.recv([part], peer, 0) for peer, part in arriving.items()]
            if len(own):
                works += [self.group.send([own], peer, 0) for peer in peers]
                self.num_messages += len(peers)
                self.sent_bytes += len(peers) * own.nbytes
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise _lost(error) from error
        for peer, part in arriving.items():
            y[rows[peer]] = part


class ReduceExchange:
    """All rows summed as integers over the ranks."""

    def __init__(self, group: Backend) -> None:
        self.group = group

    def fill(self, y: torch.Tensor, ids: torch.Tensor) -> None:
        try:
            self.group.allreduce([y.view(-1).view(torch.int32)]).wait()
        except RuntimeError as error:
            raise _lost(error) from error


class ExpertExchange(Protocol):
    """Fills in the rows of other ranks."""

    def fill(self, y: torch.Tensor, ids: torch.Tensor) -> None:
        """See `RowExchange.fill`."""
        ...


class Sums(Protocol):
    """Sums the ranks' partial results."""

    def add_up(self, y: torch.Tensor) -> None: ...

    def gather(self, logits: torch.Tensor, vocab_size: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `RankSums.gather`."""
        ...


TWO_ROUNDS_BYTES = 1 << 18
"""Size from which bytes matter more than messages (3 ranks or more)."""


class RankSums:
    """Sums of summands in rank order, and logits gathered by columns."""

    def __init__(self, group: Backend) -> None:
        self.group = group
        self._dist_rank, self._size = group.rank(), group.size()
        self.num_messages = self.sent_bytes = 0

    def add_up(self, y: torch.Tensor) -> None:
        """y = round(fp32 sum of all ranks' y in rank order).  Called by all, in the same order.

        Raises EngineDeadError if a rank does not answer.
        """
        size, flat = self._size, y.view(-1)
        if size > 2 and y.nbytes >= TWO_ROUNDS_BYTES and len(flat) % size == 0:
            parts = torch.empty_like(flat)
            self._wait(lambda: self.group.alltoall_base(_bytes(parts), _bytes(flat), [], []))
            own = _in_order(parts.view(size, -1))
            self._count(flat.nbytes // size)
            self._all_gather(flat, own)
        else:
            parts = flat.new_empty(size, len(flat))
            self._all_gather(parts, flat)
            flat.copy_(_in_order(parts))

    def gather(self, logits: torch.Tensor, vocab_size: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """At rank 0 [rows, vocab_size]: the columns of all ranks side by side; elsewhere unchanged.

        logits: [rows, columns of this rank], ceil(vocab_size / P) at the first ranks.
        """
        num_rows, share = len(logits), -(-vocab_size // self._size)
        if out is None:
            out = logits.new_empty(num_rows, vocab_size)
        if not num_rows:
            return out
        if self._dist_rank:
            self._send_to_first(torch.nn.functional.pad(logits, (0, share - logits.shape[1])).contiguous())
            return out
        parts = logits.new_empty(self._size, num_rows, share)
        for peer in range(1, self._size):
            self._wait(partial(self.group.recv, [_bytes(parts[peer])], peer, 0))
        for columns, part in zip(out.split(share, dim=1), [logits, *parts[1:]], strict=False):
            columns.copy_(part[:, : columns.shape[1]])
        return out

    def _send_to_first(self, sent: torch.Tensor) -> None:
        self.num_messages += 1
        self.sent_bytes += sent.nbytes
        self._wait(lambda: self.group.send([_bytes(sent)], 0, 0))

    def _all_gather(self, out: torch.Tensor, own: torch.Tensor) -> None:
        self._count(own.nbytes)
        self._wait(lambda: self.group._allgather_base(_bytes(out), _bytes(own)))

    def _count(self, num_bytes: int) -> None:
        self.num_messages += self._size - 1
        self.sent_bytes += (self._size - 1) * num_bytes

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise _lost(error) from error


@dataclass(frozen=True)
class Exchanges:
    """A rank's exchanges; None: the rank has all experts, or whole sums."""

    experts: ExpertExchange | None = None
    sums: Sums | None = None


ALONE = Exchanges()
"""For a rank without others."""


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """View as bytes: some backends lack dtypes."""
    return x.view(-1).view(torch.uint8)


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """Sum over the first dim in order, in fp32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


class RankLostError(EngineDeadError):
    """Another rank left the step, ended, or does not answer."""


def _lost(error: RuntimeError) -> RankLostError:
    return RankLostError(
        "another rank of this instance ended or does not answer within rank_timeout_s; "
        f"restart the instance ({str(error).splitlines()[0]})"
    )


def open_group(
    rendezvous: Path,
    dist_rank: int,
    size: int,
    device: torch.device,
    timeout_s: float = EngineConfig.rank_timeout_s,
) -> Backend:
    """A group of an instance's ranks, apart from the default group.

    rendezvous: a path unique to the instance.  Raises EngineDeadError for an absent rank.
    """
    try:
        return _opened(
            dist.FileStore(str(rendezvous), size), dist_rank, size, device, timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        raise _lost(error) from error


def _opened(
    store: dist.Store, dist_rank: int, size: int, device: torch.device, timeout: timedelta
) -> Backend:
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, dist_rank, size, nccl)
    gloo: Backend = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    return gloo(store, dist_rank, size, options)
