"""Windows of the gloo transport: this process's, and those of peers at the other end of a link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moe_lora.core.errors import PeerGoneError

from .descriptor import Descriptor, check_range, check_signal, check_tensor
from .gloo_link import Link, Op
from .shm_library import SignalWords, lines
from .window import LocalWindow

if TYPE_CHECKING:
    from .gloo import GlooTransport


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
