# SPDX-License-Identifier: Apache-2.0
"""`moe-lora adapters`: look at PEFT adapters before serving them, and keep a registry of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .errors import user_errors

if TYPE_CHECKING:
    from moe_lora.adapters.packed import PackedAdapter
    from moe_lora.core.shape import ModelShape

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_path = click.argument("path", type=_FOLDER, required=False)
_model = click.option(
    "--model",
    "model_dir",
    type=_FOLDER,
    help="Folder of the base model; only samples of its weights are read.",
)
_version = click.option("--version", type=click.IntRange(min=1), help="One version.  [default: all]")


def _registry(*, required: bool) -> Callable[[Any], Any]:
    return click.option(
        "--registry",
        metavar="FOLDER",
        required=required,
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder of the registry.",
    )


@click.group()
def adapters() -> None:
    """Check and list PEFT adapters, in folders or in a registry."""


@adapters.command()
@_path
@_model
@_registry(required=False)
@user_errors
def check(path: Path | None, model_dir: Path | None, registry: Path | None) -> None:
    """Read the adapter in PATH, or every adapter in the folders of PATH, as the server of --model would.

    Prints targets, rank and bytes of each, or why it cannot be served; exits with 1 if any cannot.
    Without PATH, the files of every adapter in --registry are compared with their hashes.
    """
    if path is None:
        failed = _check_registry(_only_registry(registry, model_dir))
    else:
        shape = _shape_for(path, model_dir, registry)
        assert model_dir is not None
        failed = _check_folders(path, model_dir, shape)
    if failed:
        raise SystemExit(1)


@adapters.command(name="list")
@_path
@_model
@_registry(required=False)
@user_errors
def list_adapters(path: Path | None, model_dir: Path | None, registry: Path | None) -> None:
    """Table of the adapters in the folders of PATH (or of PATH itself), or of those in --registry.

    With a registry, --model leaves out the adapters of other base models.
    """
    if path is None:
        _list_registry(_only_registry(registry), model_dir)
        return
    shape = _shape_for(path, model_dir, registry)
    rows = []
    for folder in _adapter_folders(path):
        packed = _read(folder, shape)
        if isinstance(packed, str):
            rows.append((folder.name, "-", "-", f"cannot be served; see: moe-lora adapters check {folder}"))
        else:
            rank, size = str(packed.max_lora_rank), f"{packed.nbytes:,}"
            rows.append((folder.name, rank, size, " ".join(packed.targets)))
    print_table(("name", "rank", "bytes", "targets"), rows)


@adapters.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=_FOLDER)
@_registry(required=True)
@click.option(
    "--model",
    "model_dir",
    required=True,
    type=_FOLDER,
    help="Folder of the base model; adapters that do not fit are refused.",
)
@click.option("--name", help="Name for requests.  [default: the name of the folder]")
@click.option("--owner", default="", help="Person or team to ask.")
@click.option("--link", is_flag=True, help="Refer to the files without copying.")
@user_errors
def add(
    paths: tuple[Path, ...], registry: Path, model_dir: Path, name: str | None, owner: str, link: bool
) -> None:
    """Add the PEFT adapter in each PATH, or those in its folders, to the registry, which is made if need be.

    A name that is there gets a new version, unless the files are those of its current one.
    """
    from moe_lora.adapters.registry.publish import register_adapter
    from moe_lora.adapters.registry.registry import Registry

    folders = [folder for path in paths for folder in _adapter_folders(path)]
    if name is not None and len(folders) > 1:
        raise click.UsageError("--name names one adapter; give the PATH of one, or leave it out")
    with Registry(registry, create=True) as opened:
        for path in folders:
            label = path.resolve().name if name is None else name
            added = register_adapter(opened, label, path, model_dir=model_dir, owner=owner, link=link)
            click.echo(f"{added.name}: version {added.version}, sha256 {added.content_hash[:12]}")


@adapters.command()
@click.argument("name")
@_registry(required=True)
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


@adapters.command()
@click.argument("name")
@_registry(required=True)
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


def _check_folders(path: Path, model_dir: Path, shape: ModelShape) -> bool:
    """Print what the server would say of each adapter; whether any can't be served."""
    from moe_lora.engine.text.adapter_text import text_remark

    failed = False
    for folder in _adapter_folders(path):
        packed = _read(folder, shape)
        failed |= isinstance(packed, str)
        if isinstance(packed, str):
            click.echo(f"{folder.name}: error: {packed}")
        else:
            for warning in packed.warnings:
                click.echo(f"{folder.name}: warning: {warning}")
            click.echo(
                f"{folder.name}: ok: rank {packed.max_lora_rank}, {packed.nbytes:,} bytes, "
                f"targets {' '.join(packed.targets)}, sha256 {packed.content_hash[:12]}; "
                f"{_backends(packed.max_lora_rank)}"
            )
            if remark := text_remark(folder, model_dir, used=False):
                click.echo(f"{folder.name}: note: {remark}")
    return failed


def _backends(lora_rank: int) -> str:
    """Whether each type of device computes the rank."""
    from moe_lora.core.shape import RANK_LIMITS

    said = []
    for device, limit in RANK_LIMITS.items():
        limited = "any rank" if limit is None else f"ranks up to {limit}"
        refused = limit is not None and lora_rank > limit
        said.append(f"{device}: {limited}{' (refuses this adapter)' if refused else ''}")
    return ", ".join(said)


def _list_registry(registry: Path, model_dir: Path | None) -> None:
    """Table of the current versions, of one base model if given."""
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


def _check_registry(registry: Path) -> bool:
    """Print the state of every version's files; whether any is lost or altered."""
    from moe_lora.adapters.registry.registry import Registry

    with Registry(registry) as opened:
        found = opened.check()
    for one, problem in found:
        said = f"ok: {one.num_bytes:,} bytes" if problem is None else f"error: {problem}"
        click.echo(f"{one.name}: version {one.version}: {said}")
    return any(problem is not None for _, problem in found)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns of numbers stand to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        cells = [
            f"{cell:>{width}}" if head in ("version", "rank", "bytes") else f"{cell:<{width}}"
            for head, cell, width in zip(heads, row, widths, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _adapter_folders(path: Path) -> list[Path]:
    """PATH itself if it is an adapter, else its subfolders that are."""
    if not any(path.glob("*/adapter_config.json")):
        return [path]
    return sorted(found.parent for found in path.glob("*/adapter_config.json"))


def _only_registry(registry: Path | None, model_dir: Path | None = None) -> Path:
    if registry is None:
        raise click.UsageError("give PATH and --model, or --registry")
    if model_dir is not None:
        raise click.UsageError("--model belongs to PATH; files in a registry are compared with their hashes")
    return registry


def _shape_for(path: Path, model_dir: Path | None, registry: Path | None) -> ModelShape:
    from moe_lora.adapters.registry.base_model import model_shape

    if registry is not None:
        raise click.UsageError(f"give PATH ({path}) or --registry, not both")
    if model_dir is None:
        raise click.UsageError("PATH needs --model, the folder of the base model")
    return model_shape(model_dir)


def _read(folder: Path, shape: ModelShape) -> PackedAdapter | str:
    """The packed adapter, or why it cannot be served."""
    import torch

    from moe_lora.adapters.peft.reader import read_adapter
    from moe_lora.core.errors import AdapterError

    try:
        dtype = torch.float32 if shape.dtype_bytes == 4 else torch.bfloat16
        return read_adapter(folder, shape, dtype, log=False)
    except AdapterError as error:
        return str(error)
