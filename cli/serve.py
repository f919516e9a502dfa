# SPDX-License-Identifier: Apache-2.0
"""`moe-lora serve`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from moe_lora.config import (
    EngineConfig,
    FrontEndConfig,
    LoraServerConfig,
    RegistryConfig,
)
from moe_lora.config.optional_parts import SourcesConfig

from .errors import user_errors
from .options import headed, model_options, refuse_given, section_options
from .vllm_words import NOTES, VllmCommand, show_vllm_options

if TYPE_CHECKING:
    from moe_lora.config.cluster import ClusterConfig

_HEADINGS = ("Model", "Adapters", "LoRA Server", "Scaling", "Access", "More")
"""Of --help, in this order."""
_EXAMPLES = """\b
Examples:
  moe-lora serve demo/model --lora-dir demo/adapters
  moe-lora serve demo/model --lora-modules up=demo/adapters/upper --port 9000
  moe-lora serve demo/model --lora-dir demo/adapters --lora-server EP1-PP1

Further settings: --set SECTION.NAME=VALUE; `moe-lora settings` lists them all.
"""


@section_options(
    registry=RegistryConfig,
    sources=SourcesConfig,
    engine=EngineConfig,
    front_end=FrontEndConfig,
    lora_server=LoraServerConfig,
)
@click.command(
    cls=VllmCommand,
    variadic=["--lora-modules", "--lora-dir"],
    headings=_HEADINGS,
    context_settings={"max_content_width": 100},
    epilog=_EXAMPLES,
)
@model_options
@headed(
    "Scaling",
    "--front-ends",
    "num_front_ends",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Processes that serve HTTP, on one port.  [default: 1]",
)
@headed(
    "Access",
    "--api-key",
    "given_keys",
    metavar="KEY",
    multiple=True,
    help="Require this administrator's key.  [default: VLLM_API_KEY]",
)
@headed(
    "More",
    "--role",
    type=click.Choice(["all", "front-end", "controller"]),
    metavar="ROLE",
    default="all",
    help="Part of --config: all, front-end or controller.",
)
@headed("More", "--name", metavar="NAME", help="Front end or controller of --config, with --role.")
@headed(
    "More",
    "--help-vllm",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=show_vllm_options,
    help="Show vLLM's options and their meaning here.",
)
@user_errors
def serve(
    config_file: str | None,
    role: str,
    name: str | None,
    num_front_ends: int | None,
    skip_bad_adapters: bool,
    **options: Any,
) -> None:
    """Serve the model in MODEL_DIR and its adapters over HTTP, the OpenAI way, until Ctrl-C."""
    import logging
    from contextlib import AbstractContextManager, nullcontext
    from dataclasses import replace
    from functools import partial

    from moe_lora import assemble
    from moe_lora.core.processes import set_log_level

    from .serve_settings import cluster_to_serve, fetched, fit_to_serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    cluster = fetched(cluster_to_serve(config_file, name, options))
    for note in click.get_current_context().meta[NOTES]:
        logging.getLogger(__name__).warning("%s", note)
    if role != "all" and config_file is None:
        raise click.UsageError(f"--role {role} needs --config, the file of its cluster")
    if skip_bad_adapters and role != "all":
        raise click.UsageError("--skip-bad-adapters: a role of its own reads no adapters; leave it out")
    if name is not None and (role == "all" or (role == "controller" and not cluster.controllers)):
        raise click.UsageError(
            "--name is one of front_ends or controllers; give --role front-end or controller"
        )
    if num_front_ends is not None and role != "all":
        raise click.UsageError("--front-ends starts them all on this host; a role of its own takes none")
    if cluster.scaling is not None and (role != "all" or (num_front_ends or len(cluster.front_ends)) > 1):
        raise click.UsageError(
            "scaling is for one front end with all its instances; leave out scaling, --role and --front-ends"
        )
    _refuse_of_others(cluster, role, options)
    set_log_level(cluster.front_end.log_level)
    reload = None
    quiet: AbstractContextManager[None] = nullcontext()
    if config_file is not None:
        from moe_lora.serve.reload import Reload, hang_ups_ignored

        reload, quiet = Reload(partial(cluster_to_serve, config_file, name, options)), hang_ups_ignored()
    with quiet:
        if role == "front-end":
            assemble.serve_front_end(cluster, name, reload=reload)
            return
        if role == "controller":
            assemble.serve_controller(cluster, reload, name)
            return
        cluster = replace(cluster, engine=fit_to_serve(cluster.engine, skip_bad=skip_bad_adapters))
        num_front_ends = num_front_ends or len(cluster.front_ends) or 1
        if num_front_ends > 1:
            raise SystemExit(assemble.serve_host(cluster, num_front_ends, reload))
        assemble.serve(cluster, reload)


def _refuse_of_others(cluster: ClusterConfig, role: str, names: Iterable[str]) -> None:
    """Raises UsageError for given options of other roles.  names: of all options."""
    if role == "front-end" and cluster.controllers_at:
        of_adapters = ["lora_modules", "lora_dir", *(name for name in names if name.startswith("registry"))]
        refuse_given(of_adapters, "adapters are the controller's; give {} to the controller")
    elif role == "controller":
        of_http = ("host", "port", "api_keys", "tls_cert", "tls_key", "adapter_chat_template")
        refuse_given(
            ["given_keys", *(f"front_end__{name}" for name in of_http)],
            "a controller serves no HTTP; give {} to the front ends",
        )
