# SPDX-License-Identifier: Apache-2.0
"""Plan of bench_cache's simulation: models on the paper's device, applications, policies, settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.cache.conversations import DialogueShape, Drifting, dialogues, mooncake_chats
from moe_lora.policies.caching.caching import CachingPolicy, FastLibra, make_caching_policy, static_partition
from moe_lora.sim.instance import CachedConfig
from moe_lora.timing.host_times import CacheCosts
from moe_lora.timing.step_model import TransformerTime
from moe_lora.workload.popularity.named import distinct, gaussian
from moe_lora.workload.popularity.popularity import Popularity, uniform, zipf
from moe_lora.workload.replay_plan import TurnRequest
from moe_lora.workload.traces.records import Trace

# FastLibra, table 1: 256 TFLOPS FP16 and 64 GB of HBM a card, PCIe 4.0 x16, 256 GB of main memory.
FLOPS_PER_S, HBM_BYTES, LINK_BYTES_PER_S = 256e12, 64e9, 32e9
# Not stated there, so assumed: HBM of 1.6 TB/s; half of the FLOPS, 80 % of the HBM's and of the link's rate
# are reached; 10 % of the HBM is nobody's, and activations take 3 GB; 4 ms a step go to the host.
HBM_BYTES_PER_S, FLOPS_SHARE, BYTES_SHARE = 1.6e12, 0.5, 0.8
HBM_SHARE, ACTIVATION_BYTES, STEP_FIXED_S = 0.9, 3e9, 0.004
HOST_ARENA_BYTES = 128e9
BLOCK_TOKENS = 32
LORA_RANKS = (32, 64)


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A model of the paper and the cards it runs on.  kv_heads x 128: width of keys and of values."""

    num_params: float
    num_layers: int
    hidden_size: int
    kv_heads: int
    num_cards: int

    def time(self) -> TransformerTime:
        return TransformerTime(
            num_params=self.num_params,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            kv_token_bytes=2 * 2 * self.num_layers * self.kv_heads * 128,
            flops_per_s=self.num_cards * FLOPS_PER_S * FLOPS_SHARE,
            bytes_per_s=self.num_cards * HBM_BYTES_PER_S * BYTES_SHARE,
            fixed_s=STEP_FIXED_S,
        )

    def adapter_bytes(self, lora_rank: int) -> float:
        """On q, k, v and o, fp16: rank (in + out) each, as in S-LoRA."""
        widths = 2 * (self.hidden_size + self.hidden_size) + 2 * (self.hidden_size + self.kv_heads * 128)
        return 2.0 * lora_rank * widths * self.num_layers


MODELS = {
    "7B": Llama(num_params=6.74e9, num_layers=32, hidden_size=4096, kv_heads=32, num_cards=1),
    "13B": Llama(num_params=13.0e9, num_layers=40, hidden_size=5120, kv_heads=40, num_cards=2),
    "34B": Llama(num_params=33.7e9, num_layers=48, hidden_size=8192, kv_heads=8, num_cards=4),
}


def config_of(model: str, num_adapters: int) -> CachedConfig:
    """An instance with adapter-0 ... of ranks 32 and 64 in turn."""
    llama = MODELS[model]
    time = llama.time()
    page_bytes = BLOCK_TOKENS * time.kv_token_bytes
    pages = [-(-int(llama.adapter_bytes(rank)) // page_bytes) for rank in LORA_RANKS]
    room = llama.num_cards * (HBM_BYTES * HBM_SHARE - ACTIVATION_BYTES) - 2 * llama.num_params
    return CachedConfig(
        time=time,
        adapter_pages={name: pages[i % len(pages)] for i, name in enumerate(adapter_names(num_adapters))},
        num_device_pages=int(room / page_bytes),
        num_host_pages=int(HOST_ARENA_BYTES / page_bytes),
        link_bytes_per_s=llama.num_cards * LINK_BYTES_PER_S * BYTES_SHARE,
        block_size=BLOCK_TOKENS,
    )


def adapter_names(num_adapters: int) -> list[str]:
    return [f"adapter-{i}" for i in range(num_adapters)]


@dataclass(frozen=True, kw_only=True)
class Application:
    """Requests as a function of their rate.  Judged from since_s on.

    moves_per_s: rate of changes of the most popular adapter (0: never).
    """

    shape: DialogueShape
    zipf_s: float
    duration_s: float
    since_s: float
    moves_per_s: float = 0.0

    def popularity(self, num_adapters: int) -> Popularity:
        base = zipf(adapter_names(num_adapters), self.zipf_s)
        if not self.moves_per_s:
            return base
        num_moves = round(self.moves_per_s * self.duration_s)
        return Drifting(base.adapters, base.probabilities, num_moves=num_moves)

    def judged_from(self, requests: Sequence[TurnRequest]) -> float:
        return self.since_s

    def requests(self, popularity: Popularity, rate_per_s: float) -> list[TurnRequest]:
        return dialogues(self.shape, popularity, rate_per_s=rate_per_s, duration_s=self.duration_s)


# The paper's data sets are not at hand; README.md has the origin of these numbers.
CHAT_SHAPE = DialogueShape(
    prefix_tokens=64, turns=5, question_tokens=150, answer_tokens=215, think_s=30, spread=0.8
)
APPLICATIONS = {
    "chatbots": Application(shape=CHAT_SHAPE, zipf_s=1.0, duration_s=480, since_s=160),
    "translations": Application(
        shape=DialogueShape(prefix_tokens=96, turns=1, question_tokens=32, answer_tokens=32, think_s=1),
        zipf_s=1.2,
        duration_s=60,
        since_s=15,
        moves_per_s=1 / 20,
    ),
    "agents": Application(
        shape=DialogueShape(prefix_tokens=768, turns=10, question_tokens=120, answer_tokens=40, think_s=10),
        zipf_s=1.2,
        duration_s=300,
        since_s=100,
        moves_per_s=1 / 60,
    ),
}


@dataclass(frozen=True, kw_only=True)
class MooncakeChats:
    """Mooncake's conversations, whole; the trace's begin warms up."""

    trace: Trace
    zipf_s: float = 1.0
    warm_share: float = 0.25

    def popularity(self, num_adapters: int) -> Popularity:
        return zipf(adapter_names(num_adapters), self.zipf_s)

    def judged_from(self, requests: Sequence[TurnRequest]) -> float:
        return requests[int(self.warm_share * len(requests))].arrival_s

    def requests(self, popularity: Popularity, rate_per_s: float) -> list[TurnRequest]:
        return mooncake_chats(self.trace, popularity, rate_per_s=rate_per_s, block_tokens=BLOCK_TOKENS)


LARGE_POPULARITIES = ("distinct", "uniform", "skewed-0.1", "skewed-0.3")


def popularity_of(name: str, num_adapters: int) -> Popularity:
    """The paper's distributions over thousands of adapters (section 6.9)."""
    names = adapter_names(num_adapters)
    if name == "distinct":
        return distinct(names)
    if name == "uniform":
        return uniform(names)
    return gaussian(names, float(name.removeprefix("skewed-")))


PolicyMaker = Callable[[CacheCosts], CachingPolicy]

POLICIES = (
    "lru",
    "static",
    "slora",
    "fastlibra",
    "fastlibra-wom",
    "fastlibra-wos",
    "fastlibra-wol",
    "cost-aware",
)
OURS = POLICIES[-1]
SETTINGS: dict[str, tuple[float, ...]] = {
    "static": (0.05, 0.1, 0.2, 0.3),  # adapter_share
    "fastlibra": (60.0, 5.0, 600.0),  # time_unit_s
    "fastlibra-wom": (60.0, 5.0, 600.0),
    "fastlibra-wol": (60.0, 5.0, 600.0),
}
"""Tried values of policies' settings, the default first."""


def settings_of(policy: str) -> dict[str, PolicyMaker]:
    """Makers of the policy by setting name."""

    def maker(value: float | None) -> PolicyMaker:
        return lambda costs: _policy(policy, value, costs)

    if policy not in SETTINGS:
        return {"": maker(None)}
    return {f"{value:g}": maker(value) for value in SETTINGS[policy]}


def _policy(name: str, value: float | None, costs: CacheCosts) -> CachingPolicy:
    if name == "static" and value is not None:
        return static_partition(value)
    policy = make_caching_policy(name, costs)
    return replace(policy, time_unit_s=value) if isinstance(policy, FastLibra) and value else policy
