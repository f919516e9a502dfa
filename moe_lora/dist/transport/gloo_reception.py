"""Where peers of the gloo transport meet a window's owner, and the threads that receive from them."""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from .gloo_link import ATTACHED, OWNER, Link


class Reception:
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
        """End all links and threads."""
        self._closing = True
        self._store.set(f"visitor/{self._store.add('visitors', 1) - 1}", "closing")
        self._acceptor.join()
        threads = list(self._threads.values())
        for link in list(self._links.values()):
            link.abort()
        for thread in threads:
            thread.join()


def connect(host: str, port: int, tag: str, device: Any, timeout_s: float) -> Link:
    """A link to the owner at that address. Raises OSError or RuntimeError."""
    # Asked first, as a store's client would try a dead address again until it times out.
    socket.create_connection((host, port), timeout=timeout_s).close()
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    if store.get("tag").decode() != tag:
        raise ConnectionError("another process has its port")
    number = store.add("visitors", 1) - 1
    store.set(f"visitor/{number}", "here")
    return Link(PrefixStore(f"link/{number}", store), ATTACHED, device, timeout_s)


def say_goodbye(link: Link) -> None:
    """End a link from the attached side."""
    try:
        link.bye()
    except RuntimeError:  # it is gone already
        link.alive = False
