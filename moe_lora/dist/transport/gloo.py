# SPDX-License-Identifier: Apache-2.0
"""Two-sided baseline and fallback between hosts: torch.distributed's gloo send/recv behind the contract.

A thread per connection receives.  A put returns once gloo has the bytes.  A send detects a dead peer.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch.distributed import ProcessGroupGloo

from moe_lora.core.errors import PeerUnreachableError

from .contract import (
    Descriptor,
    RemoteWindow,
    Transport,
    Window,
    check_range,
    check_same_size,
    check_signal,
    check_tensor,
)
from .gloo_link import Link, Op, Reception, connect
from .shm_library import SignalWaiter, SignalWords, lines


class GlooWindow(Window):
    """Filled by receiver threads."""

    def __init__(
        self, owner: GlooTransport, number: int, label: str, num_bytes: int, num_signals: int
    ) -> None:
        super().__init__(owner, number, label, num_bytes, num_signals)
        self._address = owner.address
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        self.words = SignalWords(lines(num_signals), owner.doorbell)

    def medium(self) -> dict[str, Any]:
        """The owner's receiving address."""
        return {**self._address(), "window": self.number}


_Address: TypeAlias = tuple[str, int, str]


def _address_in(found: Descriptor) -> _Address:
    return found.medium["host"], found.medium["port"], found.medium["tag"]


class GlooRemoteWindow(RemoteWindow):
    """A peer's window over a link."""

    def __init__(self, found: Descriptor, link: Link) -> None:
        super().__init__(found)
        self.number = found.medium["window"]
        self.address = _address_in(found)
        self.link: Link | None = link

    def signal(self, signal: int, value: int) -> None:
        """Behind earlier puts."""
        self.put(0, None, signal, value)

    def alive(self) -> bool:
        """True until a failed send."""
        return self.link is not None and self.link.alive

    def put(self, offset: int, data: torch.Tensor | None, signal: int, value: int) -> None:
        """Raises ValueError, PeerGoneError."""
        check_signal(self, signal, value)
        if data is not None:
            check_range(self, offset, check_tensor(data, "src"))
        with self._live_link() as link:
            link.put(self.number, offset, data, signal, value)

    def ask(self, op: Op, offset: int = 0, out: torch.Tensor | None = None) -> None:
        """Call the peer, and wait.  Raises PeerGoneError."""
        with self._live_link() as link:
            exists, _, _ = link.ask(op, self.number, offset, out)
        if not exists:
            self.link = None
            raise self.gone_error("it was freed")

    @contextmanager
    def _live_link(self) -> Iterator[Link]:
        link = self.link
        if link is None or not link.alive:
            raise self.gone_error()
        try:
            yield link
        except RuntimeError as error:
            link.alive = False
            raise self.gone_error(str(error).splitlines()[0]) from None


class GlooTransport(Transport):
    """See the contract."""

    kind = "gloo"
    local_window = GlooWindow

    def __init__(
        self,
        *,
        name: str,
        host: str = "127.0.0.1",
        timeout_s: float = 30.0,
        put_timeout_s: float | None = None,
    ) -> None:
        """host: this host's address for peers.  timeout_s: of a send or connection, then the peer is gone.
        put_timeout_s: of each part of a put.
        """
        self.doorbell = lines(1)
        super().__init__(name, SignalWaiter(self.doorbell))
        self._host, self._timeout_s, self._put_timeout_s = host, timeout_s, put_timeout_s
        self._device = ProcessGroupGloo.create_device(hostname=host)
        self._links: dict[_Address, Link] = {}
        self._reception: Reception | None = None
        self._turns: WeakValueDictionary[_Address, threading.Lock] = WeakValueDictionary()
        """Locks of links and windows: an unreachable peer delays no other."""
        atexit.register(self.close)  # a receiver left in gloo at exit aborts the process

    def address(self) -> dict[str, Any]:
        """For peers' links; starts the reception."""
        with self._lock:
            if self._reception is None:
                self._reception = Reception(self._host, self._device, self._timeout_s, self._windows.get)
            return {"host": self._host, "port": self._reception.port, "tag": self._reception.tag}

    def attach(self, descriptor: bytes) -> GlooRemoteWindow:
        """Connect, once."""
        found = Descriptor.decode(descriptor, self.kind)
        with self._turn(_address_in(found)):
            return self._attach(found)

    def _turn(self, address: _Address) -> threading.Lock:
        with self._lock:
            return self._turns.setdefault(address, threading.Lock())

    def _attach(self, found: Descriptor) -> GlooRemoteWindow:
        host, port, tag = address = _address_in(found)
        link = self._links.get(address)
        try:
            if link is None or not link.alive:
                link = connect(host, port, tag, self._device, self._timeout_s, self._put_timeout_s)
                self._links[address] = link
            exists, num_bytes, num_signals = link.ask(Op.SIZE, found.medium["window"])
            if not exists:
                raise PeerUnreachableError(
                    f"window {found.label!r} of {found.peer!r} was freed; attach to its newest window"
                )
            check_same_size(found, num_bytes, num_signals)
            remote = GlooRemoteWindow(found, link)
            self._remotes.add(remote)
            return remote
        except (OSError, RuntimeError) as error:
            raise PeerUnreachableError(
                f"{found.peer!r} at {host}:{port} can't be reached ({str(error).splitlines()[0]}); check "
                "that it runs and that its option host= is an address this host reaches"
            ) from None
        finally:
            self._drop_unused_link(address)

    def _drop_unused_link(self, address: _Address) -> None:
        link = self._links.get(address)
        if link is not None and all(remote.link is not link for remote in list(self._remotes)):
            del self._links[address]
            link.say_goodbye()

    def put_signal(
        self, dst: GlooRemoteWindow, offset_bytes: int, src: torch.Tensor | None, signal: int, value: int
    ) -> None:
        """Send; the peer's receiver thread writes and signals."""
        dst.put(offset_bytes, src, signal, value)

    def get(self, src: GlooRemoteWindow, offset_bytes: int, out: torch.Tensor) -> None:
        """The peer's receiver thread answers."""
        check_range(src, offset_bytes, check_tensor(out, "out"))
        src.ask(Op.GET, offset_bytes, out)

    def fence(self, dst: GlooRemoteWindow) -> None:
        """A link keeps messages in order."""

    def quiet(self, dst: GlooRemoteWindow) -> None:
        """A round trip behind the puts."""
        dst.ask(Op.QUIET)

    def detach(self, remote: GlooRemoteWindow) -> None:
        """A peer's last window closes the link."""
        with self._turn(remote.address):
            remote.link = None
            self._remotes.discard(remote)
            self._drop_unused_link(remote.address)

    def end(self) -> None:
        atexit.unregister(self.close)
        if self._reception is not None:
            self._reception.close()
