"""Settings of an engine.  Frozen; "auto" and None are resolved by the functions that read the model."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass

from .errors import ConfigError
from .step_profile import StageTime, StepProfile

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = ("shm", "gloo", "nixl")
POOL_TRANSPORTS = ("shm", "gloo")
"""Not nixl: it keeps freed windows for as long as the process lives, and pools free them all the time."""
LORA_KERNELS = ("sgmv", "bgmv", "mbgmv")
PERFORMANCE_FORMS = ("toppings", "full")
"""Forms of `policies.step_model.StepModel`."""
QUEUES = ("fcfs", "sjf-oracle")
CACHE_POLICIES = (
    "fastlibra",
    "cost-aware",
    "fastlibra-wom",
    "fastlibra-wos",
    "fastlibra-wol",
    "lru",
    "static",
    "slora",
)
"""The first is the default."""
MAX_COUNT = 2**31 - 1
_COUNTS = (
    "max_loras",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "expert_parallel",
    "num_instances",
)


@dataclass(frozen=True, kw_only=True)
class LoraServerConfig:
    """The LoRA Server of a cluster, as its ranks and its clients know it.

    layout: EPx-PPy, also EPx, PPy or DPm.  capacity: adapters resident at once.  memory_gb: each rank's room
    for them, in 10^9 bytes; None = capacity times the largest adapter known at the start (or one of rank
    16).  address: the first rank's control address, host:port or the path of a socket.  certificates:
    folder of the cluster's, None = all on one host.  store_dir: where packed adapters lie as files; ranks and
    instances of one host share it.  sites: "all" LoRA sites are computed by the server, or only the "experts"
    and the rest by the instances; "auto": the experts where the model has any.
    max_rows: rows in one message.  depth: messages on their way between one client and one server rank.
    answer_timeout_s: an answer that takes longer is computed by the instance itself.  load_gb_per_s: upper
    bound on the rate at which a rank loads adapters; None = none.  layer_wise: a layer of an adapter serves
    as soon as it is there; False: none before all are.  lora_time: of one layer, on the device that a rank
    emulates; None = none (see `StepProfile`).
    """

    layout: str = "EP1-PP1"
    capacity: int = 64
    memory_gb: float | None = None
    address: str
    store_dir: str
    certificates: str | None = None
    transport: str = "shm"
    sites: str = "auto"
    max_rows: int = 512
    depth: int = 4
    answer_timeout_s: float = 30.0
    lease_timeout_s: float = 5.0
    load_gb_per_s: float | None = None
    layer_wise: bool = True
    lora_time: StageTime | None = None

    def __post_init__(self) -> None:
        _choice("lora_server.transport", self.transport, TRANSPORTS)
        _choice("lora_server.sites", self.sites, ("auto", "all", "experts"))
        _at_least("lora_server.capacity", self.capacity, 1)
        _at_least("lora_server.max_rows", self.max_rows, 1)
        _at_least("lora_server.depth", self.depth, 1)
        for name in ("memory_gb", "answer_timeout_s", "lease_timeout_s", "load_gb_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"lora_server.{name}={value} must be positive")


@dataclass(frozen=True, kw_only=True)
class ProvisionConfig:
    """How the front end watches whether the places for adapters meet the load (`provision.online`).

    target_iar: share of requests that should be admitted at once.  window_s: for how long a request counts.
    interval_s: from one evaluation to the next.  auto_resize: the LoRA Server's capacity follows what is
    needed, from min_capacity up to what its memory holds.
    """

    target_iar: float = 0.95
    window_s: float = 300.0
    interval_s: float = 30.0
    auto_resize: bool = False
    min_capacity: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.target_iar <= 1:
            raise ConfigError(f"provision.target_iar={self.target_iar} must be above 0 and at most 1")
        for name in ("window_s", "interval_s"):
            value = getattr(self, name)
            if not 0 < value <= MAX_COUNT:
                raise ConfigError(f"provision.{name}={value} must be positive, in seconds")
        _at_least("provision.min_capacity", self.min_capacity, 1)


ROUTINGS = (
    "least_outstanding",
    "round_robin",
    "random",
    "join_shortest_queue",
    "first_fit",
    "adapter_affinity",
    "rank_aware",
    "shortest_pending_time",
    "phi",
)
"""Names of `policies.routers.ROUTERS`."""
PLACEMENTS = ("loraserve", "optimal", "random", "contiguous", "everywhere")
"""Names of `provision.placement_baselines.PLACEMENTS`."""


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How requests are spread over instances (docs/placement.md).

    routing: None: by the placement if there is one, else least_outstanding.  performance_model: file of
    `moe-lora profile-steps`, for the routers that need one; performance_form: which of its models, "full" or
    the papers' "toppings".  slo_tpot_s, mean_output_tokens, adapter_load_s_per_rank: what these routers need
    beside it (`policies.model_routing.CostModel`); slo_tpot_s None: no such SLO.  placement: made anew every
    placement_interval_s.  operating_points: file of {rank: tokens/s}; None: all ranks alike, so that tokens
    are balanced.  heartbeat_timeout_s: an instance that has not got on for that long gets no requests until
    it does again; heartbeat_dead_s: its requests go on elsewhere, and it is ended.
    """

    routing: str | None = None
    performance_model: str | None = None
    performance_form: str = "full"
    slo_tpot_s: float | None = None
    mean_output_tokens: float = 128.0
    adapter_load_s_per_rank: float = 0.0
    placement: str | None = None
    placement_interval_s: float = 30.0
    operating_points: str | None = None
    heartbeat_timeout_s: float = 5.0
    heartbeat_dead_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_timeout_s < self.heartbeat_dead_s <= MAX_COUNT:
            raise ConfigError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s} must be positive and below "
                f"heartbeat_dead_s={self.heartbeat_dead_s}, both in seconds"
            )
        if self.routing is not None:
            _choice("routing", self.routing, ROUTINGS)
        _choice("performance_form", self.performance_form, PERFORMANCE_FORMS)
        for name in ("slo_tpot_s", "mean_output_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} must be positive and finite (or leave it out)")
        if not 0 <= self.adapter_load_s_per_rank < math.inf:
            raise ConfigError(
                f"adapter_load_s_per_rank={self.adapter_load_s_per_rank} must be seconds, 0 or more"
            )
        if self.placement is not None:
            _choice("placement", self.placement, PLACEMENTS)
        if not 0 < self.placement_interval_s <= MAX_COUNT:
            raise ConfigError(
                f"placement_interval_s={self.placement_interval_s} must be positive, in seconds"
            )
        if self.placement is None and (self.operating_points is not None or self.routing == "phi"):
            raise ConfigError(
                "operating_points and routing='phi' need a placement; give one, such as placement='loraserve'"
            )
        if self.placement is not None and self.routing not in (None, "phi"):
            raise ConfigError(
                f"placement={self.placement!r} routes by its own table, not by routing={self.routing!r}; "
                "leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class RegistryConfig:
    """Where adapters are registered (`adapters.registry`), and which of them are served from the start.

    adapters: names; None = every one of this base model.
    """

    folder: str
    adapters: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """The adapter pool: adapters lie in the host memory of some instances, and others read them there.

    replicas: instances that hold each adapter, at least.  transport: by which they read; "shm" on one host.
    host: this host's address as its peers reach it, for transports between hosts; None = 127.0.0.1, and for
    an instance that dials in, the address from which it does.
    """

    replicas: int = 1
    transport: str = "shm"
    host: str | None = None

    def __post_init__(self) -> None:
        _at_least("pool.replicas", self.replicas, 1)
        _choice("pool.transport", self.transport, POOL_TRANSPORTS)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs one model.

    adapters: (name, directory) pairs served from the start.  max_loras: adapters resident on the device at
    once.  arena_mb: device memory for KV and adapters together, in 10^6 bytes per process; None = what
    kv_cache_gb and lora_memory_gb come to.  kv_cache_gb: upper bound on KV pages, in 10^9 bytes; None = none,
    and enough for max_num_seqs sequences of max_model_len, at most a quarter of the memory that is free, goes
    into the arena.  lora_memory_gb: what goes into the arena for adapters; None = max_loras times the largest
    adapter known at the start (or one of rank 16), with the same limit.  host_arena_mb: host memory per
    process for KV and adapters that leave the device; 0 = none; None = on CUDA as much as the device has, at
    most a quarter of what is free, on CPU none: there the arena is host memory already.  cache_policy: what
    leaves the device and comes back (docs/architecture.md).  swap_interval_s: how often pages are moved ahead
    of need: out of the device where more than swap_out_above of it is in use, in where less than
    swap_in_below is.  swap_time_unit_s: FastLibra's unit of the time since a cached thing was used; None =
    the policy's own.
    max_num_batched_tokens: token rows per step (longer prompts are prefilled in chunks).
    decode_buckets: batch sizes that decode steps are padded to, one compiled graph each; None = on CPU one
    graph for any size (and one for size 1), on CUDA powers of two.  expert_parallel: processes that the
    engine consists of, each with its share of the experts.  num_threads: CPU threads of the engine, all
    processes together; None = all cores.  num_instances: engines that share this machine; what is chosen
    from the free memory is divided by it.  starvation_s: a request that waits longer than this for its
    adapter stops younger ones from being admitted before it.  lora_kernel: how deltas are computed, "sgmv" or
    one of the papers' baselines (see `kernels.lora`).  lora_server: where deltas are computed; None = here.
    instance: this engine's name in a cluster.  queue: "fcfs", or "sjf-oracle": least max_tokens first, for
    comparisons where every answer has its full length.  step_profile: another device's step times, emulated
    by sleeping; None = none.  load_gb_per_s: upper bound on the rate of copies to and from the device; None =
    none.  pool: of the instances; None = each keeps all adapters.  With it `adapters` are not loaded at the
    start, only measured: the pool says what an instance gets.  state_dir: where this host keeps what must
    outlive a process, such as the contents of adapters; None = $XDG_STATE_HOME/moe_lora, or
    ~/.local/state/moe_lora.  contents_dir: where an instance keeps adapters' contents by hash, so that it
    finds them when it is started again; None = nowhere.  contents: (name, content hash) of those of
    `adapters` that are served already, with that content and no other.  leave_out_bad: start without
    adapters that can't be read.
    """

    model_dir: str
    adapters: tuple[tuple[str, str], ...] = ()
    dtype: str = "auto"
    device: str = "auto"
    max_loras: int = 64
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    arena_mb: float | None = None
    host_arena_mb: float | None = None
    cache_policy: str = CACHE_POLICIES[0]
    swap_interval_s: float = 0.1
    swap_out_above: float = 0.95
    swap_in_below: float = 0.7
    swap_time_unit_s: float | None = None
    kv_cache_gb: float | None = None
    lora_memory_gb: float | None = None
    block_size: int = 16
    eager: bool = False
    decode_buckets: tuple[int, ...] | None = None
    prefix_caching: bool = True
    expert_parallel: int = 1
    num_threads: int | None = None
    num_instances: int = 1
    starvation_s: float = 5.0
    seed: int = 0
    lora_kernel: str = "sgmv"
    lora_server: LoraServerConfig | None = None
    instance: str = "instance-0"
    queue: str = "fcfs"
    step_profile: StepProfile | None = None
    load_gb_per_s: float | None = None
    pool: PoolConfig | None = None
    state_dir: str | None = None
    contents_dir: str | None = None
    contents: tuple[tuple[str, str], ...] = ()
    leave_out_bad: bool = False

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, DTYPES)
        _choice("device", self.device, DEVICES)
        _choice("lora_kernel", self.lora_kernel, LORA_KERNELS)
        _choice("queue", self.queue, QUEUES)
        _choice("cache_policy", self.cache_policy, CACHE_POLICIES)
        for name in _COUNTS:
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "num_threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.arena_mb is not None and self.lora_memory_gb is not None:
            raise ConfigError(
                f"arena_mb={self.arena_mb} is for KV and adapters together, so lora_memory_gb="
                f"{self.lora_memory_gb} has no meaning beside it; leave one of them out"
            )
        if self.host_arena_mb is not None and not 0 <= self.host_arena_mb < math.inf:
            raise ConfigError(f"host_arena_mb={self.host_arena_mb} must be 0 (none) or positive and finite")
        if not 0 < self.swap_in_below <= self.swap_out_above <= 1:
            raise ConfigError(
                f"swap_in_below={self.swap_in_below} and swap_out_above={self.swap_out_above} must be shares "
                "above 0 and up to 1, the first no larger than the second"
            )
        for name in (
            "kv_cache_gb",
            "lora_memory_gb",
            "load_gb_per_s",
            "arena_mb",
            "swap_interval_s",
            "swap_time_unit_s",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} must be positive and finite (or leave it out)")
        if self.swap_interval_s > MAX_COUNT:
            raise ConfigError(
                f"swap_interval_s={self.swap_interval_s} is in seconds; choose at most {MAX_COUNT}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}; every running sequence needs one token row per step"
            )
        if self.pool is not None:
            _check_pool(self)
        counts = Counter(name for name, _ in self.adapters)
        for name, count in counts.items():
            if not name or count > 1:
                raise ConfigError(f"adapter name {name!r} is empty or given twice; names must be unique")
        if self.decode_buckets is not None and (not self.decode_buckets or min(self.decode_buckets) < 1):
            raise ConfigError(f"decode_buckets={self.decode_buckets} must be one or more sizes >= 1")

    @property
    def threads_per_process(self) -> int | None:
        """CPU threads of each of the engine's processes; None = torch's own choice."""
        if self.expert_parallel == 1:
            return self.num_threads
        return max(1, (self.num_threads or os.cpu_count() or 1) // self.expert_parallel)


def _check_pool(config: EngineConfig) -> None:
    if config.expert_parallel > 1:
        raise ConfigError(
            f"pool and expert_parallel={config.expert_parallel} do not go together yet: the ranks of an "
            "instance read adapters from files of its own; leave the pool out, or use expert_parallel=1"
        )
    if config.lora_server is not None:
        raise ConfigError(
            "pool and a LoRA Server do not go together: the server holds the adapters for all instances "
            "already; leave one of them out"
        )


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not known; choose one of {', '.join(allowed)}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name}={value} must be {least} or more")
    if value > MAX_COUNT:
        raise ConfigError(f"{name}={value} is more than any machine holds; choose at most {MAX_COUNT}")
