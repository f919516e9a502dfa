# SPDX-License-Identifier: Apache-2.0
"""Settings of `moe-lora provision` and `moe-lora replay`."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_lora.core.errors import ConfigError

from .settings import Settings, setting

ESTIMATORS = ("paper", "corrected")
ARRIVALS = ("trace", "gamma")
FORCE_LENGTH = ("ignore-eos", "min-tokens", "off")


@dataclass(frozen=True, kw_only=True)
class PlanGoals(Settings):
    """What a cluster is sized for: a load, two SLOs, a budget."""

    global_batch: float | None = setting(
        None, above=0, option="--global-batch", unset="rate * mean output tokens * predicted TPOT"
    )
    """Requests decoding at once, over all instances; not with --request-rate or --peak."""
    load_margin: float = setting(0.0, least=0, option="--load-margin")
    """Further load to plan for, 0.2 being a fifth; not with --global-batch."""
    gpus: int | None = setting(None, least=1, option="--gpus", unset="as few as it takes")
    """Number of GPUs to divide."""
    instances: int | None = setting(None, least=1, option="--instances", unset="chosen")
    """Number of LLM instances."""
    prefix_hit_share: float | None = setting(
        None, least=0, option="--prefix-hit-share", unset="by the trace's block hashes, 0 without them"
    )
    """Share of every prompt with KV from earlier requests."""
    slo_ttft_s: float = setting(2.0, above=0, option="--slo-ttft-s")
    """P95 of TTFT, prefill included."""
    slo_tpot_s: float = setting(0.1, above=0, option="--slo-tpot-s")
    """Mean TPOT."""
    target_iar: float = setting(0.95, above=0, most=1, option="--target-iar")
    """Share of requests that start at once."""
    estimator: str = setting("corrected", choices=ESTIMATORS, option="--estimator")
    """Formula of the IAR for the target."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gpus is not None and self.instances is not None:
            raise ConfigError("gpus and instances are both given; a budget is split by the plan: give one")
        if self.global_batch is not None and self.load_margin:
            raise ConfigError("the margin is a share of a load by its rate; give load_margin or global_batch")
        if self.prefix_hit_share is not None and not self.prefix_hit_share < 1:
            raise ConfigError(
                f"prefix_hit_share={self.prefix_hit_share} must be 0 or more, and less than 1: a request "
                "computes one token of its prompt at least"
            )


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(Settings):
    """Where and how to send.

    model: name of the base model, for requests without an adapter.
    """

    url: str = setting(option="--url")
    """Server, such as http://127.0.0.1:8000."""
    model: str
    """Base model's name."""
    timeout_s: float = setting(600.0, above=0, option="--timeout-s")
    """Time for one whole request."""
    max_connections: int = setting(2048, least=1, option="--max-connections")
    """Requests under way at once."""
    temperature: float = setting(0.0, least=0, most=100, option="--temperature")
    """0: greedy."""
    force_length: str = setting("ignore-eos", choices=FORCE_LENGTH, option="--force-length")
    """Way to get the trace's output length, except for known answers."""
    vocab_size: int = setting(32000, least=1, option="--vocab-size")
    """Upper bound of random token ids."""
    seed: int = setting(0, least=0, option="--seed")
    """Seed of arrivals, adapters and prompts."""
    api_key: str | None = field(default=None, repr=False)
    """Bearer token."""


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(Settings):
    """How a trace is turned into requests; lengths in tokens, None: as in the trace.

    arrivals: "trace" (its times, scaled if request_rate_per_s is given) or "gamma" (drawn).  num_requests,
    duration_s: recorded arrivals are cut; drawn ones go round the trace's rows as often as needed.  prompts:
    "text" sends the trace's texts, "random" random token ids of the trace's lengths.
    """

    arrivals: str = setting("trace", choices=ARRIVALS)
    request_rate_per_s: float | None = None
    burstiness: float = setting(1.0, option="--burstiness")
    """1: Poisson; less is burstier (Gamma)."""
    duration_s: float | None = setting(None, option="--duration-s")
    """Send requests that arrive earlier."""
    busiest: bool = setting(False, option="--busiest")
    """With --duration-s: take the trace's busiest stretch instead of its start."""
    num_requests: int | None = setting(None, least=1, option="--num-requests")
    """Largest number of requests."""
    max_prompt_tokens: int | None = setting(None, least=1, option="--max-prompt-tokens")
    """Cut longer prompts."""
    max_output_tokens: int | None = setting(None, least=1, option="--max-output-tokens")
    """Ask for no more than this."""
    prompts: str = setting("random", choices=("random", "text"))
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arrivals == "gamma" and self.request_rate_per_s is None:
            raise ConfigError("drawn arrivals need a rate; give --request-rate")
        if self.arrivals == "trace" and self.burstiness != 1.0:
            raise ConfigError(
                "burstiness applies to drawn arrivals only; use --arrivals gamma with --request-rate"
            )
        if self.busiest and (self.arrivals != "trace" or self.duration_s is None):
            raise ConfigError("--busiest picks a stretch of recorded arrivals; give --duration-s, draw none")
