"""Options that say what an engine runs on, the same in every command that measures one."""

from __future__ import annotations

import click

from moe_lora.config import DEVICES, DTYPES

DEVICE = click.option("--device", default="auto", show_default=True, type=click.Choice(DEVICES))
DTYPE = click.option("--dtype", default="auto", show_default=True, type=click.Choice(DTYPES))
THREADS = click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all cores]")
