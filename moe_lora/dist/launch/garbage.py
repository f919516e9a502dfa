"""Keeps Python's garbage collector out of the way of steps."""

from __future__ import annotations

import gc

FULL_COLLECTION_EVERY = 1000
"""Collections of the middle generation between two of everything; Python's own default is 10."""


def collect_rarely() -> None:
    """What is there now (modules, the model) is never looked at again, and all that comes later seldom.

    A full collection stops the engine's thread for as long as it takes to look at every object: 0.3 s at
    100 000 cached nodes.  It frees cycles only, and the engine makes next to none: all else goes at once
    when nobody refers to it.  For the engine's own process, since the collector is the whole process's.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_EVERY)
