"""Two-sided baseline and fallback between hosts: torch.distributed's gloo send/recv behind the contract.

A thread per connection receives what peers send, places it into the window and raises the signal.  No
process group need be made up front: attaching makes a group of two.  A put returns when gloo has taken it.
That a peer has died shows when something is sent to it.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed import ProcessGroupGloo

from moe_lora.core.errors import PeerGoneError, PeerUnreachableError

from . import contract
from .contract import RemoteWindow, Window
from .descriptor import (
    Descriptor,
    Directory,
    check_new_window,
    check_range,
    check_same_size,
    check_signal,
    check_tensor,
)
from .gloo_link import Link, Op, Reception, connect, say_goodbye
from .shm_library import LocalWindow, SignalWaiter, SignalWords, lines

# Windows of the gloo transport: this process's, and those of peers at the other end of a link.


class GlooWindow(LocalWindow["GlooTransport"]):
    """Private memory that this process's receiver threads fill."""

    def __init__(
        self, owner: GlooTransport, number: int, label: str, num_bytes: int, num_signals: int
    ) -> None:
        super().__init__(owner, label, num_bytes, num_signals)
        self.number = number
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        self.words = SignalWords(lines(num_signals), owner.doorbell)

    def medium(self) -> dict[str, Any]:
        """The address where the owner receives."""
        return {**self._owner.address(), "window": self.number}

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
        put_timeout_s: float | None = None,
    ) -> None:
        """host: this host's address as peers reach it.  timeout_s: of one send or connection, after which the
        peer counts as gone.  put_timeout_s: the same for each part of a put; None: timeout_s."""
        self.name = name
        self._directory = Directory(store, self.kind, name)
        self.generation = self._directory.generation
        self.doorbell = lines(1)
        self._waiter = SignalWaiter(self.doorbell, spin_s)
        self._host, self._timeout_s, self._put_timeout_s = host, timeout_s, put_timeout_s
        self._device = ProcessGroupGloo.create_device(hostname=host)
        self._numbers = itertools.count()
        self._windows: dict[int, GlooWindow] = {}
        self._links: dict[tuple[str, int, str], Link] = {}
        self._remotes: set[GlooRemoteWindow] = set()
        self._reception: Reception | None = None
        self._lock = threading.Lock()
        """Held around the windows and the reception."""
        # A link that another thread is about to use must not count as unused.
        self._attaching = threading.Lock()
        self._closed = False
        atexit.register(self.close)  # a receiver left in gloo as the interpreter ends aborts the process

    def address(self) -> dict[str, Any]:
        """Where peers come to make links; starts with the first window."""
        with self._lock:
            if self._reception is None:
                self._reception = Reception(self._host, self._device, self._timeout_s, self._windows.get)
            return {"host": self._host, "port": self._reception.port, "tag": self._reception.tag}

    def alloc(self, label: str, num_bytes: int, num_signals: int) -> GlooWindow:
        """A window in private memory."""
        with self._lock:
            known = {window.label for window in self._windows.values()}
            check_new_window(self.name, label, known, self._closed)
            window = GlooWindow(self, next(self._numbers), label, num_bytes, num_signals)
            self._windows[window.number] = window
        self._directory.publish(label, window.descriptor())
        return window

    def forget(self, window: GlooWindow) -> None:
        """Called by a window that is freed."""
        with self._lock:
            self._windows.pop(window.number, None)

    def attach(self, descriptor: bytes) -> GlooRemoteWindow:
        """Connect to the window's owner, unless that is done."""
        found = Descriptor.decode(descriptor, self.kind)
        with self._attaching:
            return self._attach(found)

    def _attach(self, found: Descriptor) -> GlooRemoteWindow:
        host, port, tag = found.medium["host"], found.medium["port"], found.medium["tag"]
        link = self._links.get((host, port, tag))
        try:
            if link is None or not link.alive:
                link = connect(host, port, tag, self._device, self._timeout_s, self._put_timeout_s)
                self._links[host, port, tag] = link
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
                    say_goodbye(link)

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
        with self._attaching:
            remote.link = None
            self._remotes.discard(remote)
            self._drop_unused_links()

    def close(self) -> None:
        """Free and detach all, end the threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._windows.clear()
        atexit.unregister(self.close)
        with self._attaching:
            remotes = list(self._remotes)
        for remote in remotes:
            self.detach(remote)
        if self._reception is not None:
            self._reception.close()

    def __enter__(self) -> GlooTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
