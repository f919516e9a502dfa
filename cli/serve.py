# SPDX-License-Identifier: Apache-2.0
"""`moe-lora serve`: options in, `moe_lora.assemble.serve` run."""

from __future__ import annotations

from typing import Any

import click

from moe_lora.config import (
    EngineConfig,
    FrontEndConfig,
    LoraServerConfig,
    PoolConfig,
    ProvisionConfig,
    RegistryConfig,
)

from .errors import user_errors
from .setting_options import section_options
from .variadic import headed
from .vllm_words import NOTES, VllmCommand, show_vllm_options

_FOLDER = click.Path(exists=True, file_okay=False)
_HEADINGS = (
    "Where",
    "Adapters",
    "Memory",
    "Engine",
    "Several instances and front ends",
    "LoRA Server",
    "Watching the load",
    "Limits",
    "Access",
    "A cluster's file",
)
"""Of --help, in their order."""
_EXAMPLES = """\b
Examples:
  moe-lora serve demo/model --lora-dir demo/adapters
  moe-lora serve demo/model --lora-modules up=demo/adapters/upper --port 9000
  moe-lora serve demo/model --lora-dir demo/adapters --lora-server EP1-PP1
"""


@section_options(
    registry=RegistryConfig,
    engine=EngineConfig,
    front_end=FrontEndConfig,
    pool=PoolConfig,
    lora_server=LoraServerConfig,
    provision=ProvisionConfig,
)
@click.command(
    cls=VllmCommand,
    variadic=["--lora-modules", "--lora-dir", "--registry-adapters"],
    headings=_HEADINGS,
    epilog=_EXAMPLES,
)
@click.argument("model_dir", type=_FOLDER, required=False)
@headed(
    "Where",
    "--served-model-name",
    metavar="NAME...",
    multiple=True,
    help="What requests call the base model; answers and metrics show the first name.  [default: folder "
    "name]",
)
@headed(
    "Adapters",
    "--lora-modules",
    multiple=True,
    metavar="NAME=PATH...",
    help="PEFT adapters and their names; also as JSON with name, path and base_model_name.",
)
@headed(
    "Adapters",
    "--lora-dir",
    multiple=True,
    type=_FOLDER,
    help="Serve every PEFT adapter below, links followed, by folder name.",
)
@headed(
    "Adapters",
    "--skip-bad-adapters",
    is_flag=True,
    help="Serve without the adapters that can't be served, instead of not at all.",
)
@headed(
    "Several instances and front ends",
    "--front-ends",
    "num_front_ends",
    type=click.IntRange(1, 64),
    help="Processes that serve HTTP, on one port, with a controller of their own.  [default: 1, which "
    "decides by itself]",
)
@headed(
    "A cluster's file",
    "--config",
    "config_file",
    metavar="FILE",
    help="Settings from a file (docs/reference/cluster_file.md); options given here go before it.",
)
@headed(
    "A cluster's file",
    "--role",
    type=click.Choice(["all", "front-end", "controller"]),
    default="all",
    show_default=True,
    help="Of the cluster in --config: everything on this host, or one front end or the controller alone.",
)
@headed(
    "A cluster's file",
    "--name",
    help="With --role front-end, which of the file's front_ends.  [default: the only one]",
)
@headed(
    "Access",
    "--api-key",
    "given_keys",
    metavar="KEY",
    multiple=True,
    help="Key of an administrator; may be given several times.  Health, version and metrics stay open "
    "without --api-keys.  [default: VLLM_API_KEY]",
)
@headed(
    "A cluster's file",
    "--set",
    "further_settings",
    metavar="SECTION.NAME=VALUE",
    multiple=True,
    help="Any setting of the file (docs/reference/cluster_file.md); may be given several times.",
)
@click.option(
    "--help-vllm",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=show_vllm_options,
    help="Show vLLM's options, and what each means here.",
)
# How processes are started that `--front-ends` asks for.
@click.option("--listen-fd", "listen_fds", type=int, multiple=True, hidden=True)
@click.option("--parent", type=int, hidden=True)
@click.option("--status-fd", type=int, hidden=True)
@click.option("--starts", type=int, hidden=True)
@user_errors
def serve(
    config_file: str | None,
    role: str,
    name: str | None,
    listen_fds: tuple[int, ...],
    parent: int | None,
    status_fd: int | None,
    starts: int | None,
    num_front_ends: int | None,
    skip_bad_adapters: bool,
    **options: Any,
) -> None:
    """Serve the model in MODEL_DIR and its adapters over HTTP, the OpenAI way, until Ctrl-C.

    Adapters can be added and removed while it runs (POST /v1/load_lora_adapter, /v1/unload_lora_adapter).
    With several --instances, the requests of one that ends go on at another, and it is started again.
    MODEL_DIR may also stand in the file of --config.
    """
    import logging
    from contextlib import ExitStack
    from dataclasses import replace
    from functools import partial

    from moe_lora import assemble
    from moe_lora.core.processes import set_log_level

    from .serve_settings import cluster_to_serve, fit_to_serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    cluster = cluster_to_serve(config_file, name, options)
    for note in click.get_current_context().meta[NOTES]:
        logging.getLogger(__name__).warning("%s", note)
    if role != "all" and config_file is None:
        raise click.UsageError(f"--role {role} needs --config, the file of its cluster")
    if skip_bad_adapters and role != "all":
        raise click.UsageError("--skip-bad-adapters: a role of its own reads no adapters; leave it out")
    if name is not None and role != "front-end":
        raise click.UsageError("--name is a front end's; give --role front-end")
    if num_front_ends is not None and role != "all":
        raise click.UsageError("--front-ends starts them all on this host; a role of its own takes none")
    set_log_level(cluster.front_end.log_level)
    reload = None
    if config_file is not None:
        from moe_lora.serve.reload import Reload, hang_ups_ignored

        reload = Reload(partial(cluster_to_serve, config_file, name, options))
    if parent is not None:
        from moe_lora.dist.launch.roles import end_with

        end_with(parent, cluster.folder_of_sockets)
    with ExitStack() as stack:
        if reload is not None and parent is None:  # who has a parent is started again, and reads them then
            stack.enter_context(hang_ups_ignored())
        if role != "all":
            from moe_lora.dist.launch.host_roles import failure_told

            with failure_told(status_fd):
                if role == "front-end":
                    assemble.serve_front_end(cluster, name, listen_fds, reload)
                else:
                    assemble.serve_controller(cluster, reload)
            return
        cluster = replace(cluster, engine=fit_to_serve(cluster.engine, skip_bad=skip_bad_adapters))
        num_front_ends = num_front_ends or len(cluster.front_ends) or 1
        if num_front_ends > 1:
            raise SystemExit(assemble.serve_host(cluster, num_front_ends, reload))
        assemble.serve(cluster, reload)
