# SPDX-License-Identifier: Apache-2.0
"""Puts that a device issues itself: what the LoRA Server needs of them, and who offers them.

The members of a group start together and have the same memory, each its own copy (OpenSHMEM's symmetric
memory); a put copies a place of the own copy to the same place of another member's.  All is queued on the
current stream and returns at once.  The contract of `contract.Transport` has the same words, but another
life: nobody joins such a group later or returns to it.

Signals count up by additions, since the blocks of one put end in any order: each adds 1 once its bytes are
there, and who sees a signal PUT_BLOCKS further per put sees all bytes of these puts.  Between two puts to the
same signal nothing is ordered, so who puts again to a place waits first until what lay there was used.

Source: InfiniLoRA section 5.1 (IBGDA, push-based communication); OpenSHMEM 1.5 sections 6 and 9.8.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .descriptor import LINE_BYTES, check_signal

PUT_BLOCKS = 8
"""Programs that issue a put, each its part of the bytes."""
WORDS_PER_SIGNAL = LINE_BYTES // 8
POLLS_PER_S = 1_000_000
"""Bounds of waits are counted in looks at a word of the own memory, each of about a microsecond."""
STATUS_BYTES = 16
"""That each program of `put_rows` puts behind its rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricWindow:
    """This member's copy of memory that every member has."""

    label: str
    num_bytes: int
    num_signals: int
    bytes: torch.Tensor
    """uint8 [num_bytes], on the device"""
    words: torch.Tensor
    """int64 [num_signals * 8], on the device; word 8 * i is signal i"""

    def rows(self, start_bytes: int, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The place from these bytes on, as [num_rows, width]."""
        end_bytes = start_bytes + num_rows * width * dtype.itemsize
        return self.bytes[start_bytes:end_bytes].view(dtype).view(num_rows, width)

    def read_signal(self, signal: int) -> int:
        """Present value; waits for the stream."""
        check_signal(self, signal)
        return int(self.words[signal * WORDS_PER_SIGNAL].item())


class AnswerRows(NamedTuple):
    """Rows of deltas and which of them belong to whom they are put to.

    rows: [R, N], a place of the window; row r is of token r // top_k.  token_slots: [T] int32, -1 = the token
    has none.
    ids: [T, top_k] int32 experts, None at a dense site; only those of first_expert to end_expert - 1 are put.
    frame: the step's, with the generations that were asked for (see `deltas.device_frames`).
    generation: [M] int64 what the slots have by now; a row whose slot has a higher one is counted as missing.
    missing: [1] int64, counted before.  state: [1] int64; while it has one of the bits `over`,
    nothing is put.
    """

    rows: torch.Tensor
    token_slots: torch.Tensor
    ids: torch.Tensor | None
    top_k: int
    first_expert: int
    end_expert: int
    frame: torch.Tensor
    generation: torch.Tensor
    missing: torch.Tensor
    state: torch.Tensor
    over: int


class DevicePuts(Protocol):
    """One member of a group."""

    device: torch.device

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def alloc(self, num_bytes: int, num_signals: int) -> SymmetricWindow:
        """Zeroed symmetric memory; every member calls it with the same sizes, in the same order."""
        ...

    def meet(self) -> None:
        """Wait until every member has called it as often.  Raises LoraServerError if one does not come."""
        ...

    def put_pieces(
        self, window: SymmetricWindow, places: Sequence[tuple[int, int]], signal: int, peer: int
    ) -> None:
        """peer's window[offset : offset + num_bytes] = the own for each (offset, num_bytes), then its signal
        += PUT_BLOCKS for each.  One or two places of one byte or more."""
        ...

    def put_rows(
        self, window: SymmetricWindow, answer: AnswerRows, status_bytes: int, signal: int, peer: int
    ) -> None:
        """The rows that belong to the peer go to its window, then PUT_BLOCKS counts of missing rows to
        status_bytes (int64, STATUS_BYTES apart), and its signal += PUT_BLOCKS."""
        ...

    def close(self) -> None: ...


_PLACES = {"ibgda": "moe_lora.dist.transport.nvshmem"}


def check_device_puts(kind: str) -> None:
    """Raises ConfigError where this machine has no such puts."""
    importlib.import_module(_PLACES[kind]).check_machine()


def join_device_group(kind: str, address: str, rank: int, size: int, device: torch.device) -> DevicePuts:
    """Meet the other members at `address` (host:port, where member 0 listens); returns once all are there.

    Raises LoraServerError if they do not come.
    """
    joined: DevicePuts = importlib.import_module(_PLACES[kind]).join_group(address, rank, size, device)
    return joined
