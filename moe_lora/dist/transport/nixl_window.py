"""Windows of the NIXL transport: registered memory of this process, and that of peers."""

from __future__ import annotations

import base64
import mmap
import secrets
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_lora.core.errors import PeerGoneError

from .descriptor import Descriptor, check_range, check_signal
from .shm_library import SignalWords, lines
from .window import LocalWindow

if TYPE_CHECKING:
    from .nixl import NixlTransport

MAGIC = int.from_bytes(b"moelora1", "little")
HEADER = struct.Struct("<QQQQQ")
_FREED_OFFSET = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfer:
    """A write or read under way, and what to tell the peer once it and those before it are done.

    handle, registered: NIXL's; None for a notice alone.  tensor: kept till the end.  notice: b"" for none.
    """

    handle: Any = None
    registered: Any = None
    tensor: torch.Tensor | None = None
    notice: bytes = b""


class NixlWindow(LocalWindow["NixlTransport"]):
    """Registered memory."""

    def __init__(
        self, owner: NixlTransport, number: int, label: str, num_bytes: int, num_signals: int
    ) -> None:
        super().__init__(owner, label, num_bytes, num_signals)
        self.number = number
        self._map = mmap.mmap(-1, mmap.PAGESIZE + num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._tag = secrets.randbits(62)
        header = HEADER.pack(MAGIC, self._tag, num_bytes, num_signals, 0)
        self.memory[: HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self.bytes = self.memory[mmap.PAGESIZE :]
        self.words = SignalWords(lines(num_signals), owner.doorbell)

    def medium(self) -> dict[str, Any]:
        """NIXL's metadata and the address."""
        agent, metadata = self._owner.identity()
        return {
            "agent": agent,
            "metadata": base64.b64encode(metadata).decode(),
            "address": self.memory.data_ptr(),
            "tag": self._tag,
            "window": self.number,
        }

    def read_signal(self, signal: int) -> int:
        """Present value, after collecting what has arrived."""
        check_signal(self, signal)
        self._owner.collect()
        return super().read_signal(signal)

    def free(self) -> None:
        """Later puts change nothing, and the sender's next quiet raises PeerGoneError; views read zeros."""
        self._owner.forget(self)

    def discard(self) -> None:
        """Give the pages back, and keep the addresses: a late put of a peer must hit nothing else."""
        self._map.madvise(mmap.MADV_DONTNEED)
        self.memory[_FREED_OFFSET] = 1


class NixlRemoteWindow:
    """A peer's window, and the transfers to it that are under way."""

    def __init__(self, found: Descriptor, transport: NixlTransport) -> None:
        self.peer, self.label, self.generation = found.peer, found.label, found.generation
        self.num_bytes, self.num_signals = found.num_bytes, found.num_signals
        self.agent: str = found.medium["agent"]
        self.address: int = found.medium["address"]
        self.number: int = found.medium["window"]
        self.tag: int = found.medium["tag"]
        self.reachable = True
        self.process_lost = False
        self.pending: list[Transfer] = []
        self._transport = transport

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor | None:
        """None: the memory is not mapped here."""
        check_range(self, offset_bytes, num_bytes)
        return None

    def signal(self, signal: int, value: int) -> None:
        """Raise a signal behind the puts before it."""
        self._transport.put_signal(self, 0, None, signal, value)

    def alive(self) -> bool:
        """True until something sent did not arrive."""
        return self.reachable

    def gone(self, reason: object, process_lost: bool = True) -> PeerGoneError:
        """Marks the window as lost; the error to raise."""
        self.reachable = False
        self.process_lost |= process_lost
        return PeerGoneError(
            f"window {self.label!r} of {self.peer!r} generation {self.generation} is gone ({reason}); open "
            "its newest window"
        )
