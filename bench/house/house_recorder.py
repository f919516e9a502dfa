# SPDX-License-Identifier: Apache-2.0
"""Count the calls of each function of a checkout, inside every process of a server, window by window.

A `sitecustomize` module of the driver (`house_trace`) calls `record` when a process starts.  This file needs
the standard library only.  SIGUSR1 switches the main thread's counting on, so a server starts at full
speed.  SIGUSR2 writes the counts to PID.json.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import threading
from types import CodeType, FrameType
from typing import Any

FOLDER, TREE = "HOUSE_TRACE_FOLDER", "HOUSE_TRACE_TREE"
WINDOW_FILE = "window"


def record() -> None:
    """Count, from now on, the calls of the tree's functions while a window is open.

    The byte in `WINDOW_FILE` is the number of the open window; 0: no window is open.
    """
    folder, tree = os.environ[FOLDER], os.environ[TREE]
    with open(os.path.join(folder, WINDOW_FILE), "rb") as file:
        window = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    counts: dict[tuple[int, CodeType, CodeType | None], int] = {}

    def count(frame: FrameType, event: str, argument: Any) -> None:
        now = window[0]
        if now and event == "call":
            key = now, frame.f_code, frame.f_back and frame.f_back.f_code
            counts[key] = counts.get(key, 0) + 1

    def switch_on(number: int, frame: FrameType | None) -> None:
        sys.setprofile(count)
        _write(folder, {"command": _command()})

    def write(number: int, frame: FrameType | None) -> None:
        sys.setprofile(None)
        found = _calls(list(counts.items()), tree)
        modules = sorted(name for name in sys.modules if name.partition(".")[0] == "moe_lora")
        _write(folder, {"command": _command(), "modules": modules, "calls": found})

    def start() -> None:
        counts.clear()
        with open(os.path.join(folder, f"{os.getpid()}.pid"), "w", encoding="utf-8"):
            pass

    signal.signal(signal.SIGUSR1, switch_on)
    signal.signal(signal.SIGUSR2, write)
    threading.setprofile(count)
    os.register_at_fork(after_in_child=start)
    start()


def _calls(
    counts: list[tuple[tuple[int, CodeType, CodeType | None], int]], tree: str
) -> list[tuple[int, str, str, str, int]]:
    """(window, file, name and line, caller, calls) of functions of moe_lora and cli; no comprehensions."""
    folders = (os.path.join(tree, "moe_lora", ""), os.path.join(tree, "cli", ""))
    found = []
    for (window, code, caller), calls in counts:
        generated = code.co_name.startswith("<") and code.co_name != "<lambda>"
        if code.co_filename.startswith(folders) and not generated:
            path = os.path.relpath(code.co_filename, tree)
            called_by = "" if caller is None else f"{caller.co_filename}:{_name(caller)}"
            found.append((window, path, _name(code), called_by, calls))
    return found


def _name(code: CodeType) -> str:
    name = getattr(code, "co_qualname", code.co_name)  # qualified since Python 3.11
    return f"{name}:{code.co_firstlineno}"


def _write(folder: str, found: dict[str, Any]) -> None:
    path = os.path.join(folder, str(os.getpid()))
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.replace(f"{path}.part", f"{path}.json")


def _command() -> str:
    with open("/proc/self/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
