# SPDX-License-Identifier: Apache-2.0
"""Steps with a LoRA Server, from overlap.jsonl: docs/results.md."""

from __future__ import annotations

from .evidence import records
from .markdown import table


def overlap() -> str:
    """Hidden share of the server's time, and steps over the base model's, by requests."""
    found = [(one["config"]["num_requests"], one["result"]) for one in records("overlap.jsonl")]
    rows = [
        (
            "server's time hidden behind base computation (goal 90 %)",
            *(f"{r['hidden_share']:.0%}" for _, r in found),
        ),
        ("step over the base model's, server", *(f"{r['remote_over_base']['median']:.2f}" for _, r in found)),
        ("the same, adapters in the engine", *(f"{r['local_over_base']['median']:.2f}" for _, r in found)),
    ]
    return table(("requests", *(str(number) for number, _ in found)), rows)
