"""Transport over NIXL (UCX underneath): one-sided writes with a notification, also between hosts.

Optional: pip install 'moe-lora[nixl]'.  Signals travel as notifications; whoever waits collects them and
raises the local words.  NIXL's progress thread stays off, as it burns a core: so connecting, and between
hosts (TCP) every put, gets on only while the target waits or puts.  UCX reads its own variables, such as
UCX_TLS=tcp,self or UCX_NET_DEVICES=eth0.  Where Debian's Open MPI is installed, UCX_MODULES=cma avoids a
crash at exit.

A header page before each window's data {magic, tag, num_bytes, num_signals, freed} is read when attaching and
in `quiet`, which is how a freed window is noticed.
"""

from __future__ import annotations

import base64
import itertools
import logging
import mmap
import secrets
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import torch

from moe_lora.core.errors import ConfigError, PeerGoneError, PeerUnreachableError

from .contract import RemoteWindow, Store, Window
from .descriptor import (
    Descriptor,
    Directory,
    as_bytes,
    check_new_window,
    check_range,
    check_same_size,
    check_signal,
    check_tensor,
)
from .nixl_window import HEADER, MAGIC, NixlRemoteWindow, NixlTransfers, NixlWindow, Transfer
from .shm_library import SignalWaiter, lines, too_late

_log = logging.getLogger(__name__)

_NOTICE = struct.Struct("<qqQ")
# Windows that were freed, for as long as the process lives: peers may write to their addresses once more.
_discarded: list[NixlWindow] = []
# A pause is this share of the time waited so far, so that it adds little to that, within limits.
_PAUSE_SHARE, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 50e-6, 2e-3


class NixlTransport:
    """NIXL writes with notifications; see the contract."""

    kind = "nixl"

    def __init__(
        self,
        *,
        name: str,
        store: Store | None = None,
        spin_s: float = 200e-6,
        timeout_s: float = 30.0,
        error_handling: str = "none",
    ) -> None:
        """spin_s: how long a wait looks without pause; then pauses grow from 50 us to 2 ms.
        timeout_s: of one transfer, after which the peer counts as gone.  error_handling: UCX's mode,
        "none" (quicker on one host) or "peer"."""
        try:
            from nixl import _bindings
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigError(
                f"transport 'nixl' can't be imported ({error}); pip install 'moe-lora[nixl]', or use "
                "another transport"
            ) from None

        self.name = name
        self._directory = Directory(store, self.kind, name)
        self.generation = self._directory.generation
        # A name per incarnation: a peer that returns is a new agent, free of what is left of the old one.
        self._agent_name = f"{name}#{self.generation}-{secrets.token_hex(4)}"
        config = nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = nixl_agent(self._agent_name, config)
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": error_handling})
        self._lock = threading.RLock()
        self._timeout_s, self._spin_s = timeout_s, spin_s
        self._errors: tuple[type[Exception], ...] = tuple(
            found
            for found in vars(_bindings).values()
            if isinstance(found, type) and issubclass(found, Exception)
        )
        self.doorbell = lines(1)
        self._waiter = SignalWaiter(self.doorbell, 0.0)  # the loop in wait_any spins
        self._transfers = NixlTransfers(self._agent, self._errors, self._lock, self.collect)
        self._numbers = itertools.count()
        self._windows: dict[int, tuple[NixlWindow, Any]] = {}
        self._remotes: set[NixlRemoteWindow] = set()
        self._closed = False

    def identity(self) -> tuple[str, bytes]:
        """Agent name and metadata, for descriptors."""
        with self._lock:
            return self._agent_name, self._agent.get_agent_metadata()

    def alloc(self, label: str, num_bytes: int, num_signals: int) -> NixlWindow:
        """A window of registered memory."""
        with self._lock:
            known = {window.label for window, _ in self._windows.values()}
            check_new_window(self.name, label, known, self._closed)
            window = NixlWindow(self, next(self._numbers), label, num_bytes, num_signals)
            self._windows[window.number] = window, self._agent.register_memory(window.memory)
        self._directory.publish(label, window.descriptor())
        return window

    def forget(self, window: NixlWindow) -> None:
        """Called by a window that is freed."""
        with self._lock:
            if window.number in self._windows:
                # It stays registered: a late put must end well at the sender, too, and change nothing here.
                window.discard()
                _discarded.append(self._windows.pop(window.number)[0])

    def attach(self, descriptor: bytes) -> NixlRemoteWindow:
        """Connect to the window's owner, and read the window's header."""
        return self._attach(descriptor, self._timeout_s)

    def open(self, peer: str, label: str, timeout_s: float) -> NixlRemoteWindow:
        """Attach to the newest window of that name."""
        return self._directory.find(peer, label, lambda data: self._attach(data, timeout_s), timeout_s)

    def _attach(self, descriptor: bytes, timeout_s: float) -> NixlRemoteWindow:
        found = Descriptor.decode(descriptor, self.kind)
        remote = NixlRemoteWindow(found, self)
        lost: tuple[type[Exception], ...] = (PeerGoneError, *self._errors)
        try:
            with self._lock:
                self._agent.add_remote_agent(base64.b64decode(found.medium["metadata"]))
                self._remotes.add(remote)
            size = self._read_header(remote, timeout_s)
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

    def _read_header(self, remote: NixlRemoteWindow, timeout_s: float) -> tuple[int, int]:
        header = torch.zeros(HEADER.size, dtype=torch.uint8)
        self._transfers.finish([self._transfers.start("READ", header, remote, 0)], remote, timeout_s)
        magic, tag, num_bytes, num_signals, freed = HEADER.unpack(bytes(header.numpy()))
        if freed or (magic, tag) != (MAGIC, remote.tag):
            raise remote.gone("it was freed", process_lost=False)
        return num_bytes, num_signals

    def put_signal(
        self, dst: RemoteWindow, offset_bytes: int, src: torch.Tensor | None, signal: int, value: int
    ) -> None:
        """Write, then notify.  The put gets on while this process puts, waits, fences or quiets; a notice
        waits until all writes before it are done."""
        assert isinstance(dst, NixlRemoteWindow)
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

    def get(self, src: RemoteWindow, offset_bytes: int, out: torch.Tensor) -> None:
        """Read, and wait for it."""
        assert isinstance(src, NixlRemoteWindow)
        check_range(src, offset_bytes, check_tensor(out, "out"))
        self._check_live(src)
        if out.nbytes:
            transfer = self._transfers.start("READ", as_bytes(out), src, mmap.PAGESIZE + offset_bytes)
            self._transfers.finish([transfer], src, self._timeout_s)

    def fence(self, dst: RemoteWindow) -> None:
        """Wait for the puts before."""
        assert isinstance(dst, NixlRemoteWindow)
        self._check_live(dst)
        self._transfers.finish(dst.pending, dst, self._timeout_s)
        self._check_live(dst)  # another thread may have been told that the puts are lost

    def quiet(self, dst: RemoteWindow) -> None:
        """Wait for the puts before, and see that the window still stands."""
        assert isinstance(dst, NixlRemoteWindow)
        self.fence(dst)
        self._read_header(dst, self._timeout_s)

    def collect(self) -> None:
        """Turn notifications that have arrived into signals; also lets UCX get on with what is under way."""
        with self._lock:
            if self._closed:
                return
            for remote in self._remotes:
                if remote.pending:
                    self._push(remote)
            for notices in self._agent.get_new_notifs().values():
                for notice in notices:
                    self._obey(notice)

    def _obey(self, notice: bytes) -> None:
        try:
            number, signal, value = _NOTICE.unpack(notice)
            if number in self._windows:
                window = self._windows[number][0]
                check_signal(window, signal, value)
                window.words.raise_to(signal, value)
        except (ValueError, struct.error) as error:
            _log.warning("a notice that came over NIXL is dropped: %s", error)

    def _push(self, remote: NixlRemoteWindow) -> None:
        try:
            self._transfers.ended(remote.pending, remote)
        except PeerGoneError as error:
            _log.info("%s", error)  # whoever puts next is told

    def signal_wait_until(self, window: Window, signal: int, at_least: int, timeout_s: float | None) -> int:
        """Collect notifications until the signal has reached the value."""
        assert isinstance(window, NixlWindow)
        if self.wait_any([(window, signal, at_least)], timeout_s) is None:
            raise too_late(window, signal, at_least, timeout_s)
        return window.words.read(signal)

    def wait_any(self, waits: Sequence[tuple[Window, int, int]], timeout_s: float | None) -> int | None:
        """Collect notifications until a signal has reached its value; the pauses grow to 2 ms."""
        local = cast("Sequence[tuple[NixlWindow, int, int]]", waits)
        start = time.monotonic()
        while True:
            self.collect()
            passed_s = time.monotonic() - start
            pause_s = min(max(_PAUSE_SHARE * passed_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
            if timeout_s is not None:
                pause_s = min(pause_s, max(0.0, timeout_s - passed_s))
            found = self._waiter.any(local, pause_s if passed_s > self._spin_s else 0.0)
            if found is not None or (timeout_s is not None and passed_s >= timeout_s):
                return found

    def detach(self, remote: RemoteWindow) -> None:
        """Let a peer's window go, and with its last a process that has ended."""
        assert isinstance(remote, NixlRemoteWindow)
        with self._lock:
            if remote not in self._remotes:
                return
            self._remotes.discard(remote)
            remote.reachable = False
            self._transfers.give_up(remote.pending)
            # Not while it lives: over TCP a process that was removed can't be added again.
            if remote.process_lost and all(other.agent != remote.agent for other in self._remotes):
                try:
                    self._agent.remove_remote_agent(remote.agent)
                except self._errors:
                    _log.info("NIXL had lost %s before it was detached from", remote.agent)

    def close(self) -> None:
        """Free and detach all."""
        with self._lock:
            if self._closed:
                return
            for remote in list(self._remotes):
                self.detach(remote)
            for window, _ in list(self._windows.values()):
                window.free()
            self._closed = True
            del self._agent, self._transfers  # NIXL's files and threads go with its last reference

    def __enter__(self) -> NixlTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
