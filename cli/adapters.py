# SPDX-License-Identifier: Apache-2.0
"""`moe-lora adapters`: check, register and roll out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from .adapter_folders import (
    FOLDER,
    adapter_folders,
    check,
    convert,
    model_option,
    only_registry,
    path_argument,
    read_or_reason,
    registry_option,
    shape_for,
    version_option,
)
from .administrator import call, server_options
from .errors import user_errors

TIMEOUT_S = 600.0
"""A rollout loads the adapter on all instances."""


class Share(click.ParamType):
    """A share of the requests: 5% or 0.05."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            found = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            found = 0.0
        if not 0 < found <= 1:
            self.fail(f"{value!r} is no share; give one above 0% and up to 100%, as 5% or 0.05", param, ctx)
        return found


def _step(url: str, api_key: str | None, name: str, step: str, body: Any = None) -> None:
    from urllib.parse import quote

    card = call(url, api_key, "POST", f"/v1/aliases/{quote(name, safe='')}/{step}", TIMEOUT_S, body)
    rows = ", ".join(f"{one['adapter']} {one['share']:.4g}" for one in card["targets"])
    click.echo(f"{name}: {rows} ({card['stage']})")
    if step == "rollout" and len(card["targets"]) == 1 and not card["saved"]:
        click.echo(
            "The server forgets this alias with its last process: the adapter is neither a version of a "
            "--registry nor in the server's settings, or there is no --registry."
        )


@click.command()
@click.argument("name")
@click.option("--to", required=True, help="Loaded adapter, or version of the registry's NAME, as v8.")
@click.option("--share", type=Share(), help="Share of the requests, as 5%; left out for a first adapter.")
@server_options
@user_errors
def rollout(name: str, to: str, share: float | None, url: str, api_key: str | None) -> None:
    """Send a share of the requests for NAME to an adapter of a running `moe-lora serve`.

    The requests of a `user` stay with an adapter, also when the share rises.
    """
    _step(url, api_key, name, "rollout", {"to": to, "share": share})


@click.command()
@click.argument("name")
@server_options
@user_errors
def promote(name: str, url: str, api_key: str | None) -> None:
    """Send every request for NAME to the adapter under rollout; the former adapter stays loaded."""
    _step(url, api_key, name, "promote")


@click.command()
@click.argument("name")
@server_options
@user_errors
def rollback(name: str, url: str, api_key: str | None) -> None:
    """Undo the last rollout of NAME, also after its promotion; running requests end unchanged."""
    _step(url, api_key, name, "rollback")


@click.command()
@click.argument("name")
@server_options
@user_errors
def drop(name: str, url: str, api_key: str | None) -> None:
    """Keep the former adapter of NAME no longer, after a promotion or a rollback: it may leave memory."""
    _step(url, api_key, name, "drop")


@click.group()
def adapters() -> None:
    """Check and list PEFT adapters, in folders or in a registry."""


for _command in (check, convert, rollout, promote, rollback, drop):
    adapters.add_command(_command)


@adapters.command(name="list")
@path_argument
@model_option
@registry_option(required=False)
@user_errors
def list_adapters(path: Path | None, model_dir: Path | None, registry: Path | None) -> None:
    """Table of the adapters in the folders of PATH (or of PATH itself), or of those in --registry.

    With a registry, --model leaves out the adapters of other base models.
    """
    if path is None:
        _list_registry(only_registry(registry), model_dir)
        return
    shape = shape_for(path, model_dir, registry)
    assert model_dir is not None
    rows = []
    for folder in adapter_folders(path):
        packed = read_or_reason(folder, shape, model_dir)
        if isinstance(packed, str):
            rows.append((folder.name, "-", "-", f"cannot be served; see: moe-lora adapters check {folder}"))
        else:
            rank, size = str(packed.max_lora_rank), f"{packed.nbytes:,}"
            rows.append((folder.name, rank, size, " ".join(packed.targets)))
    print_table(("name", "rank", "bytes", "targets"), rows)


@adapters.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=FOLDER)
@registry_option(required=True)
@click.option(
    "--model",
    "model_dir",
    required=True,
    type=FOLDER,
    help="Folder of the base model; adapters that do not fit are refused.",
)
@click.option("--name", help="Name for requests.  [default: the name of the folder]")
@click.option("--owner", show_default=False, default="", help="Person or team to ask.")
@click.option("--link", is_flag=True, help="Refer to the files without copying.")
@user_errors
def add(
    paths: tuple[Path, ...], registry: Path, model_dir: Path, name: str | None, owner: str, link: bool
) -> None:
    """Add the PEFT adapter in each PATH, or those in its folders, to the registry, which is made if need be.

    A name that is there gets a new version, unless the files are those of its current one.
    """
    from moe_lora.adapters.registry.register import register_adapter
    from moe_lora.adapters.registry.registry import Registry

    folders = [folder for path in paths for folder in adapter_folders(path)]
    if name is not None and len(folders) > 1:
        raise click.UsageError("--name names one adapter; give the PATH of one, or leave it out")
    with Registry(registry, create=True) as opened:
        for path in folders:
            label = path.resolve().name if name is None else name
            added = register_adapter(opened, label, path, model_dir=model_dir, owner=owner, link=link)
            click.echo(f"{added.name}: version {added.version}, sha256 {added.content_hash[:12]}")


@adapters.command()
@click.argument("name")
@registry_option(required=True)
@version_option
@user_errors
def show(name: str, registry: Path, version: int | None) -> None:
    """Everything the registry knows of NAME, of removed versions too."""
    from moe_lora.adapters.registry.registry import Registry

    with Registry(registry) as opened:
        found = opened.versions(name) if version is None else [opened.get(name, version)]
    for one in found:
        created = datetime.fromtimestamp(one.created_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        click.echo(f"{one.name} version {one.version}: {one.state}")
        for label, value in (
            ("rank", one.lora_rank),
            ("alpha", f"{one.alpha:g}"),
            ("targets", " ".join(one.targets)),
            ("bytes", f"{one.num_bytes:,}"),
            ("content", one.content_hash),
            ("base model", one.base_hash),
            ("path", one.path),
            ("added from", one.source),
            ("owner", one.owner or "-"),
            ("created", created),
        ):
            click.echo(f"  {label:<10}  {value}")


@adapters.command()
@click.argument("name")
@registry_option(required=True)
@version_option
@user_errors
def remove(name: str, registry: Path, version: int | None) -> None:
    """Take NAME out of the registry; files that no other adapter shares are deleted.

    A server that serves it keeps it, but needs its files when an instance starts again: unload it first.
    """
    from moe_lora.adapters.registry.registry import Registry

    with Registry(registry) as opened:
        for one in opened.remove(name, version):
            click.echo(f"{one.name}: version {one.version} removed")


def _list_registry(registry: Path, model_dir: Path | None) -> None:
    """Print current versions, perhaps of one base model."""
    from moe_lora.adapters.registry.base_model import base_model_hash
    from moe_lora.adapters.registry.registry import Registry

    base_hash = None if model_dir is None else base_model_hash(model_dir)
    with Registry(registry) as opened:
        found = opened.adapters(base_hash=base_hash)
    rows = []
    for one in found:
        facts = (str(one.version), str(one.lora_rank), f"{one.num_bytes:,}", one.state, one.base_hash[:12])
        rows.append((one.name, *facts, one.owner or "-"))
    print_table(("name", "version", "rank", "bytes", "state", "base model", "owner"), rows)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        cells = [
            f"{cell:>{width}}" if head in ("version", "rank", "bytes") else f"{cell:<{width}}"
            for head, cell, width in zip(heads, row, widths, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())
