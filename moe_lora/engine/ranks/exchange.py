"""Outputs of experts travel between the ranks that hold them, so that every rank has all rows.

Legend: T token rows, K experts per token, N output width, P ranks.

Rows are moved, never added up, so each rank then sums the same bits in the same order as one that holds all
experts.  Two ways:

- `RowExchange` sends each rank's own rows to each other rank, T*K*(P-1)/P rows in and as many out with even
  routing, one message per pair.  All ranks know all ids, so counts need no message.  The way on CPU.
- `ReduceExchange` adds up all T*K rows as integers, of which all but one summand are zero: exact, sign of
  zero included, at twice the bytes.  Its sizes don't depend on the ids, so nothing waits for a device to tell
  them, and a CUDA graph can hold it.  The way on CUDA.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from moe_lora.core.errors import EngineDeadError

Backend: TypeAlias = Any
"""`ProcessGroupGloo` or `ProcessGroupNCCL`, whose methods torch's type stubs do not know."""

TIMEOUT_S = 300.0
"""How long a rank waits for another: as far apart as two ranks may be with compiling the same layer."""
LOOPBACK = "127.0.0.1"


class RowExchange:
    """Own rows to every other rank.  num_messages, sent_bytes: since the start."""

    def __init__(self, group: Backend, num_experts: int) -> None:
        self._group = group
        self._dist_rank, self._size = group.rank(), group.size()
        self._experts_per_rank = num_experts // self._size
        self.num_messages = self.sent_bytes = 0

    def fill(self, y: torch.Tensor, ids: torch.Tensor) -> None:
        """Write every row that another rank computed.  Called by all ranks, in the same order.

        y: [T*K, N]; this rank's rows hold their values, all others are zero.  ids: [T, K] int32, expert of
        each row, -1 for padding; equal on all ranks.  Raises EngineDeadError if a rank does not answer.
        """
        holder = ids.reshape(-1).div(self._experts_per_rank, rounding_mode="floor")
        rows = [(holder == peer).nonzero(as_tuple=True)[0] for peer in range(self._size)]
        peers = [peer for peer in range(self._size) if peer != self._dist_rank]
        arriving = {peer: y.new_empty(len(rows[peer]), y.shape[1]) for peer in peers if len(rows[peer])}
        own = y[rows[self._dist_rank]]
        try:
            works = [self._group.recv([part], peer, 0) for peer, part in arriving.items()]
            if len(own):
                works += [self._group.send([own], peer, 0) for peer in peers]
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
        self._group = group

    def fill(self, y: torch.Tensor, ids: torch.Tensor) -> None:
        """As `RowExchange.fill`."""
        try:
            self._group.allreduce([y.view(-1).view(torch.int32)]).wait()
        except RuntimeError as error:
            raise _lost(error) from error


ExpertExchange: TypeAlias = RowExchange | ReduceExchange
"""Fills in what other ranks computed."""


def _lost(error: RuntimeError) -> EngineDeadError:
    return EngineDeadError(
        "another rank of this instance ended or does not answer; "
        f"restart the instance ({str(error).splitlines()[0]})"
    )


def open_group(rendezvous: Path, dist_rank: int, size: int, device: torch.device) -> Backend:
    """The ranks of one instance on one host, apart from any default group of the process.

    rendezvous: a file that all ranks name and nobody else does.
    """
    store = dist.FileStore(str(rendezvous), size)
    timeout = timedelta(seconds=TIMEOUT_S)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, dist_rank, size, nccl)
    gloo: Backend = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    return gloo(store, dist_rank, size, options)
