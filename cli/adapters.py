"""`moe-lora adapters`: look at PEFT adapters before serving them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from moe_lora.adapters.packed import PackedAdapter
    from moe_lora.core.shape import ModelShape

_path = click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
_model = click.option(
    "--model",
    "model_dir",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the base model (its config.json is read, its weights are not).",
)


@click.group()
def adapters() -> None:
    """Check and list PEFT adapters."""


@adapters.command()
@_path
@_model
def check(path: Path, model_dir: Path) -> None:
    """Read the adapter in PATH, or every adapter in the folders of PATH, as the server would.

    Prints targets, rank and bytes of each, or why it cannot be served; exits with 1 if any cannot.
    """
    shape = _read_shape(model_dir)
    failed = False
    for folder in _folders(path):
        packed = _read(folder, shape)
        failed |= isinstance(packed, str)
        if isinstance(packed, str):
            click.echo(f"{folder.name}: error: {packed}")
        else:
            click.echo(
                f"{folder.name}: ok: rank {packed.max_lora_rank}, {packed.nbytes:,} bytes, "
                f"targets {' '.join(packed.targets)}, sha256 {packed.content_hash[:12]}"
            )
    if failed:
        raise SystemExit(1)


@adapters.command(name="list")
@_path
@_model
def list_adapters(path: Path, model_dir: Path) -> None:
    """Table of the adapters in the folders of PATH (or of PATH itself)."""
    shape = _read_shape(model_dir)
    rows = [("name", "rank", "bytes", "targets")]
    for folder in _folders(path):
        packed = _read(folder, shape)
        if isinstance(packed, str):
            rows.append((folder.name, "-", "-", f"cannot be served; see: moe-lora adapters check {folder}"))
        else:
            rank, size = str(packed.max_lora_rank), f"{packed.nbytes:,}"
            rows.append((folder.name, rank, size, " ".join(packed.targets)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, rank, size, targets in rows:
        click.echo(f"{name:<{widths[0]}}  {rank:>{widths[1]}}  {size:>{widths[2]}}  {targets}")


def _folders(path: Path) -> list[Path]:
    """PATH itself if it is an adapter, else its subfolders that are."""
    if not any(path.glob("*/adapter_config.json")):
        return [path]
    return sorted(found.parent for found in path.glob("*/adapter_config.json"))


def _read_shape(model_dir: Path) -> ModelShape:
    import json

    from moe_lora.core.shape import ModelShape

    try:
        return ModelShape.from_hf_config(json.loads((model_dir / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--model {model_dir}: {error}") from error


def _read(folder: Path, shape: ModelShape) -> PackedAdapter | str:
    """The packed adapter, or why it cannot be served."""
    import torch

    from moe_lora.adapters.peft_format import read_adapter
    from moe_lora.core.errors import AdapterError

    try:
        dtype = torch.float32 if shape.dtype_bytes == 4 else torch.bfloat16
        return read_adapter(folder, shape, dtype)
    except AdapterError as error:
        return str(error)
