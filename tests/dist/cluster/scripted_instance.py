# SPDX-License-Identifier: Apache-2.0
"""An instance's process without a model.

Run as `python -m tests.dist.cluster.scripted_instance NAME NUMBER SOCKET...`.
"""

from __future__ import annotations

import sys

from .listener_parts import Instance

if __name__ == "__main__":
    name, number, *sockets = sys.argv[1:]
    instance = Instance(name, *sockets, number=int(number), adapters={"start": ("places/start", 1)})
    sys.stdin.read()  # until the test is over
    instance.stop()
