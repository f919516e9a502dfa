# SPDX-License-Identifier: Apache-2.0
"""Settings of parts that are off by default: LoRA Server, pool, scaling, sources, emulation, dLoRA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from moe_lora.core.address import parse_dialled
from moe_lora.core.errors import ConfigError

from .settings import Settings, setting

if TYPE_CHECKING:
    from moe_lora.core.partition import Partition
    from moe_lora.core.shape import ModelShape

TRANSPORTS = ("shm", "gloo", "nixl")
DEVICE_PUTS = ("none", "ibgda")
MAX_PUT_INSTANCES = 24
"""Each has a stream on every server GPU, of which CUDA runs 32 side by side, and torch hands out as many."""
POOL_TRANSPORTS = ("shm", "gloo")
"""Not nixl: it keeps freed windows for as long as the process lives, and pools free them all the time."""


@dataclass(frozen=True, kw_only=True)
class LoraServerConfig(Settings):
    """The LoRA Server of a cluster, as its ranks and its clients know it. On one host address
    and store_dir are chosen when it is started."""

    SECTION: ClassVar[str] = "lora_server"
    GROUP: ClassVar[str] = "LoRA Server"
    OPENED_BY: ClassVar[str] = "layout"

    layout: str = setting("EP1-PP1", option="--lora-server", metavar="LAYOUT", unset="none")
    """Compute deltas in a LoRA Server, such as EP1-PP1.  In EPx-PPy, x ranks share the experts of each of y
    stages of layers.  Also EPx, PPy, and DPm (adapters spread over m ranks, for comparison).  x must divide
    the number of experts; x·y processes must be started."""
    capacity: int = setting(64, least=1, option="--lora-capacity")
    """Adapters on the LoRA Server at once, if its memory suffices.  More adapters may be known."""
    memory_gb: float | None = setting(
        None,
        above=0,
        option="--lora-server-memory-gb",
        metavar="GB",
        unset="chosen",
    )
    """Room for adapters on each rank, in 10^9 bytes.  Chosen: capacity times the largest adapter known at the
    start, or times an adapter of rank 16 on all targets if that is larger and at most an eighth of the
    memory.  A larger adapter is refused when it is loaded."""
    address: str = setting("", check=lambda place, address: address and parse_dialled(place, address))
    """host:port or [IPv6]:port of the first rank for other hosts; on one host a socket's path."""
    certificates: str | None = setting(None, in_file=False)
    """Folder of the cluster's certificates; None: all is on one host."""
    store_dir: str = setting("", path="folder")
    """Folder of packed adapters.  Roles on one host share the folder; other hosts receive missing files."""
    transport: str = setting("shm", choices=TRANSPORTS)
    """Exchange of rows between instances and LoRA Server: shm (one host), gloo (two-sided, any hosts), nixl
    (one-sided, any hosts; pip install "moe-lora[nixl]").  Avoid nixl on networks that break: after a cut, a
    server rank once ended with a segmentation fault (no request was lost)."""
    device_puts: str = setting("none", choices=DEVICE_PUTS)
    """ibgda: GPUs of instances put rows of decode steps to the server's GPUs (NVSHMEM), and receive the
    deltas.  transport carries the rest, and everything after the end of a participant until all start
    together.  Needs layout EPx-PPy and one GPU an instance.  Experimental: docs/reference/support.md lists
    what ran.  none: transport carries everything."""
    sites: str = setting("auto", choices=("auto", "all", "experts"))
    """LoRA sites of the server.  all; experts: instances compute attention and dense sites; auto: experts if
    the model has experts, else all."""
    max_rows: int = setting(512, least=1, fixed="512 rows fit a message of every transport")
    """Rows in one message between an instance and a server rank."""
    depth: int = setting(4, least=1, fixed="4 messages keep every transport busy")
    """Messages under way between an instance and a server rank."""
    answer_timeout_s: float = setting(30.0, above=0)
    """Time for an answer; then the instance computes the deltas."""
    lease_timeout_s: float = setting(5.0, above=0, fixed="5 s serve all networks")
    """Time that leases of a vanished instance stay."""
    load_gb_per_s: float | None = setting(None, above=0, unset="none")
    """Upper bound on the ranks' rate of loading adapters, in 10^9 bytes per second."""
    host_workers: int = setting(0, least=0, former="--lora-server-host-workers")
    """CPU processes beside each rank for rows of layers that are still loading; 0: such rows wait."""
    host_tokens_per_worker: int = setting(32, least=1, fixed="32 rows serve all models")
    """Rows of one layer for one worker; more are divided."""
    layer_wise: bool = setting(True, fixed="layers always serve as soon as each is there")
    """A layer of an adapter serves as soon as it is loaded; false: only with all layers, for comparisons."""

    def partition(self, shape: ModelShape, ranks: tuple[int, int]) -> Partition:
        """Division of the work for instances with this expert_parallel and tensor_parallel.

        Raises ConfigError as `Partition`.
        """
        from moe_lora.core.partition import Layout, Partition

        layout = Layout.parse(self.layout)
        return Partition(shape, layout, ranks[0], sites=self.sites, tensor_parallel=ranks[1])


@dataclass(frozen=True, kw_only=True)
class PoolConfig(Settings):
    """The adapter pool: adapters lie in the host memory of some instances, and others read them there."""

    SECTION: ClassVar[str] = "pool"

    replicas: int = setting(1, least=1, former="--pool-replicas", unset="every instance has all")
    """Instances with each adapter in host memory; other instances read it there
    (docs/guides/placement.md)."""
    transport: str = setting("shm", choices=POOL_TRANSPORTS)
    """Reading between instances: shm on one host, gloo between hosts."""
    host: str | None = setting(None, unset="the one from which it reaches the front end")
    """Address of this host for other instances."""


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(Settings):
    """The number of instances by the load (`dist.launch.scaling`)."""

    SECTION: ClassVar[str] = "scaling"

    min_instances: int = setting(1, least=1)
    """Fewest instances."""
    max_instances: int = setting(least=1, unset="must be given")
    """Most instances."""
    waiting_high: int = setting(4, least=1)
    """Requests that wait for room, of each instance, above which instances are added."""
    ttft_ms: float | None = setting(None, above=0, unset="none")
    """P95 of TTFT above which an instance is added, of at least 20 requests in an interval.  Not on
    Kubernetes."""
    interval_s: int = setting(10, least=1, most=1800)
    """Time between decisions.  Not on Kubernetes."""
    add_pause_s: int = setting(60, least=1, most=1800)
    """Least time from the start of all instances to the next addition."""
    remove_pause_s: int = setting(300, least=1, most=1800)
    """Time in which the load fits one instance less; then one instance is removed."""
    full_share: float = setting(0.8, above=0, most=1, fixed="a load fits up to 80% of the full instances")
    """Share of the running requests of full instances up to which a load fits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_instances > self.max_instances:
            raise ConfigError(
                f"scaling.min_instances={self.min_instances} is above scaling.max_instances="
                f"{self.max_instances}; lower the first, or raise the second"
            )


@dataclass(frozen=True, kw_only=True)
class SourcesConfig(Settings):
    """Hubs and object storage that adapters are fetched from; without this section none are."""

    SECTION: ClassVar[str] = "sources"

    allow: tuple[str, ...] = setting(())
    """Patterns of allowed addresses, such as hf://my-org/* or s3://bucket/adapters/*."""
    folder: str | None = setting(None, path="place", unset="~/.cache/moe_lora/sources")
    """Fetched files.  Hosts that share a folder fetch once."""
    max_gb: float = setting(16.0, above=0)
    """Size limit of one adapter in 10^9 bytes, checked before the transfer."""
    resolver: str | None = setting(
        None,
        path="place",
        no_path="registry|hf:.*",
        unset="none",
        option="--lora-resolver",
        metavar="PLACE",
        group="Adapters",
    )
    """Find an unknown adapter at its first request: a folder (paths below the folder are names), registry, or
    hf:ORG.  The server lists no names at the start."""
    max_resolved: int = setting(1000, least=1)
    """Limit of resolved adapters, near which the resolver unloads idle adapters."""
    missing_s: float = setting(30.0, least=0)
    """Time that the resolver keeps the error of a name without a loadable adapter."""

    @property
    def place(self) -> Path:
        """Of the fetched files."""
        return Path.home() / ".cache" / "moe_lora" / "sources" if self.folder is None else Path(self.folder)


@dataclass(frozen=True, kw_only=True)
class StageTime(Settings):
    """seconds(T) = max(least_s, fixed_s + per_row_s T) for T decode rows; 0 for none."""

    fixed_s: float = setting(0.0, least=0)
    per_row_s: float = setting(0.0, least=0)
    least_s: float = setting(0.0, least=0)

    def seconds(self, num_rows: float) -> float:
        return max(self.least_s, self.fixed_s + self.per_row_s * num_rows) if num_rows else 0.0


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Stage times of one layer of the served model, as the emulated device would need them.

    attention: all of a layer but its experts.  experts: the base GEMMs of its experts.  lora: the deltas,
    where they are computed: after the base GEMM on an instance without LoRA Server, else by the server, once
    per instance.  transfer: inputs to the server and deltas back; unused without one.  overlap: the remote
    call runs beside the base GEMM; False: the base GEMM begins when the deltas are there.  prefill: a whole
    layer for the prompt rows of a step, which by default take no time: they are another device's (prefill and
    decode apart, InfiniLoRA section 2.1).
    """

    attention: StageTime = StageTime()
    experts: StageTime = StageTime()
    lora: StageTime = StageTime()
    transfer: StageTime = StageTime()
    prefill: StageTime = StageTime()
    overlap: bool = True


@dataclass(frozen=True, kw_only=True)
class EmulationConfig(Settings):
    """Another device's times, emulated on this machine by sleeping; for comparisons."""

    step_profile: StepProfile | None = setting(None, unset="none")
    """Times of a step's stages, the LoRA Server's included."""
    load_gb_per_s: float | None = setting(None, above=0, unset="none")
    """Upper bound on the rate of an instance's copies to and from its device, adapters and KV, in 10^9 bytes
    per second."""
    blocking_loads: bool = False
    """Start no step during a copy of an adapter to the device, as in S-LoRA."""
    host_slowdown: float = setting(1.0, least=1)
    """Factor on a host worker's time, as for a part of a core."""


def _of_dlora(default: Any, **rule: Any) -> Any:
    return setting(default, policy="engine.batching=dlora", **rule)


@dataclass(frozen=True, kw_only=True)
class DLoraConfig(Settings):
    """Parameters of batching=dlora (docs/guides/merging.md).

    Defaults are the values of the authors' artifact (LLMServe/dLoRA-artifact, vllm/core/scheduler.py), except
    for period, least_threshold and most_threshold.  Source: dLoRA, Algorithms 1 to 3.
    """

    SECTION: ClassVar[str] = "dlora"

    alpha_switch: float = _of_dlora(1.0, above=0)
    """Requests of the largest adapter by requests of the FCFS batch.  Weights merge from this ratio on.  The
    ratio is a start: break points tune the threshold."""
    beta_switch: float = _of_dlora(15 / 27, above=0)
    """Weights unmerge below this ratio.  The ratio is a start too, and at most alpha_switch."""
    gamma_dec: float = _of_dlora(0.05, least=0)
    """Break points move a threshold by this step towards the mode that served more."""
    gamma_mul: float = _of_dlora(1.1, least=1)
    """Break points move a threshold by this factor away from the mode that served less."""
    period: int = _of_dlora(8, least=1)
    """Steps after which a break point comes, if none came before.  The artifact tunes at changes of mode
    only."""
    least_threshold: float = _of_dlora(0.1, above=0)
    """Lower bound of both thresholds."""
    most_threshold: float = _of_dlora(1.5, above=0)
    """Upper bound of both thresholds."""
    credit: float = _of_dlora(10_000.0, above=0)
    """First credit of an adapter for each other adapter, in units of max_num_seqs.  A request that a step
    passes over moves 1 / max_num_seqs of a unit to its adapter."""
    t_starve: float = _of_dlora(10_000.0, above=0)
    """Credit above the first credit from which on an adapter starves, in the same units.  Steps serve
    adapters that starve before all others."""
    t_normal: float = _of_dlora(5_000.0, least=1)
    """Credit above the first credit below which an adapter starves no longer, in the same units."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high in (
            ("least_threshold", "beta_switch"),
            ("least_threshold", "alpha_switch"),
            ("alpha_switch", "most_threshold"),
            ("t_normal", "t_starve"),
        ):
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                raise ConfigError(
                    f"dlora.{low}={least:g} is above dlora.{high}={most:g}; lower the first, or raise the "
                    "second"
                )
