# SPDX-License-Identifier: Apache-2.0
"""Shared memory of this host that the product could have left."""

from __future__ import annotations

import os


def names_in_shm() -> set[str]:
    """Names in /dev/shm, without semaphores of multiprocessing.

    The product makes none; other processes of the machine do.
    """
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}
