"""Windows of the NIXL transport: registered memory of this process, and that of peers."""

from __future__ import annotations

import base64
import logging
import mmap
import secrets
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_lora.core.errors import PeerGoneError

from .descriptor import Descriptor, check_range, check_signal
from .shm_library import LocalWindow, SignalWords, lines

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


# NIXL's reads and writes from their start to their end.


_log = logging.getLogger(__name__)


class NixlTransfers:
    """Starts and ends the transfers of one agent."""

    def __init__(
        self,
        agent: Any,
        errors: tuple[type[Exception], ...],
        lock: threading.RLock,
        meanwhile: Callable[[], None],
    ) -> None:
        """errors: what NIXL raises.  lock: held around each use of the agent.  meanwhile: done while
        waiting."""
        self._agent, self._errors, self._lock, self._meanwhile = agent, errors, lock, meanwhile

    def start(
        self, operation: str, tensor: torch.Tensor, remote: NixlRemoteWindow, offset: int, notice: bytes = b""
    ) -> Transfer:
        """Begin to WRITE or READ; `ended` sends the notice. Raises PeerGoneError."""
        with self._lock:
            return self._start(operation, tensor, remote, offset, notice)

    def _start(
        self, operation: str, tensor: torch.Tensor, remote: NixlRemoteWindow, offset: int, notice: bytes
    ) -> Transfer:
        registered = self._agent.register_memory([(tensor.data_ptr(), tensor.nbytes, 0, "")], "DRAM")
        here = self._agent.get_xfer_descs([(tensor.data_ptr(), tensor.nbytes, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(remote.address + offset, tensor.nbytes, 0)], "DRAM")
        try:
            handle = self._agent.initialize_xfer(operation, here, there, remote.agent, b"")
            self._agent.transfer(handle)
        except self._errors as error:
            self._agent.deregister_memory(registered)
            raise remote.gone(error) from None
        return Transfer(handle=handle, registered=registered, tensor=tensor, notice=notice)

    def ended(self, transfers: list[Transfer], remote: NixlRemoteWindow) -> bool:
        """Let transfers get on, drop those that are done, in their order, and send their notices.

        Returns whether none is left.  Raises PeerGoneError.
        """
        # NIXL could send the notices itself, but then one would overtake an earlier write under way.
        with self._lock:
            while transfers:
                try:
                    state = self._advance(transfers[0], remote)
                    reason: object = "its process has ended"
                except self._errors as error:
                    state, reason = "ERR", error
                if state == "PROC":
                    return False
                self._release(transfers.pop(0))
                if state != "DONE":
                    self.give_up(transfers)
                    raise remote.gone(reason)
        return True

    def _advance(self, transfer: Transfer, remote: NixlRemoteWindow) -> str:
        state = "DONE" if transfer.handle is None else str(self._agent.check_xfer_state(transfer.handle))
        if state == "DONE" and transfer.notice:
            self._agent.send_notif(remote.agent, transfer.notice)
        return state

    def finish(self, transfers: list[Transfer], remote: NixlRemoteWindow, timeout_s: float) -> None:
        """Wait until the transfers that are in the list by now have ended; other threads may add to it.

        Raises PeerGoneError, also after timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            last = transfers[-1] if transfers else None
        while not self.ended(transfers, remote) and last in transfers:
            if time.monotonic() > deadline:
                self.give_up(transfers)
                raise remote.gone(f"no answer within timeout_s={timeout_s:g}")
            self._meanwhile()  # the peer may be waiting for this process to take what it puts

    def give_up(self, transfers: list[Transfer]) -> None:
        """Cancel transfers, and empty the list."""
        while transfers:
            self._release(transfers.pop())

    def _release(self, transfer: Transfer) -> None:
        if transfer.handle is None:
            return
        with self._lock:
            try:
                self._agent.release_xfer_handle(transfer.handle)
            except self._errors:
                _log.warning("NIXL keeps a transfer that can't be cancelled")
            self._agent.deregister_memory(transfer.registered)
