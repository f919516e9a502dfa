"""How many files and connections a process may have open."""

from __future__ import annotations

import os
import resource


def allow_many_files() -> int:
    """Raise this process's limit as far as the system lets it; the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def num_open_files() -> int:
    """Files and connections that this process has open now."""
    return len(os.listdir("/proc/self/fd"))
