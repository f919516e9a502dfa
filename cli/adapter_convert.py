# SPDX-License-Identifier: Apache-2.0
"""`moe-lora adapters convert`: an adapter of any served form as a plain PEFT adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .adapter_folders import FOLDER
from .errors import user_errors


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
    from moe_lora.adapters.peft.plain import plain_pairs, without_initial, write_plain
    from moe_lora.adapters.peft.reader import read_adapter, read_pairs
    from moe_lora.adapters.registry.base_model import model_shape
    from moe_lora.core.errors import AdapterError, shown
    from moe_lora.families import family_named

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
    pairs = plain_pairs(layers, shape)
    kept: dict[str, Any] = {
        "base_model_name_or_path": read_json(source).get("base_model_name_or_path") or None
    }
    if found.invocation:
        kept["alora_invocation_tokens"] = list(found.invocation)
    write_plain(pairs, target, kept, shape.num_layers, family_named(shape.family).stack)
    made = read_adapter(target, shape, pairs[0].a.dtype)
    click.echo(
        f"{target}: {len(pairs)} pairs, rank up to {made.max_lora_rank}, targets {' '.join(made.targets)}"
    )
