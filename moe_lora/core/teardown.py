# SPDX-License-Identifier: Apache-2.0
"""Quiet and quick ends of a process.  Every command imports this first."""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from .errors import PeerGoneError


def quiet_teardown() -> None:
    """Drop stderr of C++ libraries after Python's end.

    Triton's nanobind reports false "leaks" there.  Call this first: exit functions run in reverse order.
    """
    atexit.register(_close_stderr)


def quick_teardown() -> None:
    """End this process without garbage collection, which takes half a second with torch."""
    atexit.register(gc.freeze)


def ignore_ctrl_c(priority: int | None = None) -> None:
    """For a child that its keeper ends.  priority: of this process; None: unchanged."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if priority is not None:
        os.setpriority(os.PRIO_PROCESS, 0, priority)


def run_child(serve: Callable[[int], None]) -> None:
    """Main of `processes.start_child`: serve the socket until the keeper hangs up."""
    ignore_ctrl_c()
    quick_teardown()
    import logging

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    with suppress(EOFError, ConnectionError, PeerGoneError):
        serve(int(sys.argv[-1]))


def end_at_hang_up(fd: int, clean_up: Callable[[], None]) -> None:
    """Clean up and end this process, even in a computation, once the other end hangs up."""
    hang_up = select.poll()
    # poll always reports hang-ups; POLLRDHUP reports a half-closed peer.
    hang_up.register(fd, getattr(select, "POLLRDHUP", 0))

    def end() -> None:
        try:
            hang_up.poll()
            clean_up()
        finally:
            os._exit(0)

    threading.Thread(target=end, name="keeper-watch", daemon=True).start()


def _close_stderr() -> None:
    with suppress(OSError, ValueError):
        sys.stderr.flush()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        os.close(nothing)
