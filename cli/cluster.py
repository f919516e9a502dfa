# SPDX-License-Identifier: Apache-2.0
"""`moe-lora cluster`."""

from __future__ import annotations

from pathlib import Path

import click

from .errors import user_errors


@click.group()
def cluster() -> None:
    """Prepare a cluster over several hosts (docs/guides/cluster.md)."""


@cluster.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("certificates"),
    help="Folder to write; `certificates` in the file.",
)
@user_errors
def init(folder: Path) -> None:
    """Make the certificates by which the roles of one cluster know each other.

    Every host needs authority.pem and member.pem.  Who has member.pem takes part; keep it as a password.
    """
    from moe_lora.dist.net.keys import AUTHORITY, AUTHORITY_KEY, MEMBER, make_keys

    make_keys(folder)
    print(f"{folder}: copy {AUTHORITY} and {MEMBER} to every host, and name the folder as `certificates`.")
    print(f"{AUTHORITY_KEY} signs further members; no host needs it.")
