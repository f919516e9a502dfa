# SPDX-License-Identifier: Apache-2.0
"""Options that say what the requests ask for, the same in every command that has them."""

from __future__ import annotations

import click

FORMATS = ("azure", "burstgpt", "mooncake", "sharegpt", "lmsys", "vllm", "own")
"""Keys of `workload.FORMATS`, which are not imported for a --help."""

FORMAT = click.option("--format", type=click.Choice(FORMATS), help="The trace's format.  [default: detected]")
ZIPF = click.option("--zipf", type=float, help="Popularity ~ 1 / place**ZIPF; 0: uniform.  [default: 1.2]")
POPULARITY = click.option(
    "--popularity",
    metavar="NAME|FILE",
    help="Popularity of another shape than --zipf, e.g. uniform, long-tail, loraserve:shifting, "
    "functions:10:TRACE.csv; or counts: CSV adapter,count or JSON.",
)
