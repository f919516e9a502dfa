# SPDX-License-Identifier: Apache-2.0
"""`moe-lora env`."""

from __future__ import annotations

import json

import click

from moe_lora.report.results import environment


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as result files hold it.")
def env(as_json: bool) -> None:
    """Show the machine and the versions in use, as every result file records them."""
    found = environment()
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    packages = found.pop("packages")
    memory_bytes = found.pop("memory_bytes")
    found["memory"] = None if memory_bytes is None else f"{memory_bytes / 2**30:.1f} GiB"
    lines = {**found, **{name: version or "not installed" for name, version in packages.items()}}
    for name, value in lines.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        click.echo(f"{name:<14} {'–' if shown in (None, '', {}) else shown}")
