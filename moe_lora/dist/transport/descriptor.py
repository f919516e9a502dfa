"""What a peer needs to find a window, as JSON in ASCII, and the checks that all transports share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch

from moe_lora.core.errors import ConfigError, PeerGoneError, PeerUnreachableError

from .contract import Store

VERSION = 1
LINE_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """One window: whose, how large, and the facts of its medium."""

    kind: str
    peer: str
    label: str
    generation: int
    num_bytes: int
    num_signals: int
    medium: dict[str, Any]

    def encode(self) -> bytes:
        """JSON in ASCII."""
        return json.dumps({"version": VERSION, **asdict(self)}).encode("ascii")

    @staticmethod
    def decode(data: bytes, kind: str) -> Descriptor:
        """Raises ValueError if data is no descriptor of this version and this kind of transport."""
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
    """Raises ValueError unless the window itself is as large as its descriptor says."""
    if (num_bytes, num_signals) != (found.num_bytes, found.num_signals):
        raise ValueError(
            f"window {found.label!r} of {found.peer!r} has {num_bytes} bytes and {num_signals} signals, its "
            f"descriptor says {found.num_bytes} and {found.num_signals}; pass descriptors on unchanged"
        )


class Sized(Protocol):
    """What the bounds checks look at."""

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


def check_new_window(owner: str, label: str, known: Container[str], closed: bool) -> None:
    """Raises ValueError if the transport is closed or has a window of that label."""
    if closed:
        raise ValueError(f"transport {owner!r} is closed; make a new one")
    if label in known:
        raise ValueError(f"{owner!r} has a window {label!r}; free it first, or choose another label")


def check_range(window: Sized, offset_bytes: int, num_bytes: int) -> None:
    """Raises ValueError unless the range lies within the window."""
    if offset_bytes < 0 or num_bytes < 0 or offset_bytes + num_bytes > window.num_bytes:
        raise ValueError(
            f"{num_bytes} bytes at offset {offset_bytes} do not fit window {window.label!r} of "
            f"{window.num_bytes} bytes; send less, or allocate the window larger"
        )


def check_signal(window: Sized, signal: int, value: int = 0) -> None:
    """Raises ValueError for a signal the window lacks or a value that is no unsigned 64-bit number."""
    if not 0 <= signal < window.num_signals:
        raise ValueError(
            f"window {window.label!r} has {window.num_signals} signals, numbered from 0; {signal} is "
            "none of them"
        )
    if not 0 <= value < 1 << 64:
        raise ValueError(f"signal value {value} is no unsigned 64-bit number")


def check_tensor(tensor: torch.Tensor, role: str) -> int:
    """Bytes of a tensor. Raises ValueError unless it is contiguous and on the CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{role} must be a contiguous CPU tensor, not shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()} on {tensor.device}; call .contiguous() or .cpu() first"
        )
    return tensor.nbytes


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as uint8 [nbytes]."""
    return tensor.reshape(-1).view(torch.uint8)


# Names in a shared store: who is the newest incarnation, and where its windows are.


T = TypeVar("T")

_POLL_S = 0.01


class Directory:
    """One process's entry in its cluster's store, per kind of transport. Without a store it lists nothing."""

    def __init__(self, store: Store | None, kind: str, name: str) -> None:
        """Takes the next generation of that name, also among racing claimants; 0 without a store."""
        self._store = store
        self._prefix = f"moe_lora/transport/{kind}"
        self._name = name
        self.generation = 0 if store is None else self._claim(store)

    def _claim(self, store: Store) -> int:
        key = f"{self._prefix}/{self._name}/generation"
        known = store.get(key).decode() if store.check([key]) else ""
        while True:
            mine = str(int(known or 0) + 1)
            found = store.compare_set(key, known, mine).decode()
            if found == mine:
                return int(mine)
            known = found

    def publish(self, label: str, descriptor: bytes) -> None:
        """Make a window findable. Raises PeerGoneError if a newer incarnation has taken the name over."""
        if self._store is None:
            return
        newest = int(self._store.get(f"{self._prefix}/{self._name}/generation"))
        if newest != self.generation:
            raise PeerGoneError(
                f"{self._name!r} generation {self.generation} was superseded by generation {newest}; end "
                "this process, or give it a name of its own"
            )
        self._store.set(f"{self._prefix}/{self._name}/window/{label}", descriptor.decode("ascii"))

    def find(self, peer: str, label: str, attach: Callable[[bytes], T], timeout_s: float) -> T:
        """attach(descriptor) of the newest window; tries again until timeout_s while there is none or it is
        dead. Raises PeerUnreachableError; ConfigError without a store."""
        if self._store is None:
            raise ConfigError(
                f"{self._name!r} has no store to find {peer!r} in; give make_transport store=, or attach by "
                "the descriptor that the peer sends"
            )
        key = f"{self._prefix}/{peer}/window/{label}"
        deadline = time.monotonic() + timeout_s
        reason = "it has not published it"
        while True:
            if self._store.check([key]):
                try:
                    return attach(self._store.get(key))
                except PeerUnreachableError as error:
                    reason = str(error)
            if time.monotonic() >= deadline:
                raise PeerUnreachableError(
                    f"no window {label!r} of peer {peer!r} within timeout_s={timeout_s:g} ({reason}); check "
                    "that the peer runs, uses the same store and transport, or raise the timeout"
                )
            time.sleep(_POLL_S)
