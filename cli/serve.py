"""`moe-lora serve`: options in, `moe_lora.assemble.serve` run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from moe_lora.core.request import name_problem

from .errors import user_errors
from .variadic import VariadicCommand

_FOLDER = click.Path(exists=True, file_okay=False)
_AUTO = "[default: chosen from the model and the memory that is free]"

_ADAPTERS = (
    click.option(
        "--lora-modules", multiple=True, metavar="NAME=PATH...", help="PEFT adapters and their names."
    ),
    click.option(
        "--lora-dir", multiple=True, type=_FOLDER, help="Serve every PEFT adapter below, by folder name."
    ),
    click.option("--max-loras", type=int, help="Adapters resident on the device at once."),
    click.option(
        "--lora-kernel",
        type=click.Choice(["sgmv", "bgmv", "mbgmv"]),
        help="sgmv: true rank; baselines: bgmv (padded, Punica), mbgmv (per row, S-LoRA).  [default: sgmv]",
    ),
    click.option("--lora-memory-gb", type=float, help=f"Room for resident adapters, in 10^9 bytes.  {_AUTO}"),
)
_WHERE = (
    click.option("--host", default="127.0.0.1", show_default=True),
    click.option(
        "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one."
    ),
    click.option("--served-model-name", help="What requests call the base model.  [default: folder name]"),
)
_ENGINE = (
    click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"])),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"])),
    click.option("--max-num-seqs", type=int, help="Sequences computed at once."),
    click.option("--max-num-batched-tokens", type=int, help="Token rows per step."),
    click.option("--max-model-len", type=int, help="Prompt and answer, in tokens.  [default: the model's]"),
    click.option("--kv-cache-gb", type=float, help=f"Room for KV, in 10^9 bytes.  {_AUTO}"),
    click.option("--block-size", type=int, help="Tokens per KV page."),
    click.option("--eager", is_flag=True, default=None, help="Don't compile the model."),
    click.option("--no-prefix-caching", is_flag=True, help="Compute every prompt from its first token."),
    click.option(
        "--expert-parallel",
        type=int,
        metavar="P",
        help="Processes of each instance that share the experts; must divide their number.  [default: 1]",
    ),
    click.option(
        "--threads",
        "num_threads",
        type=int,
        help="CPU threads of each instance, all its processes together.  [default: all cores, shared]",
    ),
)
_INSTANCES = (
    click.option(
        "--instances",
        "num_instances",
        type=int,
        help="Engine processes that stand in for each other.  [default: 1]",
    ),
    click.option(
        "--routing",
        type=click.Choice(["least_outstanding", "round_robin"]),
        default="least_outstanding",
        show_default=True,
        help="How requests are spread over instances: least token work left, or in turn.",
    ),
)
_LORA_SERVER = (
    click.option(
        "--lora-server",
        metavar="LAYOUT",
        help="Compute deltas on a LoRA Server of this layout, EPx-PPy.  [default: in the instances]",
    ),
    click.option("--lora-capacity", type=int, help="Adapters resident on the LoRA Server.  [default: 64]"),
    click.option(
        "--lora-server-memory-gb", type=float, help="Room for adapters on each of its ranks, in 10^9 bytes."
    ),
    click.option("--transport", help="How instances and LoRA Server exchange rows.  [default: shm]"),
    click.option("--load-gb-per-s", type=float, help="Bound on the rate at which its ranks load adapters."),
)
_SERVER_FIELDS = {
    "lora_capacity": "capacity",
    "lora_server_memory_gb": "memory_gb",
    "transport": "transport",
    "load_gb_per_s": "load_gb_per_s",
}


def _server_options(layout: str | None, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Fields of LoraServerConfig, taken out of the settings.  Raises click.UsageError without a layout."""
    given = {option: settings.pop(option) for option in _SERVER_FIELDS}
    given = {option: value for option, value in given.items() if value is not None}
    if layout is None:
        if given:
            options = ", ".join(f"--{option.replace('_', '-')}" for option in given)
            raise click.UsageError(f"{options} without --lora-server LAYOUT, such as EP1-PP1; give both")
        return None
    return {"layout": layout, **{_SERVER_FIELDS[option]: value for option, value in given.items()}}


def _options(function: Any) -> Any:
    for option in reversed(_ADAPTERS + _WHERE + _INSTANCES + _LORA_SERVER + _ENGINE):
        function = option(function)
    return function


@click.command(cls=VariadicCommand, variadic=["--lora-modules", "--lora-dir"])
@click.argument("model_dir", type=_FOLDER)
@_options
@user_errors
def serve(
    model_dir: str,
    host: str,
    port: int,
    served_model_name: str | None,
    lora_modules: tuple[str, ...],
    lora_dir: tuple[str, ...],
    no_prefix_caching: bool,
    routing: str,
    **settings: Any,
) -> None:
    """Serve the model in MODEL_DIR and its adapters over HTTP, the OpenAI way, until Ctrl-C.

    Adapters can be added and removed while it runs (POST /v1/load_lora_adapter, /v1/unload_lora_adapter).
    With several --instances, the requests of one that ends go on at another, and it is started again.
    """
    import logging

    from moe_lora.assemble import serve as serve_until_stopped
    from moe_lora.core.config import EngineConfig

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    base_name = served_model_name or Path(model_dir).resolve().name
    adapters = (*map(_named_path, lora_modules), *find_adapters(lora_dir))
    if base_name in dict(adapters):
        raise click.UsageError(
            f"{base_name!r} names the base model and an adapter; give another --served-model-name"
        )
    server = _server_options(settings.pop("lora_server"), settings)
    config = EngineConfig(
        model_dir=model_dir,
        adapters=adapters,
        prefix_caching=not no_prefix_caching,
        **{name: value for name, value in settings.items() if value is not None},
    )
    serve_until_stopped(
        config,
        host=host,
        port=port,
        served_model_name=base_name,
        routing=routing,
        lora_server=server,
    )


def _named_path(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not (separator and name and path):
        raise click.BadParameter(f"{text!r} is not NAME=PATH", param_hint="--lora-modules")
    if problem := name_problem(name):
        raise click.BadParameter(f"the name {name!r} {problem}", param_hint="--lora-modules")
    return name, path


def find_adapters(folders: Iterable[str]) -> list[tuple[str, str]]:
    """(name, directory) of every PEFT adapter in or below the folders, sorted by name.

    Raises click.BadParameter for a folder without any and for unfit names; EngineConfig refuses names that
    come twice.
    """
    found: list[tuple[str, str]] = []
    for folder in folders:
        here = [place for place, _, files in os.walk(folder) if "adapter_config.json" in files]
        if not here:
            raise click.BadParameter(f"no adapter_config.json in or below {folder}", param_hint="--lora-dir")
        for place in here:
            name = Path(place).resolve().name
            if problem := name_problem(name):
                raise click.BadParameter(f"the folder name {name!r} {problem}", param_hint="--lora-dir")
            found.append((name, place))
    return sorted(found)
