"""`moe-lora serve`: options in, `moe_lora.assemble.serve` run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moe_lora.core.config import CACHE_POLICIES, LORA_KERNELS, PLACEMENTS, ROUTINGS, TRANSPORTS

from .errors import user_errors
from .variadic import VariadicCommand

if TYPE_CHECKING:
    from moe_lora.dist.cluster import ClusterConfig

_FOLDER = click.Path(exists=True, file_okay=False)
_AUTO = "[default: chosen from the model and the memory that is free]"

_ADAPTERS = (
    click.option(
        "--lora-modules", multiple=True, metavar="NAME=PATH...", help="PEFT adapters and their names."
    ),
    click.option(
        "--lora-dir", multiple=True, type=_FOLDER, help="Serve every PEFT adapter below, by folder name."
    ),
    click.option(
        "--registry",
        type=_FOLDER,
        help="Serve the adapters that a registry has for this model (moe-lora adapters add).",
    ),
    click.option(
        "--registry-adapters", multiple=True, metavar="NAME...", help="Only these of them, from the start."
    ),
    click.option("--max-loras", type=int, help="Adapters resident on the device at once."),
    click.option(
        "--lora-kernel",
        type=click.Choice(LORA_KERNELS),
        help="sgmv: true rank; baselines: bgmv (padded, Punica), mbgmv (per row, S-LoRA).  [default: sgmv]",
    ),
    click.option(
        "--lora-memory-gb",
        type=float,
        help="Room for adapters in the arena, in 10^9 bytes, where --arena-mb is not given.",
    ),
)
_CACHE = (
    click.option(
        "--arena-mb",
        type=float,
        help=f"Device memory for KV and adapters together, in 10^6 bytes.  {_AUTO}",
    ),
    click.option(
        "--host-arena-mb",
        type=float,
        help="Host memory for KV and adapters that left the device; 0 is none.  [default: on CUDA as much as "
        "the device has, at most a quarter of what is free; on CPU 0]",
    ),
    click.option(
        "--cache-policy",
        type=click.Choice(CACHE_POLICIES),
        help=f"Which of them leave the device and come back.  [default: {CACHE_POLICIES[0]}]",
    ),
)
_WHERE = (
    click.option("--host", help="Where to listen.  [default: 127.0.0.1]"),
    click.option("--port", type=click.IntRange(0, 65535), help="0 takes a free one.  [default: 8000]"),
    click.option("--served-model-name", help="What requests call the base model.  [default: folder name]"),
)
_ENGINE = (
    click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"])),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"])),
    click.option("--max-num-seqs", type=int, help="Sequences computed at once."),
    click.option("--max-num-batched-tokens", type=int, help="Token rows per step."),
    click.option("--max-model-len", type=int, help="Prompt and answer, in tokens.  [default: the model's]"),
    click.option("--kv-cache-gb", type=float, help="Bound on KV, in 10^9 bytes."),
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
        "--front-ends",
        "num_front_ends",
        type=click.IntRange(1, 64),
        help="Processes that serve HTTP, on one port, with a controller of their own.  [default: 1, which "
        "decides by itself]",
    ),
    click.option(
        "--routing",
        type=click.Choice(ROUTINGS),
        help="How requests are spread over instances (docs/placement.md); rank_aware and "
        "shortest_pending_time need --performance-model.  [default: least_outstanding]",
    ),
    click.option(
        "--performance-model",
        metavar="FILE",
        help="Step times by rank, of `moe-lora profile-steps`, for the routers that need them.",
    ),
    click.option(
        "--placement",
        type=click.Choice(PLACEMENTS),
        help="Divide adapters over instances, and route by that.  [default: not at all]",
    ),
    click.option("--placement-interval-s", type=float, help="From one placement to the next.  [default: 30]"),
    click.option(
        "--heartbeat-timeout-s",
        type=float,
        help="An instance that does not get on for so long gets no requests.  [default: 5]",
    ),
    click.option(
        "--heartbeat-dead-s",
        type=float,
        help="After so long its requests go on elsewhere, and it is ended; more where a step takes longer.  "
        "[default: 30]",
    ),
    click.option(
        "--pool-replicas",
        type=int,
        help="Keep each adapter in the host memory of this many instances only; the others read it there "
        "(docs/placement.md).  [default: every instance has all]",
    ),
    click.option(
        "--operating-points",
        metavar="FILE",
        help='{"rank": tokens/s} that an instance serves of a rank alone.  [default: all ranks alike]',
    ),
)
_CLUSTER = (
    click.option(
        "--config",
        "config_file",
        metavar="FILE",
        help="Settings from a file (docs/cluster.md); options given here go before it.",
    ),
    click.option(
        "--role",
        type=click.Choice(["all", "front-end", "controller"]),
        default="all",
        show_default=True,
        help="Of the cluster in --config: everything on this host, or one front end or the controller alone.",
    ),
    click.option(
        "--name", help="With --role front-end, which of the file's front_ends.  [default: the only one]"
    ),
    # How processes are started that `--front-ends` asks for.
    click.option("--listen-fd", type=int, hidden=True),
    click.option("--parent", type=int, hidden=True),
    click.option("--status-fd", type=int, hidden=True),
    click.option("--starts", type=int, hidden=True),
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
    click.option(
        "--transport",
        type=click.Choice(TRANSPORTS),
        help="How instances and LoRA Server exchange rows.  [default: shm]",
    ),
    click.option("--load-gb-per-s", type=float, help="Bound on the rate at which its ranks load adapters."),
)
_PROVISION = (
    click.option(
        "--target-iar",
        type=float,
        help="Share of requests whose adapter should find a place at once; watched, with a LoRA Server or "
        "if given.  [default: 0.95]",
    ),
    click.option(
        "--provision-window-s", type=float, help="For how long a request counts for that.  [default: 300]"
    ),
    click.option(
        "--auto-resize",
        is_flag=True,
        default=None,
        help="Let the LoRA Server's capacity follow what the target needs.",
    ),
)


def _placed(cluster: ClusterConfig, name: str | None, options: dict[str, Any]) -> ClusterConfig:
    """The cluster with the front end of that name where the options say."""
    from dataclasses import replace

    if name is None or name not in cluster.front_ends:
        return cluster
    given = {one: options[one] for one in ("host", "port") if options[one] is not None}
    place = replace(cluster.front_ends[name], **given)
    return replace(cluster, front_ends={**cluster.front_ends, name: place})


def _options(function: Any) -> Any:
    groups = _CLUSTER + _ADAPTERS + _CACHE + _WHERE + _INSTANCES + _LORA_SERVER + _PROVISION + _ENGINE
    for option in reversed(groups):
        function = option(function)
    return function


@click.command(cls=VariadicCommand, variadic=["--lora-modules", "--lora-dir", "--registry-adapters"])
@click.argument("model_dir", type=_FOLDER, required=False)
@_options
@user_errors
def serve(
    config_file: str | None,
    role: str,
    name: str | None,
    listen_fd: int | None,
    parent: int | None,
    status_fd: int | None,
    starts: int | None,
    num_front_ends: int | None,
    **options: Any,
) -> None:
    """Serve the model in MODEL_DIR and its adapters over HTTP, the OpenAI way, until Ctrl-C.

    Adapters can be added and removed while it runs (POST /v1/load_lora_adapter, /v1/unload_lora_adapter).
    With several --instances, the requests of one that ends go on at another, and it is started again.
    MODEL_DIR may also stand in the file of --config.
    """
    import logging

    from moe_lora import assemble
    from moe_lora.dist.host_roles import failure_told
    from moe_lora.dist.roles import end_with

    from .serve_settings import settings_of

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    cluster = settings_of(config_file, options)
    if role != "all" and config_file is None:
        raise click.UsageError(f"--role {role} needs --config, the file of its cluster")
    if name is not None and role != "front-end":
        raise click.UsageError("--name is a front end's; give --role front-end")
    if num_front_ends is not None and role != "all":
        raise click.UsageError("--front-ends starts them all on this host; a role of its own takes none")
    if parent is not None:
        end_with(parent, cluster.folder_of_sockets)
    if role != "all":
        with failure_told(status_fd):
            if role == "front-end":
                assemble.serve_front_end(_placed(cluster, name, options), name, listen_fd)
            else:
                assemble.serve_controller(cluster)
        return
    num_front_ends = num_front_ends or len(cluster.front_ends) or 1
    if num_front_ends > 1:
        raise SystemExit(assemble.serve_host(cluster, num_front_ends))
    server = cluster.lora_server
    assemble.serve(
        cluster.engine,
        host=cluster.front_end.host,
        port=cluster.front_end.port,
        served_model_name=cluster.served_model_name,
        routing=cluster.front_end,
        provision=cluster.provision,
        registry=cluster.registry,
        # On one host the server gets an address and a store of its own, which end with it.
        lora_server=server
        and {name: value for name, value in server.items() if name not in ("address", "store_dir")},
    )
