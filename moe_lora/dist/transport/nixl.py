# SPDX-License-Identifier: Apache-2.0
"""Transport over NIXL (UCX underneath): one-sided writes with a notification, also between hosts.

Optional: pip install 'moe-lora[nixl]'.  Waiters collect notifications and raise the local words.  NIXL's
progress thread burns a core and is off: connections, and puts between hosts (TCP), progress only while the
target waits or puts.  With Debian's Open MPI, UCX_MODULES=cma avoids a crash at exit.  A header page precedes
each window's data; attach and `quiet` read it.
"""

from __future__ import annotations

import base64
import logging
import mmap
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_lora.core.errors import ConfigError, PeerGoneError, PeerUnreachableError

from .contract import (
    Descriptor,
    RemoteWindow,
    Transport,
    Window,
    as_bytes,
    check_range,
    check_same_size,
    check_signal,
    check_tensor,
)
from .shm_library import SignalWaiter, SignalWords, lines

_log = logging.getLogger(__name__)

_MAGIC = int.from_bytes(b"moelora1", "little")
_HEADER = struct.Struct("<QQQQQ")
_FREED_OFFSET = 32
_NOTICE = struct.Struct("<qqQ")
# Kept for the process's life: peers may still write there.
_discarded: list[NixlWindow] = []
_SPIN_S = 200e-6
_PAUSE_SHARE, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 50e-6, 2e-3


class NixlWindow(Window):
    """Registered memory."""

    def __init__(
        self, owner: NixlTransport, number: int, label: str, num_bytes: int, num_signals: int
    ) -> None:
        super().__init__(owner, number, label, num_bytes, num_signals)
        self._transport = owner
        self._map = mmap.mmap(-1, mmap.PAGESIZE + num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._tag = secrets.randbits(62)
        header = _HEADER.pack(_MAGIC, self._tag, num_bytes, num_signals, 0)
        self._memory[: _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self.bytes = self._memory[mmap.PAGESIZE :]
        self.words = SignalWords(lines(num_signals), owner.doorbell)
        self._registered = owner.agent.register_memory(self._memory)

    def medium(self) -> dict[str, Any]:
        """NIXL's metadata and address."""
        agent, metadata = self._transport.identity()
        return {
            "agent": agent,
            "metadata": base64.b64encode(metadata).decode(),
            "address": self._memory.data_ptr(),
            "tag": self._tag,
            "window": self.number,
        }

    def read_signal(self, signal: int) -> int:
        """Collects notifications first."""
        check_signal(self, signal)
        self._transport.collect()
        return self.words.read(signal)

    def discard(self) -> None:
        """Return the pages but keep the addresses registered: late puts do no harm, views read zeros."""
        self._map.madvise(mmap.MADV_DONTNEED)
        self._memory[_FREED_OFFSET] = 1
        _discarded.append(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfer:
    """A write or read under way, and a notice for the peer after this and all earlier transfers.

    handle None: a notice alone.  tensor: kept to the end.
    """

    handle: Any = None
    registered: Any = None
    tensor: torch.Tensor | None = None
    notice: bytes = b""


class NixlRemoteWindow(RemoteWindow):
    """A peer's window, and its transfers under way."""

    def __init__(self, found: Descriptor, transport: NixlTransport) -> None:
        super().__init__(found)
        self.agent: str = found.medium["agent"]
        self.address: int = found.medium["address"]
        self.number: int = found.medium["window"]
        self.tag: int = found.medium["tag"]
        self.reachable = True
        self.process_lost = False
        self.pending: list[Transfer] = []
        self._transport = transport

    def signal(self, signal: int, value: int) -> None:
        """Behind earlier puts."""
        self._transport.put_signal(self, 0, None, signal, value)

    def alive(self) -> bool:
        """True until a failed send."""
        return self.reachable

    def gone(self, reason: object, process_lost: bool = True) -> PeerGoneError:
        """Marks the window as lost; returns the error."""
        self.reachable = False
        self.process_lost |= process_lost
        return self.gone_error(reason)


class NixlTransfers:
    """Transfers of one agent."""

    def __init__(
        self,
        agent: Any,
        errors: tuple[type[Exception], ...],
        lock: threading.RLock,
        meanwhile: Callable[[], None],
    ) -> None:
        """lock: around uses of the agent.  meanwhile: called during waits."""
        self._agent, self._errors, self._lock, self._meanwhile = agent, errors, lock, meanwhile

    def start(
        self, operation: str, tensor: torch.Tensor, remote: NixlRemoteWindow, offset: int, notice: bytes = b""
    ) -> Transfer:
        """Start a WRITE or READ.  Raises PeerGoneError."""
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
        """Progress transfers, drop finished ones in order, and send notices; True if none is left.

        Raises PeerGoneError.
        """
        # NIXL's own notice could overtake an earlier write.
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
        """Wait for the present transfers.  Raises PeerGoneError, also after timeout_s."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            last = transfers[-1] if transfers else None
        while not self.ended(transfers, remote) and last in transfers:
            if time.monotonic() > deadline:
                self.give_up(transfers)
                raise remote.gone(f"no answer within timeout_s={timeout_s:g}")
            self._meanwhile()

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


class NixlTransport(Transport):
    """See the contract."""

    kind = "nixl"
    local_window = NixlWindow

    def __init__(self, *, name: str, timeout_s: float = 30.0) -> None:
        """timeout_s: of one transfer; then the peer counts as gone."""
        try:
            from nixl import _bindings
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigError(
                f"transport 'nixl' can't be imported ({error}); pip install 'moe-lora[nixl]', or use "
                "another transport"
            ) from None

        self.doorbell = lines(1)
        super().__init__(name, SignalWaiter(self.doorbell, 0.0))
        # A name per incarnation: a returning peer has no old state.
        self._agent_name = f"{name}#{secrets.token_hex(8)}"
        config = nixl_agent_config(enable_prog_thread=False, backends=[])
        self.agent: Any = nixl_agent(self._agent_name, config)
        self.agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
        self._timeout_s = timeout_s
        self._errors: tuple[type[Exception], ...] = tuple(
            found
            for found in vars(_bindings).values()
            if isinstance(found, type) and issubclass(found, Exception)
        )
        self._transfers = NixlTransfers(self.agent, self._errors, self._lock, self.collect)

    def identity(self) -> tuple[str, bytes]:
        """Agent name and metadata, for descriptors."""
        with self._lock:
            return self._agent_name, self.agent.get_agent_metadata()

    def attach(self, descriptor: bytes) -> NixlRemoteWindow:
        """Connect, and read the header."""
        found = Descriptor.decode(descriptor, self.kind)
        remote = NixlRemoteWindow(found, self)
        lost: tuple[type[Exception], ...] = (PeerGoneError, *self._errors)
        try:
            with self._lock:
                self.agent.add_remote_agent(base64.b64decode(found.medium["metadata"]))
                self._remotes.add(remote)
            size = self._read_header(remote)
        except lost as error:
            self.detach(remote)
            raise PeerUnreachableError(
                f"window {found.label!r} of {found.peer!r} can't be reached: {error}; check that its process "
                "runs and waits for signals"
            ) from None
        try:
            check_same_size(found, *size)
        except ValueError:
            self.detach(remote)
            raise
        return remote

    def _read_header(self, remote: NixlRemoteWindow) -> tuple[int, int]:
        header = torch.zeros(_HEADER.size, dtype=torch.uint8)
        self._transfers.finish([self._transfers.start("READ", header, remote, 0)], remote, self._timeout_s)
        magic, tag, num_bytes, num_signals, freed = _HEADER.unpack(bytes(header.numpy()))
        if freed or (magic, tag) != (_MAGIC, remote.tag):
            raise remote.gone("it was freed", process_lost=False)
        return num_bytes, num_signals

    def put_signal(
        self, dst: NixlRemoteWindow, offset_bytes: int, src: torch.Tensor | None, signal: int, value: int
    ) -> None:
        """A notice waits for all earlier writes."""
        check_signal(dst, signal, value)
        num_bytes = 0 if src is None else check_tensor(src, "src")
        check_range(dst, offset_bytes if num_bytes else 0, num_bytes)
        notice = _NOTICE.pack(dst.number, signal, value)
        with self._lock:
            self._check_live(dst)
            transfer = Transfer(notice=notice)
            if src is not None and num_bytes:
                offset = mmap.PAGESIZE + offset_bytes
                transfer = self._transfers.start("WRITE", as_bytes(src), dst, offset, notice)
            dst.pending.append(transfer)
            self._transfers.ended(dst.pending, dst)

    def _check_live(self, remote: NixlRemoteWindow) -> None:
        if remote not in self._remotes or not remote.reachable:
            raise remote.gone("its process has ended, or it was freed or detached from", process_lost=False)

    def get(self, src: NixlRemoteWindow, offset_bytes: int, out: torch.Tensor) -> None:
        """Read, and wait for the bytes."""
        check_range(src, offset_bytes, check_tensor(out, "out"))
        self._check_live(src)
        if out.nbytes:
            transfer = self._transfers.start("READ", as_bytes(out), src, mmap.PAGESIZE + offset_bytes)
            self._transfers.finish([transfer], src, self._timeout_s)

    def fence(self, dst: NixlRemoteWindow) -> None:
        """Wait for earlier puts."""
        self._check_live(dst)
        self._transfers.finish(dst.pending, dst, self._timeout_s)
        self._check_live(dst)

    def quiet(self, dst: NixlRemoteWindow) -> None:
        """Wait for earlier puts, and check the window."""
        self.fence(dst)
        self._read_header(dst)

    def collect(self) -> None:
        """Turn notifications into signals; also progresses UCX."""
        with self._lock:
            if self._closed:
                return
            for remote in self._remotes:
                if remote.pending:
                    self._push(remote)
            for notices in self.agent.get_new_notifs().values():
                for notice in notices:
                    self._obey(notice)

    def _obey(self, notice: bytes) -> None:
        try:
            number, signal, value = _NOTICE.unpack(notice)
            if number in self._windows:
                window = self._windows[number]
                check_signal(window, signal, value)
                window.words.raise_to(signal, value)
        except (ValueError, struct.error) as error:
            _log.warning("a notice that came over NIXL is dropped: %s", error)

    def _push(self, remote: NixlRemoteWindow) -> None:
        try:
            self._transfers.ended(remote.pending, remote)
        except PeerGoneError as error:
            _log.info("%s", error)

    def wait_any(self, waits: Sequence[tuple[Any, int, int]], timeout_s: float | None) -> int | None:
        """Collect notifications until a signal reaches its value."""
        start = time.monotonic()
        while True:
            self.collect()
            passed_s = time.monotonic() - start
            pause_s = min(max(_PAUSE_SHARE * passed_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
            if timeout_s is not None:
                pause_s = min(pause_s, max(0.0, timeout_s - passed_s))
            found = self._waiter.any(waits, pause_s if passed_s > _SPIN_S else 0.0)
            if found is not None or (timeout_s is not None and passed_s >= timeout_s):
                return found

    def detach(self, remote: NixlRemoteWindow) -> None:
        """Release a peer's window, and an ended process with its last window."""
        with self._lock:
            if remote not in self._remotes:
                return
            self._remotes.discard(remote)
            remote.reachable = False
            self._transfers.give_up(remote.pending)
            # Keep a live process: over TCP a removed process can't return.
            if remote.process_lost and all(other.agent != remote.agent for other in self._remotes):
                try:
                    self.agent.remove_remote_agent(remote.agent)
                except self._errors:
                    _log.info("NIXL had lost %s before it was detached from", remote.agent)

    def end(self) -> None:
        """NIXL's files and threads go with the agent."""
        with self._lock:
            del self.agent, self._transfers
