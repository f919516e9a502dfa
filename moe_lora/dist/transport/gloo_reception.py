"""Where peers of the gloo transport meet a window's owner, and the threads that receive from them."""

from __future__ import annotations

import hmac
import itertools
import logging
import secrets
import socket
import threading
from typing import Any

from .gloo_link import ATTACHED, OWNER, Link
from .gloo_meeting import MeetingStore, receive

logger = logging.getLogger(__name__)

_TAG_CHARS = 32


class Reception:
    """The owner's side: a port where peers announce themselves, and a thread per link."""

    def __init__(self, host: str, device: Any, timeout_s: float, place: Any) -> None:
        self._listener = socket.create_server(("0.0.0.0" if host != "127.0.0.1" else host, 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self.tag = secrets.token_hex(_TAG_CHARS // 2)
        self._device, self._timeout_s, self._place = device, timeout_s, place
        self._links: dict[int, Link] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name="gloo-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        for number in itertools.count():
            visitor, _ = self._listener.accept()
            if self._closing:
                visitor.close()
                return
            guest = (number, visitor)
            thread = threading.Thread(target=self._receive, args=guest, name="gloo-receive", daemon=True)
            self._threads[number] = thread
            thread.start()

    def _receive(self, number: int, visitor: socket.socket) -> None:
        try:
            self._serve(number, visitor)
        finally:
            # Only now is the link gone: ending it takes time inside gloo, and `close` must wait for that.
            self._threads.pop(number, None)

    def _serve(self, number: int, visitor: socket.socket) -> None:
        try:
            with visitor:
                visitor.settimeout(self._timeout_s)
                tag = self.tag.encode()
                if not hmac.compare_digest(receive(visitor, _TAG_CHARS), tag):
                    raise ConnectionError("a stranger: it does not know this process's tag")
                visitor.sendall(tag)
                link = Link(MeetingStore(visitor), OWNER, self._device, self._timeout_s)
        except (OSError, RuntimeError) as error:  # the visitor died on the doorstep, or may not come in
            logger.info("a visitor of the gloo transport was turned away: %s", error)
            return
        self._links[number] = link
        try:
            if not self._closing:
                link.serve(self._place)
        except ValueError as error:
            logger.warning(
                "a link of the gloo transport is dropped, its peer asked for what can't be: %s", error
            )
            link.abort()
        except RuntimeError:  # the peer has ended, or this side closes
            link.alive = False
        self._links.pop(number, None)

    def close(self) -> None:
        """End all links and threads."""
        self._closing = True
        socket.create_connection(("127.0.0.1", self.port)).close()  # so that the acceptor looks
        self._acceptor.join()
        self._listener.close()
        threads = list(self._threads.values())
        for link in list(self._links.values()):
            link.abort()
        for thread in threads:
            thread.join()


def connect(
    host: str, port: int, tag: str, device: Any, timeout_s: float, put_timeout_s: float | None = None
) -> Link:
    """A link to the owner at that address, who knows by the tag that this process has its descriptor.

    Raises OSError or RuntimeError.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as owner:
        owner.sendall(tag.encode())
        if not hmac.compare_digest(receive(owner, _TAG_CHARS), tag.encode()):
            raise ConnectionError("another process has its port")
        return Link(MeetingStore(owner), ATTACHED, device, timeout_s, put_timeout_s)


def say_goodbye(link: Link) -> None:
    """End a link from the attached side."""
    try:
        link.bye()
    except RuntimeError:  # it is gone already
        link.alive = False
