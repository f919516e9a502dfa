# SPDX-License-Identifier: Apache-2.0
"""`moe-lora adapters check` and `convert`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .errors import user_errors

if TYPE_CHECKING:
    from moe_lora.adapters.packed import PackedAdapter
    from moe_lora.adapters.peft.origin import Origin
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
    """PATH itself if an adapter, else its adapter folders."""
    below = [] if (path / "adapter_config.json").exists() else path.glob("*/adapter_config.json")
    return sorted(found.parent for found in below) or [path]


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
    """The packed adapter, or the reason against serving."""
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


@click.command()
@path_argument
@model_option
@registry_option(required=False)
@user_errors
def check(path: Path | None, model_dir: Path | None, registry: Path | None) -> None:
    """Read the adapter in PATH, or every adapter in the folders of PATH, as the server of --model would.

    Prints the tool that wrote each, its form, targets, rank and bytes in memory, and what has no effect; or
    why it cannot be served.  Exits with 1 if any cannot.
    Without PATH, the files of every adapter in --registry are compared with their hashes.
    """
    if path is None:
        failed = _check_registry(only_registry(registry, model_dir))
    else:
        shape = shape_for(path, model_dir, registry)
        assert model_dir is not None
        failed = _check_folders(path, model_dir, shape)
    if failed:
        raise SystemExit(1)


def _check_folders(path: Path, model_dir: Path, shape: ModelShape) -> bool:
    """Print the verdict on each adapter; True for any failure."""
    from moe_lora.engine.text.adapter_text import text_remark

    failed = False
    for folder in adapter_folders(path):
        packed = read_or_reason(folder, shape, model_dir)
        failed |= isinstance(packed, str)
        if isinstance(packed, str):
            click.echo(f"{folder.name}: error: {packed}")
        else:
            for warning in packed.warnings:
                click.echo(f"{folder.name}: warning: {warning}")
            origin = _origin(folder, shape, model_dir)
            if origin.ignored:
                click.echo(f"{folder.name}: without effect: {', '.join(origin.ignored)}")
            click.echo(
                f"{folder.name}: ok: rank {packed.max_lora_rank}, {packed.nbytes:,} bytes, "
                f"targets {' '.join(packed.targets)}, sha256 {packed.content_hash[:12]}; "
                f"{_backends(packed)}; written by {origin.tool}: {', '.join(origin.forms)}"
            )
            if remark := text_remark(folder, model_dir, used=False):
                click.echo(f"{folder.name}: note: {remark}")
    return failed


def _origin(folder: Path, shape: ModelShape, model_dir: Path) -> Origin:
    from moe_lora.adapters.peft.file_check import opened
    from moe_lora.adapters.peft.files import read_json
    from moe_lora.adapters.peft.origin import origin_of

    with opened(folder, shape, base_dir=model_dir) as found:
        return origin_of(read_json(folder), found.entries, found.match)


def _backends(packed: PackedAdapter) -> str:
    """The adapter's support by device type."""
    from moe_lora.core.shape import RANK_LIMITS

    said = []
    for device, limit in RANK_LIMITS.items():
        limited = "any rank" if limit is None else f"ranks up to {limit}"
        refused = limit is not None and packed.max_lora_rank > limit
        if packed.has_columns and device != "cpu":
            limited, refused = "no DoRA or lora_bias", True
        said.append(f"{device}: {limited}{' (refuses this adapter)' if refused else ''}")
    return ", ".join(said)


def _check_registry(registry: Path) -> bool:
    """Print the state of each version's files; True for any problem."""
    from moe_lora.adapters.registry.registry import Registry

    with Registry(registry) as opened:
        found = opened.check()
    for one, problem in found:
        said = f"ok: {one.num_bytes:,} bytes" if problem is None else f"error: {problem}"
        click.echo(f"{one.name}: version {one.version}: {said}")
    return any(problem is not None for _, problem in found)


@click.command()
@click.argument("source", metavar="SRC", type=FOLDER)
@click.argument("target", metavar="DST", type=click.Path(file_okay=False, path_type=Path))
@click.option("--model", "model_dir", required=True, type=FOLDER, help="Folder of the base model.")
@click.option(
    "--initial",
    type=FOLDER,
    help="The adapter before training, for PiSSA, OLoRA, CorDA and LoRA-GA: they change the base too.",
)
@user_errors
def convert(source: Path, target: Path, model_dir: Path, initial: Path | None) -> None:
    """Write the adapter in SRC to the new folder DST as PEFT writes adapters of the model.

    SRC may have any form that the server of --model serves; both adapters compute the same deltas.
    """
    from moe_lora.adapters.peft.base_weights import check_copies_in
    from moe_lora.adapters.peft.files import read_json
    from moe_lora.adapters.peft.plain import family_by_names, plain_pairs, without_initial, write_plain
    from moe_lora.adapters.peft.reader import read_adapter, read_pairs
    from moe_lora.adapters.registry.base_model import model_shape
    from moe_lora.core.errors import AdapterError, shown

    shape = model_shape(model_dir)
    layers, found = read_pairs(source, shape, subtracts=initial is not None, base_dir=model_dir)
    if found.copies:
        check_copies_in(source, found.copies, model_dir, None)
    if initial is not None:
        if found.invocation:
            raise AdapterError(
                f"{source}: alora_invocation_tokens={shown(list(found.invocation))} with --initial: rows "
                "before the invocation use the changed base, and an activated LoRA has no effect there; "
                "train it with init_lora_weights=true"
            )
        layers = without_initial(layers, read_pairs(initial, shape, subtracts=True)[0], str(initial))
    family = family_by_names(layers, shape)
    pairs = plain_pairs(layers, family, shape)
    kept: dict[str, Any] = {
        "base_model_name_or_path": read_json(source).get("base_model_name_or_path") or None
    }
    if found.invocation:
        kept["alora_invocation_tokens"] = list(found.invocation)
    write_plain(pairs, target, kept, shape.num_layers, family.stack)
    made = read_adapter(target, shape, pairs[0].a.dtype)
    click.echo(
        f"{target}: {len(pairs)} pairs, rank up to {made.max_lora_rank}, targets {' '.join(made.targets)}"
    )
