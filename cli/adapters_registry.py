"""`moe-lora adapters add, show, remove`, and what `list` and `check` say of a registry."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from .errors import user_errors

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


def registry_option(*, required: bool) -> Callable[[Any], Any]:
    return click.option(
        "--registry",
        metavar="FOLDER",
        required=required,
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder of the registry.",
    )


def adapter_folders(path: Path) -> list[Path]:
    """PATH itself if it is an adapter, else its subfolders that are."""
    if not any(path.glob("*/adapter_config.json")):
        return [path]
    return sorted(found.parent for found in path.glob("*/adapter_config.json"))


_version = click.option("--version", type=click.IntRange(min=1), help="One version.  [default: all]")


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=_FOLDER)
@registry_option(required=True)
@click.option(
    "--model",
    "model_dir",
    required=True,
    type=_FOLDER,
    help="Folder of the base model; what it could not serve is refused.",
)
@click.option("--name", help="What requests will use as model.  [default: the name of the folder]")
@click.option("--owner", default="", help="Whom to ask about it.")
@click.option("--link", is_flag=True, help="Refer to the files where they are instead of copying them.")
@user_errors
def add(
    paths: tuple[Path, ...], registry: Path, model_dir: Path, name: str | None, owner: str, link: bool
) -> None:
    """Add the PEFT adapter in each PATH, or those in its folders, to the registry, which is made if need be.

    A name that is there gets a new version, unless the files are those of its current one.
    """
    from moe_lora.adapters.registry.publish import register_adapter
    from moe_lora.adapters.registry.registry import Registry

    folders = [folder for path in paths for folder in adapter_folders(path)]
    if name is not None and len(folders) > 1:
        raise click.UsageError("--name names one adapter; give the PATH of one, or leave it out")
    with Registry(registry, create=True) as opened:
        for path in folders:
            label = path.resolve().name if name is None else name
            added = register_adapter(opened, label, path, model_dir=model_dir, owner=owner, link=link)
            click.echo(f"{added.name}: version {added.version}, sha256 {added.content_hash[:12]}")


@click.command()
@click.argument("name")
@registry_option(required=True)
@_version
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


@click.command()
@click.argument("name")
@registry_option(required=True)
@_version
@user_errors
def remove(name: str, registry: Path, version: int | None) -> None:
    """Take NAME out of the registry; files that no other adapter shares are deleted.

    A server that serves it keeps it, but needs its files when an instance starts again: unload it first.
    """
    from moe_lora.adapters.registry.registry import Registry

    with Registry(registry) as opened:
        for one in opened.remove(name, version):
            click.echo(f"{one.name}: version {one.version} removed")


def list_registry(registry: Path, model_dir: Path | None) -> None:
    """Table of the current versions, of one base model if given."""
    from moe_lora.adapters.registry.base_model import base_model_hash
    from moe_lora.adapters.registry.registry import Registry

    base_hash = None if model_dir is None else base_model_hash(model_dir)
    with Registry(registry) as opened:
        found = opened.adapters(base_hash=base_hash)
    rows = [("name", "version", "rank", "bytes", "state", "base model", "owner")]
    for one in found:
        facts = (str(one.version), str(one.lora_rank), f"{one.num_bytes:,}", one.state, one.base_hash[:12])
        rows.append((one.name, *facts, one.owner or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            f"{cell:>{width}}" if column in (1, 2, 3) else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def check_registry(registry: Path) -> bool:
    """Print the state of every version's files; whether any is lost or altered."""
    from moe_lora.adapters.registry.registry import Registry

    with Registry(registry) as opened:
        found = opened.check()
    for one, problem in found:
        said = f"ok: {one.num_bytes:,} bytes" if problem is None else f"error: {problem}"
        click.echo(f"{one.name}: version {one.version}: {said}")
    return any(problem is not None for _, problem in found)
