# SPDX-License-Identifier: Apache-2.0
"""The options of `moe-lora provision` as `PlanInputs`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click
import numpy as np

from moe_lora.config import EngineConfig
from moe_lora.config.engine import QUANTISATION
from moe_lora.config.plan import PlanGoals
from moe_lora.config.settings import settings_of
from moe_lora.config.weight_format import weight_format
from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape
from moe_lora.core.weight_format import refuse_widths
from moe_lora.families import shape_of
from moe_lora.provision.device_profile import read_profile, with_rates
from moe_lora.provision.plan.inputs import PlanInputs, PromptCount
from moe_lora.provision.plan.memory import AdapterMix, KnownModel, known_model
from moe_lora.workload.popularity.named import USUAL_ZIPF, parse_popularity
from moe_lora.workload.popularity.popularity import Popularity
from moe_lora.workload.statistics import TraceStatistics, trace_statistics

_HALF_TIME = 0.5
_OF_TRACE = "the trace's adapters"


def plan_inputs(options: dict[str, Any]) -> tuple[PlanInputs, TraceStatistics]:
    """Read popularity, model, profile and the trace's statistics.  Raises ValueError and click.UsageError."""
    model, shape, config, known = _model(options["model"])
    quantisation = {name: options[name] for name in QUANTISATION}
    EngineConfig(model_dir="", **quantisation)  # checks the settings
    if quantisation["quantize"].endswith("-dynamic"):
        raise ConfigError(
            f"quantize={quantisation['quantize']!r} runs on CPU only so far, and plans are for GPUs; "
            "use int8 or int4"
        )
    refuse_widths(shape, quantisation["quantize"], quantisation["quantize_group_size"])
    goals = {name: options[name] for name in settings_of(PlanGoals)}
    PlanGoals(**goals)  # checks the settings
    own = options["popularity"] is options["num_adapters"] is None
    prompts = PromptCount(options["prefix_hit_share"], by_adapter=own)
    load = trace_statistics(options["trace"], options["format"], each=prompts.add)
    popularity, source = _popularity(options, load)
    instance_gpus, assumed = options["instance_gpus"], _assumed(options["assume"])
    if instance_gpus is None:
        instance_gpus = known.instance_gpus if known else 1
    inputs = PlanInputs(
        model=model,
        shape=shape,
        mix=_mix(options, popularity, known),
        weights=weight_format(config, **quantisation),
        profile=with_rates(read_profile(options["hardware"]), assumed),
        assumed=assumed,
        prompts=prompts.load(),
        instance_gpus=instance_gpus,
        probabilities=np.asarray(popularity.probabilities),
        popularity_source=source,
        **_of_trace(options, own, load),
        output_tokens=load.output_tokens.mean,
        context_tokens=load.prompt_tokens.mean + load.output_tokens.mean,
        rate_per_s=_rate(options, load),
        **goals,
    )
    return inputs, load


def model_dir_of(model: str) -> str | None:
    """The checkpoint's absolute folder; None for a model given by name."""
    return str(Path(model).resolve()) if Path(model).is_dir() else None


def _model(model: str) -> tuple[str, ModelShape, dict[str, Any], KnownModel | None]:
    """Name, shape and config.json; the known model, or None for a folder."""
    if not Path(model).is_dir():
        known = known_model(model)
        return known.name, known.shape, {}, known
    path = Path(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; --model takes a checkpoint's folder") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    shape = shape_of(config)
    shape.check_equal_layers("moe-lora provision")
    return model, shape, config, None


def _mix(options: dict[str, Any], popularity: Popularity, known: KnownModel | None) -> AdapterMix:
    """--lora-rank, else the popularity's ranks, else the model's usual rank."""
    form, given = options["adapter_form"], options["lora_rank"]
    if given:
        return AdapterMix(ranks=_given_ranks(given), form=form)
    if popularity.lora_ranks:
        counts, requests = Counter(popularity.lora_ranks), dict.fromkeys(popularity.lora_ranks, 0.0)
        for rank, share in zip(popularity.lora_ranks, popularity.probabilities, strict=True):
            requests[rank] += share
        of_adapters = tuple((rank, count / counts.total()) for rank, count in counts.items())
        return AdapterMix(ranks=tuple(requests.items()), adapter_ranks=of_adapters, form=form)
    if known is None:
        raise click.UsageError("give --lora-rank: only named models have a usual rank")
    return AdapterMix(ranks=((known.lora_rank, 1.0),), form=form)


def _assumed(given: tuple[str, ...]) -> dict[str, float]:
    """RATE=VALUE pairs."""
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise click.BadParameter(
                f"{text!r} is not RATE=BYTES_PER_S, such as load_bytes_per_s=5e10", param_hint="--assume"
            ) from None
    return found


def _given_ranks(given: tuple[str, ...]) -> tuple[tuple[int, float], ...]:
    """R or R=SHARE, of requests and adapters alike."""
    found = []
    for text in given:
        rank, separator, share = text.partition("=")
        try:
            found.append((int(rank), float(share) if separator else 1.0))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not R or R=SHARE", param_hint="--lora-rank") from None
    return tuple(found)


def _of_trace(options: dict[str, Any], named: bool, load: TraceStatistics) -> dict[str, Any]:
    """The trace's part of the plan: its rate, its adapters (named)."""
    own_rate = options["request_rate"] is options["global_batch"] is None
    share = sum(load.adapter_counts.values()) / load.num_requests
    return {
        "trace_rate_per_s": load.mean_rate_per_s if own_rate else None,
        "adapters_are_traces": named,
        "adapter_share": share if named else 1.0,
    }


def _rate(options: dict[str, Any], load: TraceStatistics) -> float | None:
    """None beside --global-batch, which is the load."""
    if options["global_batch"] is not None:
        if options["peak"] or options["request_rate"] is not None:
            raise click.UsageError("--global-batch is the load; leave --request-rate and --peak out")
        return None
    if options["request_rate"] is not None:
        if options["peak"]:
            raise click.UsageError("--peak takes the rate from the trace; give it or --request-rate")
        return options["request_rate"]
    return load.peak_rate_per_s if options["peak"] else load.mean_rate_per_s


def _popularity(options: dict[str, Any], load: TraceStatistics) -> tuple[Popularity, str]:
    """The popularity and its source: --popularity, --zipf or the trace.

    A changing popularity counts at half time, when it covers most adapters.
    """
    num_adapters, shape, s = options["num_adapters"], options["popularity"], options["zipf"]
    if shape is not None and s is not None:
        raise click.UsageError("--popularity and --zipf exclude each other; give one of them")
    if shape is None and num_adapters is not None:
        shape = f"zipf:{USUAL_ZIPF if s is None else s}"
    if shape is not None:
        names = tuple(str(index) for index in range(num_adapters or 0))
        return parse_popularity(shape, names).at(_HALF_TIME), shape
    if s is not None:
        raise click.UsageError("--zipf needs --adapters")
    named = load.popularity()
    if named is None:
        raise click.UsageError(
            "the trace names no adapters; give --adapters N [--zipf S], or --popularity NAME|FILE"
        )
    return named, _OF_TRACE
