# SPDX-License-Identifier: Apache-2.0
"""Nodes of the cache: adapters, and runs of full KV blocks below them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from .orders import Namespace

TOKEN_BYTES = 8
ENCODED_AT_ONCE = 512
"""Tokens of a prompt encoded before the first lookup."""


def encode(tokens: Sequence[int]) -> bytes:
    """The ids as int64 in the machine's order."""
    return struct.pack(f"{len(tokens)}q", *tokens)


def encode_more(encoded: bytes, tokens: Sequence[int], most: int, num_bytes: int) -> bytes:
    """`encoded`, a prefix of the first `most` tokens, lengthened to at least `num_bytes` within them.

    At least doubles: most of a long prompt is usually new and never looked up.
    """
    done = len(encoded) // TOKEN_BYTES
    upto = min(most, max(2 * done, ENCODED_AT_ONCE, num_bytes // TOKEN_BYTES))
    return encoded + encode(tokens[done:upto]) if upto > done else encoded


@dataclass(eq=False, slots=True)
class Node:
    """An adapter (layer_pages given) or a run of full KV blocks after the parent's (tokens given).

    row: in `Columns`.  first_token: earlier prompt tokens.  recalled: bytes of tokens with found ghosts.
    device_pages, host_pages: None if absent.  moving_in, moving_out: a copy is under way, with empty target
    pages.  leaves: device pages go after moving_out.  pins: users that keep the node and all ancestors on
    the device.  heir: the last found or added child.  gone: not findable, freed with the last user.  lost:
    gone for lack of bytes.  failed: an adapter with a failed last load, loaded on request only.  reachable:
    False for an adapter without pages here and on the LoRA Server.
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
        """True if the node or its adapter is gone."""
        return self.gone or (self.adapter is not None and self.adapter.gone)

    @property
    def moving(self) -> bool:
        return self.moving_in or self.moving_out

    @property
    def on_device(self) -> bool:
        """True if usable on the device."""
        return self.device_pages is not None and not self.moving_in and not self.lost

    @property
    def on_host(self) -> bool:
        """True if the host has the bytes."""
        return self.host_pages is not None and not self.moving_out


HAS_DEVICE_PAGES, BACKED, READY = 1, 2, 4
CAN_LEAVE, CAN_ENTER, CAN_LEAVE_HOST, CAN_BACK_UP, DYING = 8, 16, 32, 64, 128
"""BACKED: on the host.  READY: usable on the device or, for an adapter without pages here, on the LoRA
Server.  CAN_LEAVE: device leaves without pins.  CAN_ENTER: host roots.  CAN_LEAVE_HOST: independent host
pages.  CAN_BACK_UP: idle device KV without a host copy.  DYING: not findable;
neither enters nor is backed up.
"""
ONLY_IDLE = CAN_LEAVE | CAN_BACK_UP
"""Bits of unpinned nodes only; all others hold with and without pins."""


def flags_of(node: Node, *, keeps_dependencies: bool) -> int:
    """All flag bits of the node; keeps_dependencies: KV needs the adapter on the device."""
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
