# SPDX-License-Identifier: Apache-2.0
"""A wait for an event that must come has no limit of its own: a busy machine passes each."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
LIMITED = re.compile(
    r"\.(?:result|join|wait|acquire)\((?:timeout=)?\d"
    r"|\b(?:communicate|get|run|stream|request|Client|AsyncClient|wait)\(.*\btimeout=\d"
    r"|monotonic\(\) \+ \d"
)
SHORT = {
    "dist/cluster/controller/test_instance_control.py": "a call goes on",
    "dist/cluster/test_connection_mux.py": "an inbox is empty",
    "dist/cluster/test_listener.py": "a load goes on",
    "dist/drive_requests.py": "a process without the tests' fixtures",
    "dist/launch/test_one_host.py": "a stop goes on",
    "dist/lora_server/put_server.py": "a process is killed after it",
    "dist/net/test_thread.py": "a file hangs",
    "dist/transport/symmetric_memory.py": "looks again",
    "engine/text/test_text.py": "looks again",
    "models/test_quantised.py": "looks again",
    "serve/test_contents.py": "looks again",
    "sse_server.py": "a thread that nothing needs any more",
}
"""Files with short waits, and what these show: nothing fails where the wait is too short."""


def test_waits_for_events_have_the_tests_patience():
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        name = str(path.relative_to(TESTS))
        if path == Path(__file__) or path.name.startswith("chaos"):
            continue
        if lines := [line.strip() for line in path.read_text().splitlines() if LIMITED.search(line)]:
            found[name] = lines
    assert {name: lines for name, lines in found.items() if name not in SHORT} == {}, "wait for PATIENCE_S"
    assert SHORT.keys() <= found.keys()
