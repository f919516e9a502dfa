"""Frees what nobody will ask for again, a slice at a time."""

from __future__ import annotations

from collections.abc import Callable

from .node import Node
from .tree import DependencyTree

SLICE = 64
"""Nodes that a sweep frees: it holds up the engine's thread."""


class Forgetting:
    """Hides nodes at once, then frees them from below as they fall idle.  discard: frees one."""

    def __init__(self, tree: DependencyTree, discard: Callable[[Node], None]) -> None:
        self._tree = tree
        self._discard = discard
        self._any_dying = False
        self._to_sweep: list[int] = []

    def hide(self, node: Node) -> None:
        """Nothing finds the node and what is below it any more.

        Of an adapter only the node itself is hidden, since the way to its KV leads through it, and as an
        operation on columns its KV is marked: there may be 100 000 of them.
        """
        if node.is_adapter:
            self._tree.hide(node)
            self._tree.columns.let_die(node.row)
        else:
            for lower in self._tree.bottom_up(node):
                self._tree.hide(lower)
                self._tree.refresh(lower)
        self._any_dying = True

    def sweep(self) -> bool:
        """Free a slice of what is hidden and no longer used; whether there may be more."""
        num_freed, columns, is_listed_anew = 0, self._tree.columns, False
        while self._any_dying and num_freed < SLICE:
            if not self._to_sweep:
                if is_listed_anew:  # the others are in use
                    return False
                self._to_sweep, is_listed_anew = columns.dying()[::-1], True
                self._any_dying = bool(self._to_sweep)
                continue
            node = columns.nodes[self._to_sweep.pop()]
            if node is None or not node.dying or node.pins or node.moving or node.num_children:
                continue
            self._discard(node)
            num_freed += 1
        return self._any_dying
