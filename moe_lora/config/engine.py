# SPDX-License-Identifier: Apache-2.0
"""Settings of an engine.  Frozen; "auto" and None are resolved by functions that read model and machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import read_config
from moe_lora.families import cut_to

from .devices import DeviceShare
from .optional_parts import MAX_PUT_INSTANCES, DLoraConfig, EmulationConfig, LoraServerConfig, PoolConfig
from .settings import Settings, setting

if TYPE_CHECKING:
    from .kv_events import KvEventSettings

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("safetensors", "dummy")
QUANTIZE = ("checkpoint", "none", "int8", "int4", "fp8", "int8-dynamic", "int4-dynamic")
GROUP_SIZES = (32, 64, 128)
UNQUANTISED = QUANTIZE[:2]
QUANTISATION = ("quantize", "quantize_group_size", "quantize_head")
"""Settings that say how weights are held."""
WEIGHTS = ("load_format", "num_layers", *QUANTISATION)
"""And from where, and how many."""
LORA_KERNELS = ("sgmv", "bgmv", "mbgmv")
GENERATION_CONFIGS = ("auto", "none")
QUEUES = ("fcfs", "sjf-oracle")
BATCHINGS = ("unmerged", "merged", "dlora", "auto")
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
AUTO = "auto"
CHOSEN = "chosen from the model and the memory that is free"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Settings):
    """How one engine runs one model."""

    GROUP: ClassVar[str] = "Model"
    GONE: ClassVar[Mapping[str, str]] = {
        "swap_out_above": "the cache moves pages out above 95 % of the device",
        "swap_in_below": "the cache moves pages in below 70 % of the device",
    }

    model_dir: str = setting(in_file=False)
    """Folder of the base model's checkpoint."""
    adapters: tuple[tuple[str, str], ...] = setting((), in_file=False)
    """(name, directory) pairs served from the start.  With a pool, adapters are only measured at the
    start."""
    dtype: str = setting("auto", choices=DTYPES, option="--dtype", metavar="DTYPE")
    """Type of weights, KV and activations: float32, bfloat16, or auto, the checkpoint's (bfloat16 for
    float16)."""
    load_format: str = setting(LOAD_FORMATS[0], choices=LOAD_FORMATS)
    """Source of the weights.  safetensors: the folder's files.  dummy: random weights of the sizes in
    config.json, the same at each start; no weight files are needed."""
    num_layers: int | None = setting(None, least=1, metavar="N", unset="all")
    """With dummy weights, the number of first layers to serve."""
    generation_config: str = setting(GENERATION_CONFIGS[0], choices=GENERATION_CONFIGS)
    """Sampling defaults.  auto: temperature, top_p, top_k, min_p, repetition_penalty and end tokens of the
    checkpoint's generation_config.json.  none: 1, 1, 0, 0 and 1."""
    chat_template: str | None = setting(None, path="place", no_path=r"(?s).*\{[{%].*", unset="the model's")
    """Chat template of the base model: a file, or Jinja text."""
    chat_template_kwargs: str | None = setting(None, metavar="JSON", unset="none")
    """Variables of the template in chats that don't send them, as in {"enable_thinking": false}."""
    quantize: str = setting(QUANTIZE[0], choices=QUANTIZE, option="--quantize", metavar="FORMAT")
    """Hold weights as none, int8, int4 or fp8.  checkpoint keeps the checkpoint's format, and none is the
    dtype.  The formats cover weights of attention, MLP and experts, quantised at the load: int8 and fp8 with
    a scale per output, int4 with a scale per group of inputs.  int8-dynamic and int4-dynamic quantise inputs
    to int8 too.  Router, norms, embeddings and adapters keep the dtype (docs/guides/quantised.md)."""
    quantize_group_size: int | None = setting(
        None, metavar="32|64|128", unset="64 with int4, a whole row with fp8"
    )
    """Inputs that share a scale: with int4 32, 64 or 128; with fp8 128, in blocks of 128 outputs."""
    quantize_head: bool = setting(False)
    """Quantise the vocabulary head too."""
    device: str = setting("auto", choices=DEVICES, option="--device", metavar="DEVICE")
    """Device of the model: auto, cpu or cuda.  auto is CUDA if a device is there, else the CPU."""
    max_loras: int = setting(64, least=1, option="--max-loras", group="Adapters")
    """Adapters on the device.  A LoRA Server has its own capacity."""
    max_lora_rank: int | None = setting(
        None, least=1, option="--max-lora-rank", group="Adapters", metavar="R", unset="what the device takes"
    )
    """Highest LoRA rank served.  A larger adapter is refused when its file is read."""
    adapter_root: str | None = setting(
        None, path="folder", option="--adapter-root", metavar="FOLDER", group="Adapters", unset="any folder"
    )
    """Read adapters below this folder only, also through links and the registry."""
    max_num_seqs: int = setting(64, least=1, option="--max-num-seqs")
    """Sequences computed in a step."""
    max_num_batched_tokens: int = setting(2048, least=1, option="--max-num-batched-tokens")
    """Tokens computed in a step.  Longer prompts are prefilled in chunks."""
    max_model_len: int | None = setting(None, least=1, option="--max-model-len", unset="the model's")
    """Tokens of prompt and answer."""
    arena_mb: float | None = setting(None, above=0, unset=CHOSEN)
    """Device memory for KV and adapters together, in 10^6 bytes, of each process."""
    memory_utilization: float | None = setting(
        None, above=0, most=1, unset="half of the memory that is free once the weights are there"
    )
    """Share of a device's memory for one process: weights, KV and adapters.  Chosen sizes stay within the
    share: a quarter of the rest for adapters, three quarters for KV.  Working memory of a step comes on top.
    Ranks that share a device count equal parts of its memory."""
    host_arena_mb: float | None = setting(
        None,
        least=0,
        unset="on CUDA as much as the device has, at most a quarter of what is free; on CPU 0",
    )
    """Host memory for KV and adapters that left the device, in 10^6 bytes, of each process; 0: none."""
    cache_policy: str = setting(
        CACHE_POLICIES[0], choices=CACHE_POLICIES, option="--cache-policy", metavar="POLICY"
    )
    """Eviction policy of KV and adapters.  Names with -wo are ablations (docs/explanation/cache.md)."""
    swap_interval_s: float = setting(0.1, above=0, fixed="a tenth of a second serves all policies")
    """Time between moves of pages ahead of need."""
    swap_time_unit_s: float | None = setting(
        None, above=0, unset="the policy's", fixed="each cache policy has its own"
    )
    """FastLibra's unit of the time since the last use."""
    kv_cache_gb: float | None = setting(None, above=0, option="--kv-cache-gb", metavar="GB", unset="chosen")
    """Room for KV, in 10^9 bytes.  Chosen, without arena_mb: KV of max_num_seqs sequences of max_model_len,
    at most a quarter of the free memory."""
    lora_memory_gb: float | None = setting(
        None, above=0, option="--lora-memory-gb", metavar="GB", group="Adapters", unset="chosen"
    )
    """Room for adapters, in 10^9 bytes; not with arena_mb.  Chosen: max_loras times the largest adapter known
    at the start (or one of rank 16), at most a quarter of the free memory."""
    block_size: int = setting(16, least=1)
    """Tokens per KV page."""
    eager: bool = setting(False, option="--eager")
    """Start without compilation."""
    decode_buckets: tuple[int, ...] | None = setting(
        None,
        unset="on CPU one graph for any size, and one for 1; on CUDA powers of two",
        fixed="the device decides",
    )
    """Batch sizes of compiled decode steps; a step is padded to the next size."""
    async_scheduling: str = setting("auto", choices=("auto", "on", "off"))
    """Schedule and launch a step before the tokens of the last step are known.  The tokens are the same and
    reach clients a step later; a request that ends by a token computes one row in vain.  auto: on CUDA; off
    with several ranks, a LoRA Server, host workers, merging or an emulated step, which refuse on."""
    prefix_caching: bool = setting(True)
    """Reuse KV of equal prompt starts; false: compute every prompt from its first token."""
    expert_parallel: int = setting(1, least=1, option="--expert-parallel", group="Scaling")
    """Processes of an instance that share its experts.  The number divides the number of experts."""
    tensor_parallel: int = setting(1, least=1, option="--tensor-parallel", group="Scaling")
    """Processes of an instance that share its heads, inner widths and vocabulary head.  The number divides
    heads and widths.  With the same expert_parallel, experts stay whole (docs/guides/parallel.md)."""
    rank_timeout_s: float = setting(300.0, above=0, fixed="a server ends an instance after heartbeat_dead_s")
    """Longest wait of a rank for another rank's part of a step or load; then the engine ends.  Ranks may
    compile for different times."""
    num_threads: int | None = setting(None, least=1, option="--threads", unset="all cores, shared")
    """CPU threads of an instance, all its processes together."""
    num_instances: int = setting(1, least=1, option="--instances", group="Scaling")
    """Engine processes that replace each other.  Instances of a host divide its cores and its host memory."""
    spare_process: bool = setting(True)
    """Keep a spare process beside several instances of moe-lora serve.  The spare has imported torch, holds
    no device, and replaces the next instance that dies."""
    kv_events: str | None = setting(None, metavar="JSON", unset="none")
    """Publish events of cached prefixes over ZeroMQ, as arrays: vLLM's kv_events_config in JSON.  Instance n
    adds n to both ports; on one host give ports num_instances apart.  Salted prompts have no events."""
    starvation_s: float = setting(5.0, fixed="5 s serve all loads")
    """Wait for an adapter after which younger requests no longer pass."""
    seed: int = 0
    """Seed of sampling without a request's seed.  Each front end and each start of an instance derives its
    own."""
    lora_kernel: str = setting("sgmv", choices=LORA_KERNELS)
    """Kernel of deltas: sgmv, true rank; baselines: bgmv (padded, Punica), mbgmv (per row, S-LoRA)."""
    lora_server: LoraServerConfig | None = setting(None, in_file=False)
    """The LoRA Server; None: the engine computes deltas."""
    instance: str = setting("instance-0", in_file=False)
    """Name of this engine in a cluster."""
    queue: str = setting(
        "fcfs",
        choices=QUEUES,
        fixed="requests start by priority and arrival; sjf-oracle is for comparisons",
    )
    """Order of waiting requests: first come first served; or, for comparisons with full answers, least
    max_tokens first."""
    host_workers: int | str = setting(
        0, least=0, words=(AUTO,), option="--host-workers", metavar="N", group="Adapters"
    )
    """CPU processes that prefill during a load, for each rank of each instance.  auto: by the performance
    model and the cores, 0 on a CPU device.  With a LoRA Server they serve the instances' own sites."""
    host_cores: tuple[int, ...] = ()
    """Cores of host workers, one each, in the order of instances and ranks; default: any."""
    host_tokens_per_worker: int | None = setting(
        None,
        least=1,
        unset="the performance model's, without one 32",
        fixed="the performance model states the number; without a model, 32",
    )
    """Prompt tokens of one layer for one worker; longer prompts are divided."""
    host_tokens_per_step: int = setting(
        0,
        least=0,
        unset="host_tokens_per_worker x host_workers",
        fixed="host_tpot_budget_ms bounds the tokens, and the workers' rate does without it",
    )
    """Largest number of prompt tokens of loading adapters in a step with other requests; 0: the default."""
    host_tpot_budget_ms: float | None = setting(None, above=0, metavar="MS", unset="none")
    """Time for host rows of all layers in a step.  host_tokens_per_step is then the largest fitting number,
    by the performance model."""
    performance_model: str | None = setting(
        None,
        path="place",
        unset="the front end's",
        fixed="give front_end.performance_model, which instances read too",
    )
    """Times of this machine (moe-lora profile-steps --host-worker), for the choice between host workers and
    waiting for the adapter."""
    batching: str = setting(
        BATCHINGS[0], choices=BATCHINGS, option="--batching", metavar="MODE", group="Adapters"
    )
    """Merge adapters: unmerged (never), merged, dlora, auto.  merged serves the requests of one adapter at a
    time, dlora follows dLoRA's rule, and auto takes the cheapest of unmerged, merged and mixed steps.  On
    quantised weights auto is unmerged (docs/guides/merging.md)."""
    dlora: DLoraConfig | None = setting(None, in_file=False)
    """Parameters of batching=dlora; None: the defaults."""
    merge_mb_per_step: float = setting(64.0, above=0, fixed="64 MB change between two steps")
    """Weights changed between two steps, in 10^6 bytes of each process, at least one site of one layer;
    merged and dlora change all at once."""
    merge_error_limit: float = setting(0.05, above=0, fixed="auto merges up to 5 %")
    """Largest relative change of an adapter's deltas by rounding merged weights, for auto.  merged and dlora
    log a larger change."""
    verify_merge: bool = setting(
        False, fixed="tests compare the weights; a server has no use for the checksum"
    )
    """Compare all weights with their first checksum after each unmerge."""
    pool: PoolConfig | None = setting(None, in_file=False)
    """The pool of the instances; None: each keeps all adapters."""
    state_dir: str | None = setting(
        None,
        path="place",
        metavar="FOLDER",
        unset="host-NAME in $XDG_STATE_HOME/moe_lora, else in ~/.local/state/moe_lora",
    )
    """Folder of adapters' contents, which must outlive processes.  Avoid places cleaned by age, such as
    /tmp."""
    contents_dir: str | None = setting(
        None,
        path="place",
        unset="contents-… in state_dir, the same at each start of an instance of the cluster",
        fixed="contents lie in engine.state_dir",
    )
    """Folder of an instance's adapter contents by hash, read at a restart."""
    device_shares: tuple[DeviceShare, ...] = setting((), in_file=False)
    """The device of each rank, chosen by devices of the cluster; (): rank r takes device r."""
    leave_out_bad: bool = setting(False, in_file=False)
    """Start without unreadable adapters."""
    emulation: EmulationConfig = setting(
        EmulationConfig(), fixed="another device is emulated for comparisons alone, by code in Python"
    )
    """Times of another device, for benchmarks."""

    @property
    def num_ranks(self) -> int:
        """Processes of each instance."""
        return max(self.tensor_parallel, self.expert_parallel)

    @property
    def quantisation(self) -> dict[str, Any]:
        """How weights are held, as `weight_format` takes it."""
        return {name: getattr(self, name) for name in QUANTISATION}

    def kv_event_settings(self) -> KvEventSettings | None:
        """None: no events.  Raises ConfigError."""
        if self.kv_events is None:
            return None
        from .kv_events import read_settings

        return read_settings(self.kv_events, self.num_instances)

    def hf_config(self) -> dict[str, Any]:
        """The model's config.json, with as many layers as are served.

        Raises ConfigError if there is none, or num_layers is more than it has.
        """
        found = read_config(Path(self.model_dir))
        return found if self.num_layers is None else cut_to(found, self.num_layers)

    def weights_name(self) -> str:
        """Name of the format (`weight_format`) that instances hold the model's weights in.

        Reads its config.json; raises ConfigError if there is none.
        """
        from .weight_format import weight_format

        return weight_format(self.hf_config(), **self.quantisation).name

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kv_event_settings()
        if self.arena_mb is not None and self.lora_memory_gb is not None:
            raise ConfigError(
                f"arena_mb={self.arena_mb} is for KV and adapters together, so lora_memory_gb="
                f"{self.lora_memory_gb} has no meaning beside it; leave one of them out"
            )
        if self.arena_mb is not None and self.memory_utilization is not None:
            raise ConfigError(
                f"arena_mb={self.arena_mb:g} is a size, so memory_utilization="
                f"{self.memory_utilization:g} has no meaning beside it; leave one of them out"
            )
        if self.num_layers is not None and self.load_format != "dummy":
            raise ConfigError(
                f"num_layers={self.num_layers} would leave out layers that the other weights were trained "
                "with; give load_format='dummy' too, or leave it out"
            )
        grouped = self.quantize.startswith(("int4", "fp8"))
        if self.quantize_group_size is not None and not grouped:
            raise ConfigError(
                f"quantize_group_size={self.quantize_group_size} is for int4 and fp8, not for quantize="
                f"{self.quantize!r}; leave it out"
            )
        if self.quantize_group_size not in (None, *GROUP_SIZES):
            raise ConfigError(f"quantize_group_size={self.quantize_group_size} must be 32, 64 or 128")
        if self.quantize == "fp8" and self.quantize_group_size not in (None, 128):
            raise ConfigError(
                f"quantize_group_size={self.quantize_group_size} must be 128 with fp8, or left out"
            )
        if self.quantize_head and self.quantize in UNQUANTISED:
            raise ConfigError("quantize_head=True needs a format; choose one with quantize")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}; every running sequence needs one token row per step"
            )
        self._check_batching()
        self._check_ranks()
        self._check_host_settings()
        if self.pool is not None and self.lora_server is not None:
            raise ConfigError(
                "pool and a LoRA Server do not go together: the server holds the adapters for all instances "
                "already; leave one of them out"
            )
        for name, count in Counter(name for name, _ in self.adapters).items():
            if not name or count > 1:
                raise ConfigError(f"adapter name {name!r} is empty or given twice; names must be unique")
        if self.decode_buckets is not None and (not self.decode_buckets or min(self.decode_buckets) < 1):
            raise ConfigError(f"decode_buckets={self.decode_buckets} must be one or more sizes >= 1")

    def _check_batching(self) -> None:
        if self.dlora is not None and self.batching != "dlora":
            raise ConfigError(
                f"dlora is a section for batching='dlora', not for batching={self.batching!r}; set "
                "engine.batching to dlora (--batching dlora), or leave the section out"
            )
        if self.batching in ("merged", "dlora") and self.quantize not in UNQUANTISED:
            raise ConfigError(
                f"batching={self.batching!r} and quantize={self.quantize!r} do not go together: no adapter "
                "can be folded into quantised weights; use batching='auto' or 'unmerged', or no quantize"
            )

    def _check_ranks(self) -> None:
        tensor, expert = self.tensor_parallel, self.expert_parallel
        server = self.lora_server
        if server is not None and server.device_puts != "none":
            given = f"lora_server.device_puts={server.device_puts!r}"
            if self.num_ranks > 1:
                raise ConfigError(
                    f"{given} and an instance of {self.num_ranks} ranks do not go together yet; use "
                    "expert_parallel=1 and tensor_parallel=1, or device_puts='none'"
                )
            if self.num_instances > MAX_PUT_INSTANCES:
                raise ConfigError(
                    f"{given} takes up to {MAX_PUT_INSTANCES} instances, each of which has a stream on every "
                    f"GPU of the server, and there are {self.num_instances}; use fewer, or "
                    "device_puts='none'"
                )
            if server.layout.startswith("DP"):
                raise ConfigError(
                    f"{given} needs a layout EPx-PPy, not {server.layout}, which is there for comparison; "
                    "change one of them"
                )
            if self.emulation.step_profile is not None or self.lora_kernel == "bgmv":
                raise ConfigError(
                    f"{given} goes neither with a step_profile, which emulates another device, nor with "
                    "lora_kernel='bgmv', whose batches the host has to look at; leave one out"
                )
        if tensor == 1:
            return
        if expert not in (1, tensor):
            raise ConfigError(
                f"tensor_parallel={tensor} and expert_parallel={expert} are of other ranks; give the same "
                "number twice, or leave one out"
            )

    def _check_host_settings(self) -> None:
        number, parts = self.host_workers, self.num_instances * self.num_ranks
        for name in ("host_cores", "host_tokens_per_worker", "host_tokens_per_step", "host_tpot_budget_ms"):
            given = getattr(self, name)
            if given and not number:
                raise ConfigError(f"{name}={given} is for host workers; set host_workers, or leave it out")
        if self.host_tpot_budget_ms is not None and self.host_tokens_per_step:
            raise ConfigError(
                f"host_tpot_budget_ms={self.host_tpot_budget_ms:g} and host_tokens_per_step="
                f"{self.host_tokens_per_step} say the same thing twice; leave one of them out"
            )
        cores = len(set(self.host_cores))
        wanted = len(self.host_cores) if number == AUTO else int(number) * parts
        if self.host_cores and (cores != wanted or cores % parts):
            raise ConfigError(
                f"host_cores={self.host_cores} must name a core of its own for each of "
                f"host_workers={number} of each of {self.num_ranks} ranks of each of "
                f"num_instances={self.num_instances}"
            )

    @property
    def threads_per_process(self) -> int | None:
        """CPU threads of each of the engine's processes; None = torch's own choice."""
        if self.num_ranks == 1:
            return self.num_threads
        return max(1, (self.num_threads or os.cpu_count() or 1) // self.num_ranks)
