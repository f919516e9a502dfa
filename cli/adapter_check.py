# SPDX-License-Identifier: Apache-2.0
"""`moe-lora adapters check`: adapters of a folder as the server would read them, or a registry's files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .adapter_folders import (
    adapter_folders,
    model_option,
    only_registry,
    path_argument,
    read_or_reason,
    registry_option,
    shape_for,
)
from .errors import user_errors

if TYPE_CHECKING:
    from moe_lora.adapters.packed import PackedAdapter
    from moe_lora.adapters.peft.origin import Origin
    from moe_lora.core.shape import ModelShape


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
    """Print what the server would say of each adapter; whether any can't be served."""
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
    """Whether each type of device computes the adapter."""
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
    """Print the state of every version's files; whether any is lost or altered."""
    from moe_lora.adapters.registry.registry import Registry

    with Registry(registry) as opened:
        found = opened.check()
    for one, problem in found:
        said = f"ok: {one.num_bytes:,} bytes" if problem is None else f"error: {problem}"
        click.echo(f"{one.name}: version {one.version}: {said}")
    return any(problem is not None for _, problem in found)
