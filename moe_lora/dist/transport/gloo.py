"""Two-sided baseline and fallback between hosts: torch.distributed's gloo send/recv behind the contract.

A thread per connection receives what peers send, places it into the window and raises the signal.  No
process group need be made up front: attaching makes a group of two.  A put returns when gloo has taken it.
That a peer has died shows when something is sent to it.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from moe_lora.core.errors import PeerGoneError, PeerUnreachableError

from . import contract
from .contract import RemoteWindow, Window
from .descriptor import (
    Descriptor,
    check_new_window,
    check_range,
    check_same_size,
    check_signal,
    check_sizes,
    check_tensor,
)
from .directory import Directory
from .gloo_link import ATTACHED, OWNER, Link, Op
from .shm_library import SignalWords, Waiter, lines


class GlooWindow:
    """Private memory that this process's receiver threads fill."""

    def __init__(
        self, owner: GlooTransport, number: int, label: str, num_bytes: int, num_signals: int
    ) -> None:
        check_sizes(label, num_bytes, num_signals)
        self.label, self.num_bytes, self.num_signals = label, num_bytes, num_signals
        self.number = number
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        self.words = SignalWords(lines(num_signals), owner.doorbell)
        self._owner = owner

    def descriptor(self) -> bytes:
        """As in the contract; the medium is the address of the owner's store."""
        return Descriptor(
            kind=GlooTransport.kind,
            peer=self._owner.name,
            label=self.label,
            generation=self._owner.generation,
            num_bytes=self.num_bytes,
            num_signals=self.num_signals,
            medium={**self._owner.address(), "window": self.number},
        ).encode()

    def read_signal(self, signal: int) -> int:
        """Present value."""
        check_signal(self, signal)
        return self.words.read(signal)

    def set_signal(self, signal: int, value: int) -> None:
        """Set the value here and wake this process's waiters."""
        check_signal(self, signal, value)
        self.words.set(signal, value)

    def free(self) -> None:
        """Later puts change nothing, and the sender's next quiet raises PeerGoneError."""
        self._owner.forget(self)


class GlooRemoteWindow:
    """A peer's window at the other end of a link."""

    def __init__(self, found: Descriptor, link: Link) -> None:
        self.peer, self.label, self.generation = found.peer, found.label, found.generation
        self.num_bytes, self.num_signals = found.num_bytes, found.num_signals
        self.number = found.medium["window"]
        self.link: Link | None = link

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor | None:
        """None: the memory is not mapped here."""
        check_range(self, offset_bytes, num_bytes)
        return None

    def signal(self, signal: int, value: int) -> None:
        """Raise a signal behind the puts sent before."""
        self.put(0, None, signal, value)

    def alive(self) -> bool:
        """True until something sent did not arrive."""
        return self.link is not None and self.link.alive

    def put(self, offset: int, data: torch.Tensor | None, signal: int, value: int) -> None:
        """Raises ValueError, PeerGoneError."""
        check_signal(self, signal, value)
        if data is not None:
            check_range(self, offset, check_tensor(data, "src"))
        link = self._live_link()
        try:
            link.put(self.number, offset, data, signal, value)
        except RuntimeError as error:
            raise self._gone(link, error) from None

    def ask(self, op: Op, offset: int = 0, out: torch.Tensor | None = None) -> None:
        """A round trip. Raises PeerGoneError, also if the window was freed."""
        link = self._live_link()
        try:
            exists, _, _ = link.ask(op, self.number, offset, out)
        except RuntimeError as error:
            raise self._gone(link, error) from None
        if not exists:
            self.link = None
            raise PeerGoneError(f"window {self.label!r} of {self.peer!r} was freed; open its newest window")

    def _live_link(self) -> Link:
        if self.link is None or not self.link.alive:
            raise PeerGoneError(
                f"window {self.label!r} of {self.peer!r} generation {self.generation} is gone: the process "
                "has ended, or the window was freed or detached from; open its newest window"
            )
        return self.link

    def _gone(self, link: Link, error: RuntimeError) -> PeerGoneError:
        link.alive = False
        return PeerGoneError(
            f"window {self.label!r} of {self.peer!r} generation {self.generation} can't be reached any more "
            f"({str(error).splitlines()[0]}); open its newest window"
        )


class GlooTransport:
    """torch.distributed send/recv; see the contract."""

    kind = "gloo"

    def __init__(
        self,
        *,
        name: str,
        store: contract.Store | None = None,
        spin_s: float = 20e-6,
        host: str = "127.0.0.1",
        timeout_s: float = 30.0,
    ) -> None:
        """host: this host's address as peers reach it.  timeout_s: of one send or connection, after which the
        peer counts as gone."""
        self.name = name
        self._directory = Directory(store, self.kind, name)
        self.generation = self._directory.generation
        self.doorbell = lines(1)
        self._waiter = Waiter(self.doorbell, spin_s)
        self._host, self._timeout_s = host, timeout_s
        self._device = ProcessGroupGloo.create_device(hostname=host)
        self._numbers = itertools.count()
        self._windows: dict[int, GlooWindow] = {}
        self._links: dict[tuple[str, int, str], Link] = {}
        self._remotes: set[GlooRemoteWindow] = set()
        self._reception: _Reception | None = None
        self._closed = False

    def address(self) -> dict[str, Any]:
        """Where peers find the store in which links are made; starts it with the first window."""
        if self._reception is None:
            self._reception = _Reception(self._host, self._device, self._timeout_s, self._windows.get)
        return {"host": self._host, "port": self._reception.port, "tag": self._reception.tag}

    def alloc(self, label: str, num_bytes: int, num_signals: int) -> GlooWindow:
        """A window in private memory."""
        check_new_window(self.name, label, {window.label for window in self._windows.values()}, self._closed)
        window = GlooWindow(self, next(self._numbers), label, num_bytes, num_signals)
        self._windows[window.number] = window
        self._directory.publish(label, window.descriptor())
        return window

    def forget(self, window: GlooWindow) -> None:
        """Called by a window that is freed."""
        self._windows.pop(window.number, None)

    def attach(self, descriptor: bytes) -> GlooRemoteWindow:
        """Connect to the window's owner, unless that is done."""
        found = Descriptor.decode(descriptor, self.kind)
        host, port, tag = found.medium["host"], found.medium["port"], found.medium["tag"]
        link = self._links.get((host, port, tag))
        try:
            if link is None or not link.alive:
                link = self._links[host, port, tag] = _connect(host, port, tag, self._device, self._timeout_s)
            exists, num_bytes, num_signals = link.ask(Op.SIZE, found.medium["window"])
            if not exists:
                raise PeerUnreachableError(
                    f"window {found.label!r} of {found.peer!r} was freed; open its newest window"
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
            self._drop_unused_links()

    def _drop_unused_links(self) -> None:
        used = {remote.link for remote in self._remotes}
        for key, link in list(self._links.items()):
            if link not in used:
                del self._links[key]
                if link.alive:
                    _say_goodbye(link)

    def open(self, peer: str, label: str, timeout_s: float) -> GlooRemoteWindow:
        """Attach to the newest window of that name."""
        return self._directory.find(peer, label, self.attach, timeout_s)

    def put_signal(
        self, dst: RemoteWindow, offset_bytes: int, src: torch.Tensor | None, signal: int, value: int
    ) -> None:
        """Send; the peer's receiver thread places the bytes and raises the signal."""
        assert isinstance(dst, GlooRemoteWindow)
        dst.put(offset_bytes, src, signal, value)

    def get(self, src: RemoteWindow, offset_bytes: int, out: torch.Tensor) -> None:
        """Ask the peer's receiver thread to send."""
        assert isinstance(src, GlooRemoteWindow)
        check_range(src, offset_bytes, check_tensor(out, "out"))
        src.ask(Op.GET, offset_bytes, out)

    def fence(self, dst: RemoteWindow) -> None:
        """A link keeps the order of what is sent."""
        assert isinstance(dst, GlooRemoteWindow)

    def quiet(self, dst: RemoteWindow) -> None:
        """A round trip behind the puts."""
        assert isinstance(dst, GlooRemoteWindow)
        dst.ask(Op.QUIET)

    def signal_wait_until(self, window: Window, signal: int, at_least: int, timeout_s: float | None) -> int:
        """Spin, then sleep, until the signal has reached the value."""
        assert isinstance(window, GlooWindow)
        return self._waiter.until(window, signal, at_least, timeout_s)

    def wait_any(self, waits: Sequence[tuple[Window, int, int]], timeout_s: float | None) -> int | None:
        """Spin, then sleep, until one of the signals has reached its value."""
        return self._waiter.any(cast("Sequence[tuple[GlooWindow, int, int]]", waits), timeout_s)

    def detach(self, remote: RemoteWindow) -> None:
        """Let a peer's window go, and the link with its last."""
        assert isinstance(remote, GlooRemoteWindow)
        remote.link = None
        self._remotes.discard(remote)
        self._drop_unused_links()

    def close(self) -> None:
        """Free and detach all, end the threads."""
        if self._closed:
            return
        self._closed = True
        for remote in list(self._remotes):
            self.detach(remote)
        self._windows.clear()
        if self._reception is not None:
            self._reception.close()

    def __enter__(self) -> GlooTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Reception:
    """The owner's side: a store where peers announce themselves, and a thread per link."""

    def __init__(self, host: str, device: Any, timeout_s: float, place: Any) -> None:
        self._store = TCPStore(
            "0.0.0.0" if host != "127.0.0.1" else host, 0, is_master=True, wait_for_workers=False
        )
        self.port = self._store.port
        self.tag = secrets.token_hex(8)
        self._store.set("tag", self.tag)
        self._device, self._timeout_s, self._place = device, timeout_s, place
        self._links: dict[int, Link] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._closing = False
        # A client of its own, as a store object does one thing at a time and this one waits.
        self._visitors = TCPStore(host, self.port, is_master=False, timeout=timedelta(days=365))
        self._acceptor = threading.Thread(target=self._accept, name="gloo-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        for number in itertools.count():
            self._visitors.wait([f"visitor/{number}"])
            if self._closing:
                return
            thread = threading.Thread(target=self._receive, args=(number,), name="gloo-receive", daemon=True)
            self._threads[number] = thread
            thread.start()

    def _receive(self, number: int) -> None:
        try:
            store = TCPStore("127.0.0.1", self.port, is_master=False)
            link = Link(PrefixStore(f"link/{number}", store), OWNER, self._device, self._timeout_s)
        except RuntimeError:  # the visitor died on the doorstep
            self._threads.pop(number, None)
            return
        self._links[number] = link
        try:
            if not self._closing:
                link.serve(self._place)
        except RuntimeError:  # the peer has ended, or this side closes
            link.alive = False
        self._links.pop(number, None)
        self._threads.pop(number, None)

    def close(self) -> None:
        self._closing = True
        self._store.set(f"visitor/{self._store.add('visitors', 1) - 1}", "closing")
        self._acceptor.join()
        threads = list(self._threads.values())
        for link in list(self._links.values()):
            link.abort()
        for thread in threads:
            thread.join()


def _connect(host: str, port: int, tag: str, device: Any, timeout_s: float) -> Link:
    # Asked first, as a store's client would try a dead address again until it times out.
    socket.create_connection((host, port), timeout=timeout_s).close()
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    if store.get("tag").decode() != tag:
        raise ConnectionError("another process has its port")
    number = store.add("visitors", 1) - 1
    store.set(f"visitor/{number}", "here")
    return Link(PrefixStore(f"link/{number}", store), ATTACHED, device, timeout_s)


def _say_goodbye(link: Link) -> None:
    try:
        link.bye()
    except RuntimeError:  # it is gone already
        link.alive = False
