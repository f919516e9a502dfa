"""What windows in this process's own memory have in common, whatever the medium."""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

import torch

from .descriptor import Descriptor, check_signal, check_sizes
from .shm_library import SignalWords


class Owner(Protocol):
    """The transport that a window belongs to."""

    kind: str
    name: str
    generation: int


OwnerT = TypeVar("OwnerT", bound=Owner)


class LocalWindow(ABC, Generic[OwnerT]):
    """A `contract.Window`; subclasses make `bytes` and `words`, and free them."""

    bytes: torch.Tensor
    words: SignalWords

    def __init__(self, owner: OwnerT, label: str, num_bytes: int, num_signals: int) -> None:
        check_sizes(label, num_bytes, num_signals)
        self.label, self.num_bytes, self.num_signals = label, num_bytes, num_signals
        self._owner = owner

    @abstractmethod
    def medium(self) -> dict[str, Any]:
        """The facts of the medium by which peers find the window."""

    def descriptor(self) -> builtins.bytes:
        """As in the contract."""
        return Descriptor(
            kind=self._owner.kind,
            peer=self._owner.name,
            label=self.label,
            generation=self._owner.generation,
            num_bytes=self.num_bytes,
            num_signals=self.num_signals,
            medium=self.medium(),
        ).encode()

    def read_signal(self, signal: int) -> int:
        """Present value."""
        check_signal(self, signal)
        return self.words.read(signal)

    def set_signal(self, signal: int, value: int) -> None:
        """Set the value here and wake this process's waiters."""
        check_signal(self, signal, value)
        self.words.set(signal, value)
