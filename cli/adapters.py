"""`moe-lora adapters`: look at PEFT adapters before serving them, and keep a registry of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .adapters_registry import (
    adapter_folders,
    add,
    check_registry,
    list_registry,
    registry_option,
    remove,
    show,
)
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
    help="Folder of the base model (of its weights only samples are read).",
)


@click.group()
def adapters() -> None:
    """Check and list PEFT adapters, in folders or in a registry."""


for command in (add, show, remove):
    adapters.add_command(command)


@adapters.command()
@_path
@_model
@registry_option(required=False)
@user_errors
def check(path: Path | None, model_dir: Path | None, registry: Path | None) -> None:
    """Read the adapter in PATH, or every adapter in the folders of PATH, as the server of --model would.

    Prints targets, rank and bytes of each, or why it cannot be served; exits with 1 if any cannot.
    Without PATH, the files of every adapter in --registry are compared with their hashes.
    """
    if path is None:
        failed = check_registry(_only_registry(registry, model_dir))
    else:
        failed = _check_folders(path, _shape_for(path, model_dir, registry))
    if failed:
        raise SystemExit(1)


@adapters.command(name="list")
@_path
@_model
@registry_option(required=False)
@user_errors
def list_adapters(path: Path | None, model_dir: Path | None, registry: Path | None) -> None:
    """Table of the adapters in the folders of PATH (or of PATH itself), or of those in --registry.

    With a registry, --model leaves out the adapters of other base models.
    """
    if path is None:
        list_registry(_only_registry(registry), model_dir)
        return
    shape = _shape_for(path, model_dir, registry)
    rows = [("name", "rank", "bytes", "targets")]
    for folder in adapter_folders(path):
        packed = _read(folder, shape)
        if isinstance(packed, str):
            rows.append((folder.name, "-", "-", f"cannot be served; see: moe-lora adapters check {folder}"))
        else:
            rank, size = str(packed.max_lora_rank), f"{packed.nbytes:,}"
            rows.append((folder.name, rank, size, " ".join(packed.targets)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, rank, size, targets in rows:
        click.echo(f"{name:<{widths[0]}}  {rank:>{widths[1]}}  {size:>{widths[2]}}  {targets}")


def _check_folders(path: Path, shape: ModelShape) -> bool:
    """Print what the server would say of each adapter; whether any can't be served."""
    failed = False
    for folder in adapter_folders(path):
        packed = _read(folder, shape)
        failed |= isinstance(packed, str)
        if isinstance(packed, str):
            click.echo(f"{folder.name}: error: {packed}")
        else:
            for warning in packed.warnings:
                click.echo(f"{folder.name}: warning: {warning}")
            click.echo(
                f"{folder.name}: ok: rank {packed.max_lora_rank}, {packed.nbytes:,} bytes, "
                f"targets {' '.join(packed.targets)}, sha256 {packed.content_hash[:12]}"
            )
    return failed


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
