"""What the cache keeps: adapters, and runs of full KV blocks below them."""

from __future__ import annotations

from dataclasses import dataclass

from .orders import Namespace
from .tokens import TOKEN_BYTES


@dataclass(eq=False, slots=True)
class Node:
    """An adapter (layer_pages given) or a run of full KV blocks after its parent's (tokens given).

    row: its place in `Columns`.  tokens: as `encode` gives them.  first_token: tokens of the prompt before
    its own.  recalled: bytes of its tokens whose ghosts were found (`cache.ghosts`).  device_pages,
    host_pages: None where it is not; both may be there ("backed").  moving_in, moving_out: an order is under
    way, and the pages of its target hold nothing yet.  leaves: the device pages go once moving_out is done.
    pins: users that keep it, and so all above it, on the device.
    num_device_children: children with device pages.  heir: the child that was found or added last, if it can
    still be found.  gone: no longer found, and freed when its last user goes.  lost: gone because its bytes
    did not arrive.  failed: an adapter whose bytes did not arrive the last time: nothing brings it unasked.
    reachable: False for an adapter without pages here that the LoRA Server does not hold.
    """

    namespace: Namespace
    row: int
    num_pages: int
    parent: Node | None = None
    adapter: Node | None = None
    layer_pages: tuple[int, ...] | None = None
    tokens: bytes = b""
    first_token: int = 0
    recalled: int = 0
    device_pages: list[int] | None = None
    host_pages: list[int] | None = None
    moving_in: bool = False
    moving_out: bool = False
    leaves: bool = False
    pins: int = 0
    num_children: int = 0
    num_device_children: int = 0
    heir: Node | None = None
    gone: bool = False
    lost: bool = False
    failed: bool = False
    reachable: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def is_adapter(self) -> bool:
        return self.layer_pages is not None

    @property
    def dying(self) -> bool:
        """Whether it, or the adapter that it belongs to, is gone."""
        return self.gone or (self.adapter is not None and self.adapter.gone)

    @property
    def moving(self) -> bool:
        return self.moving_in or self.moving_out

    @property
    def on_device(self) -> bool:
        """Whether its bytes can be used there."""
        return self.device_pages is not None and not self.moving_in and not self.lost

    @property
    def on_host(self) -> bool:
        """Whether its bytes can be copied from there."""
        return self.host_pages is not None and not self.moving_out
