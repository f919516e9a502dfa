# SPDX-License-Identifier: Apache-2.0
"""What the cache keeps: adapters, and runs of full KV blocks below them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from .orders import Namespace

# Token ids as bytes: compared and hashed much faster than a tuple of them, in a fifth of its memory.


TOKEN_BYTES = 8
ENCODED_AT_ONCE = 512
"""Tokens of a prompt that are encoded before any is looked for."""


def encode(tokens: Sequence[int]) -> bytes:
    """The ids as int64 in the machine's order."""
    return struct.pack(f"{len(tokens)}q", *tokens)


def encode_more(encoded: bytes, tokens: Sequence[int], most: int, num_bytes: int) -> bytes:
    """`encoded`, the beginning of the first `most` tokens, lengthened to at least `num_bytes` if they go so
    far; at least doubled, since most of a long prompt is usually new and never looked for.
    """
    done = len(encoded) // TOKEN_BYTES
    upto = min(most, max(2 * done, ENCODED_AT_ONCE, num_bytes // TOKEN_BYTES))
    return encoded + encode(tokens[done:upto]) if upto > done else encoded


@dataclass(eq=False, slots=True)
class Node:
    """An adapter (layer_pages given) or a run of full KV blocks after its parent's (tokens given).

    row: its place in `Columns`.  tokens: as `encode` gives them.  first_token: tokens of the prompt before
    its own.  recalled: bytes of its tokens whose ghosts were found (`cache.columns`).  device_pages,
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


# What can be done with a node now, as bits of `Columns.flags`.


HAS_DEVICE_PAGES, BACKED, READY = 1, 2, 4
CAN_LEAVE, CAN_ENTER, CAN_LEAVE_HOST, CAN_BACK_UP, DYING = 8, 16, 32, 64, 128
"""BACKED: the host has it.  READY: it can be used on the device or, of an adapter without pages here, on the
LoRA Server.  CAN_LEAVE: device leaves without pins.  CAN_ENTER: host roots.  CAN_LEAVE_HOST: nodes whose
host pages nobody depends on.  CAN_BACK_UP: idle KV of the device that the host has not.  DYING: nobody finds
it any more; it neither enters nor is backed up.
"""
ONLY_IDLE = CAN_LEAVE | CAN_BACK_UP
"""Bits that no pinned node has; all others hold with pins or without."""


def flags_of(node: Node, *, keeps_dependencies: bool) -> int:
    """All bits that hold for the node; keeps_dependencies: KV needs its adapter on the device."""
    device, host = node.device_pages is not None, node.host_pages is not None
    is_adapter, dying = node.layer_pages is not None, node.dying
    flags = DYING if dying else 0
    if host and not node.moving_out:
        flags |= BACKED
    if device:
        flags |= HAS_DEVICE_PAGES
        if node.reachable and not (node.moving_in or node.lost):
            flags |= READY
    if node.moving_in or node.moving_out or not node.num_pages:
        return flags
    if host and (device or is_adapter or not node.num_children):
        flags |= CAN_LEAVE_HOST
    if not device:
        parent = node.parent
        follows = parent is None or parent.device_pages is not None  # or is on its way there
        if parent is not None and parent.is_adapter and not keeps_dependencies:
            follows = True
        if (host or (is_adapter and not node.failed)) and not dying and follows:
            flags |= CAN_ENTER
    elif not node.pins:
        if not node.num_device_children or (is_adapter and not keeps_dependencies):
            flags |= CAN_LEAVE
        if not (host or is_adapter or dying):
            flags |= CAN_BACK_UP
    return flags
