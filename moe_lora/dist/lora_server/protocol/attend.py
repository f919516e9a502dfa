"""A process that lets a peer reach its windows while it waits for something else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from moe_lora.dist.transport.contract import Transport, Window

_SLICE_S = 0.05
_NEVER = 2**64 - 1


@contextmanager
def attended(transport: Transport, window: Window) -> Iterator[None]:
    """Wait for signals meanwhile, in a thread: over NIXL a peer can attach only while its target waits."""
    done = threading.Event()

    def attend() -> None:
        while not done.is_set():
            transport.wait_any([(window, 0, _NEVER)], _SLICE_S)

    thread = threading.Thread(target=attend, name="attend", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
