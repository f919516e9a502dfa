"""What can be done with a node now, as bits of `Columns.flags`."""

from __future__ import annotations

from .node import Node

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
        if (
            (host or (is_adapter and not node.failed))
            and not dying
            and _may_enter(node.parent, keeps_dependencies)
        ):
            flags |= CAN_ENTER
    elif not node.pins:
        if not node.num_device_children or (is_adapter and not keeps_dependencies):
            flags |= CAN_LEAVE
        if not (host or is_adapter or dying):
            flags |= CAN_BACK_UP
    return flags


def _may_enter(parent: Node | None, keeps_dependencies: bool) -> bool:
    """Whether what a node needs on the device is there or on its way."""
    if parent is None or (parent.is_adapter and not keeps_dependencies):
        return True
    return parent.device_pages is not None
