"""A sequence's pages of KV, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .orders import Namespace

if TYPE_CHECKING:
    from .node import Node


@dataclass(eq=False)
class BlockTable:
    """Device pages of a sequence: first those it shares with the tree, then its own.

    tail: the deepest tree node it uses, which it pins (and so all above it).  num_shared: pages that belong
    to the tree.  num_matched: tokens found by `UnifiedCache.match`.  arriving: nodes that were still on their
    way to the device when last asked.  owns_tail: the tail was made by this sequence, which may lengthen it.
    """

    namespace: Namespace
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0
    num_matched: int = 0
    tail: Node | None = None
    owns_tail: bool = False
    arriving: list[Node] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether everything matched is on the device: only then may the sequence compute."""
        self.arriving = [node for node in self.arriving if not node.on_device]
        return not self.arriving

    @property
    def lost(self) -> bool:
        """A copy that this table waited for failed: release it and match again."""
        return any(node.lost for node in self.arriving)
