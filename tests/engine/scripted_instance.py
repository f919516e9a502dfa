"""An instance's process without a model: `python -m tests.engine.scripted_instance NAME NUMBER PORT...`."""

from __future__ import annotations

import sys

from .door_parts import Instance

if __name__ == "__main__":
    name, number, *ports = sys.argv[1:]
    instance = Instance(name, *map(int, ports), number=int(number), adapters={"start": ("places/start", 1)})
    sys.stdin.read()  # until the test is over
    instance.stop()
