"""The `moe-lora` process: quiet where Ctrl-C ends it, and at its end."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

from moe_lora.core.host import quiet_teardown

from .main import main

INTERRUPTED = 130
"""What a shell reports for a command that Ctrl-C ended."""


def run() -> NoReturn:
    """Run the command of the arguments and exit.

    Ctrl-C ends it without a traceback, also while modules are imported, where it comes out as any error.
    """
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job of a script ignores it
        signal.signal(signal.SIGINT, interrupt)
    quiet_teardown()
    try:
        main()
    except (Exception, SystemExit, KeyboardInterrupt):
        if not interrupts:
            raise
    sys.exit(INTERRUPTED if interrupts else 0)
