# SPDX-License-Identifier: Apache-2.0
"""`moe-lora quantize`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from .errors import user_errors


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM acts as Ctrl-C, to remove partial output."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command()
@click.argument("model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--format", "kind", default="int8", type=click.Choice(["int8", "int4", "fp8"]))
@click.option(
    "--group-size",
    type=int,
    metavar="32|64|128",
    help="Inputs that share a scale; with fp8 128: blocks of 128 x 128.  [default: 64 with int4, else a row]",
)
@click.option("--quantize-head", is_flag=True, help="Quantise the vocabulary head too.")
@click.option(
    "--dtype",
    default="auto",
    show_default="the checkpoint's",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    help="Type of unquantised weights, and of the scales of int4.",
)
@user_errors
def quantize(
    model_dir: Path, out: Path, kind: str, group_size: int | None, quantize_head: bool, dtype: str
) -> None:
    """Write the model in MODEL_DIR to OUT with its linear layers quantised.

    OUT serves without --quantize and computes what MODEL_DIR does with --quantize FORMAT.  Its format is that
    of compressed-tensors.  Tokenizer and config files come along.
    """
    from moe_lora.config import EngineConfig
    from moe_lora.core.progress import progress
    from moe_lora.core.wrong_files import read_config
    from moe_lora.engine.ranks.rank import DTYPES, resolved
    from moe_lora.models.checkpoint import Checkpoint
    from moe_lora.models.quantised_checkpoint import quantise_checkpoint
    from moe_lora.models.quantised_weight import quantisation_of

    asked = EngineConfig(
        model_dir=str(model_dir),
        dtype=dtype,
        quantize=kind,
        quantize_group_size=group_size,
        quantize_head=quantize_head,
    )
    found = DTYPES[resolved(asked, read_config(model_dir)).dtype]
    quantisation = quantisation_of(kind, group_size, quantize_head)
    assert quantisation is not None
    with _sigterm_as_ctrl_c(), progress() as show:
        quantise_checkpoint(model_dir, out, quantisation, found, show)
    num_bytes, before = (
        sum(path.stat().st_size for path in set(Checkpoint(folder).file_of.values()))
        for folder in (out, model_dir)
    )
    click.echo(f"{out}: {num_bytes / 1e9:.3g} GB of weights, {num_bytes / before:.0%} of {model_dir}")
