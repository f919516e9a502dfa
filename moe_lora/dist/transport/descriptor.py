# SPDX-License-Identifier: Apache-2.0
"""Descriptors of windows, as JSON in ASCII, and checks shared by all transports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

VERSION = 2
LINE_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """One window: owner, size, and facts of its medium."""

    kind: str
    peer: str
    label: str
    num_bytes: int
    num_signals: int
    medium: dict[str, Any]

    def encode(self) -> bytes:
        """JSON in ASCII."""
        return json.dumps({"version": VERSION, **asdict(self)}).encode("ascii")

    @staticmethod
    def decode(data: bytes, kind: str) -> Descriptor:
        """Raises ValueError unless data is a descriptor of this version and kind of transport."""
        try:
            fields = json.loads(data)
            version = fields.pop("version")
            found = Descriptor(**fields) if version == VERSION else None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{data[:60]!r} is no window descriptor ({error!r})") from None
        if found is None:
            raise ValueError(
                f"the peer's window descriptor has version {version}, this process speaks {VERSION}; "
                "run the same version of moe_lora in all processes"
            )
        if found.kind != kind:
            raise ValueError(
                f"{found.peer!r} offers window {found.label!r} over transport {found.kind!r}, this process "
                f"uses {kind!r}; set the same transport in all processes"
            )
        return found


def check_same_size(found: Descriptor, num_bytes: int, num_signals: int) -> None:
    """Raises ValueError unless the window has its descriptor's size."""
    if (num_bytes, num_signals) != (found.num_bytes, found.num_signals):
        raise ValueError(
            f"window {found.label!r} of {found.peer!r} has {num_bytes} bytes and {num_signals} signals, its "
            f"descriptor says {found.num_bytes} and {found.num_signals}; pass descriptors on unchanged"
        )


class Sized(Protocol):
    """Operand of bounds checks."""

    @property
    def label(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_signals(self) -> int: ...


def check_sizes(label: str, num_bytes: int, num_signals: int) -> None:
    """Raises ValueError below zero."""
    if num_bytes < 0 or num_signals < 0:
        raise ValueError(
            f"window {label!r}: num_bytes={num_bytes} and num_signals={num_signals} must be 0 or more"
        )


def check_range(window: Sized, offset_bytes: int, num_bytes: int) -> None:
    """Raises ValueError unless the range lies within the window."""
    if offset_bytes < 0 or num_bytes < 0 or offset_bytes + num_bytes > window.num_bytes:
        raise ValueError(
            f"{num_bytes} bytes at offset {offset_bytes} do not fit window {window.label!r} of "
            f"{window.num_bytes} bytes; send less, or allocate the window larger"
        )


def check_signal(window: Sized, signal: int, value: int = 0) -> None:
    """Raises ValueError for a missing signal or a value that is no unsigned 64-bit number."""
    if not 0 <= signal < window.num_signals:
        raise ValueError(
            f"window {window.label!r} has {window.num_signals} signals, numbered from 0; {signal} is "
            "none of them"
        )
    if not 0 <= value < 1 << 64:
        raise ValueError(f"signal value {value} is no unsigned 64-bit number")


def check_tensor(tensor: torch.Tensor, role: str) -> int:
    """Bytes of a tensor.  Raises ValueError unless contiguous and on the CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{role} must be a contiguous CPU tensor, not shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()} on {tensor.device}; call .contiguous() or .cpu() first"
        )
    return tensor.nbytes


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as uint8 [nbytes]."""
    return tensor.reshape(-1).view(torch.uint8)
