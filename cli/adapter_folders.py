# SPDX-License-Identifier: Apache-2.0
"""Arguments of the commands of `moe-lora adapters`, and adapters' folders read as the server would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from moe_lora.adapters.packed import PackedAdapter
    from moe_lora.core.shape import ModelShape

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
path_argument = click.argument("path", type=FOLDER, required=False)
model_option = click.option(
    "--model",
    "model_dir",
    type=FOLDER,
    help="Folder of the base model; only samples of its weights are read.",
)
version_option = click.option("--version", type=click.IntRange(min=1), help="One version.  [default: all]")


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


def only_registry(registry: Path | None, model_dir: Path | None = None) -> Path:
    if registry is None:
        raise click.UsageError("give PATH and --model, or --registry")
    if model_dir is not None:
        raise click.UsageError("--model belongs to PATH; files in a registry are compared with their hashes")
    return registry


def shape_for(path: Path, model_dir: Path | None, registry: Path | None) -> ModelShape:
    from moe_lora.adapters.registry.base_model import model_shape

    if registry is not None:
        raise click.UsageError(f"give PATH ({path}) or --registry, not both")
    if model_dir is None:
        raise click.UsageError("PATH needs --model, the folder of the base model")
    return model_shape(model_dir)


def read_or_reason(folder: Path, shape: ModelShape, model_dir: Path) -> PackedAdapter | str:
    """The packed adapter, or why it cannot be served."""
    import torch

    from moe_lora.adapters.peft.base_weights import check_copies_in
    from moe_lora.adapters.peft.reader import read_adapter
    from moe_lora.core.errors import AdapterError

    try:
        dtype = torch.float32 if shape.dtype_bytes == 4 else torch.bfloat16
        packed = read_adapter(folder, shape, dtype, base_dir=model_dir)
        if packed.base_copies:
            check_copies_in(folder, packed.base_copies, model_dir, None)
        return packed
    except AdapterError as error:
        return str(error)
