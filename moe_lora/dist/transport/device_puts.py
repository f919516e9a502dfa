# SPDX-License-Identifier: Apache-2.0
"""Puts issued by a device: the LoRA Server's interface, and its implementations.

A group's members start together with equal (symmetric) memory; a put copies a place to another member's same
place, on the current stream.  No member joins later or returns.  Signals count additions: PUT_BLOCKS more per
put cover all its bytes.  Puts to one signal are unordered.

Source: InfiniLoRA section 5.1 (IBGDA, push-based communication); OpenSHMEM 1.5 sections 6 and 9.8.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .contract import LINE_BYTES, check_signal

PUT_BLOCKS = 8
"""Programs per put."""
WORDS_PER_SIGNAL = LINE_BYTES // 8
POLLS_PER_S = 1_000_000
"""Polls of local memory take about a microsecond."""
STATUS_BYTES = 16
"""Bytes per program of `put_rows`, behind the rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricWindow:
    """This member's copy of the symmetric memory."""

    label: str
    num_bytes: int
    num_signals: int
    bytes: torch.Tensor
    """uint8 [num_bytes], on the device"""
    words: torch.Tensor
    """int64 [num_signals * 8], on the device; word 8 * i is signal i"""

    def rows(self, start_bytes: int, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """From start_bytes, as [num_rows, width]."""
        end_bytes = start_bytes + num_rows * width * dtype.itemsize
        return self.bytes[start_bytes:end_bytes].view(dtype).view(num_rows, width)

    def read_signal(self, signal: int) -> int:
        """Present value; waits for the stream."""
        check_signal(self, signal)
        return int(self.words[signal * WORDS_PER_SIGNAL].item())


class AnswerRows(NamedTuple):
    """Rows of deltas, and their owners.

    rows: [R, N], a place of the window; row r is of token r // top_k.  token_slots: [T] int32, -1 = no slot.
    ids: [T, top_k] int32, None at a dense site; only first_expert to end_expert - 1 are put.  frame: the
    step's, with requested generations.  generation: [M] int64 of the slots now; a row with a newer slot
    counts as missing.  missing: [1] int64, initial count.  state: [1] int64; a bit of `over` stops all puts.
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
        """Zeroed symmetric memory; all members make equal calls in equal order."""
        ...

    def meet(self) -> None:
        """Wait for all members.  Raises LoraServerError."""
        ...

    def put_pieces(
        self, window: SymmetricWindow, places: Sequence[tuple[int, int]], signal: int, peer: int
    ) -> None:
        """peer's window[offset : offset + num_bytes] = the own for each (offset, num_bytes), then its signal
        += PUT_BLOCKS for each.  One or two places of at least one byte.
        """
        ...

    def put_rows(
        self, window: SymmetricWindow, answer: AnswerRows, status_bytes: int, signal: int, peer: int
    ) -> None:
        """Put the peer's rows, then PUT_BLOCKS counts of missing rows at status_bytes (int64, STATUS_BYTES
        apart), then signal += PUT_BLOCKS.
        """
        ...

    def close(self) -> None: ...


_PLACES = {"ibgda": "moe_lora.dist.transport.nvshmem"}


def check_device_puts(kind: str) -> None:
    """Raises ConfigError without device puts on this machine."""
    importlib.import_module(_PLACES[kind]).check_machine()


def join_device_group(kind: str, address: str, rank: int, size: int, device: torch.device) -> DevicePuts:
    """Meet the other members at `address`, host:port of member 0.  Raises LoraServerError."""
    joined: DevicePuts = importlib.import_module(_PLACES[kind]).join_group(address, rank, size, device)
    return joined
