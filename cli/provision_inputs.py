"""The options of `moe-lora provision` as `PlanInputs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from moe_lora.core.errors import ConfigError
from moe_lora.core.known_models import KnownModel, known_model
from moe_lora.core.shape import ModelShape
from moe_lora.provision.inputs import PlanInputs
from moe_lora.provision.load import TraceLoad, read_load
from moe_lora.provision.memory import AdapterMix
from moe_lora.provision.profile_file import read_profile
from moe_lora.workload.popularity import Popularity, read_counts, zipf

if TYPE_CHECKING:
    from numpy.typing import NDArray

_USUAL_ZIPF = 1.2  # InfiniLoRA section 6.1


def plan_inputs(options: dict[str, Any]) -> PlanInputs:
    """Read trace, popularity, model and profile.  Raises ValueError and click.UsageError."""
    model, shape, known = _model(options["model"])
    load = read_load(options["trace"], options["format"])
    probabilities, source = _popularity(options, load)
    instance_gpus = options["instance_gpus"] or (known.instance_gpus if known else 1)
    return PlanInputs(
        model=model,
        shape=shape,
        mix=AdapterMix(ranks=_ranks(options["lora_rank"], known), form=options["adapter_form"]),
        profile=read_profile(options["hardware"]),
        instance_gpus=instance_gpus,
        probabilities=probabilities,
        popularity_source=source,
        output_tokens=load.mean_output_tokens,
        context_tokens=load.context_tokens,
        rate_per_s=_rate(options, load),
        rate_is_traces=not options["peak"] and options["request_rate"] is options["global_batch"] is None,
        **{
            name: options[name]
            for name in (
                *("global_batch", "slo_ttft_s", "slo_tpot_s", "target_iar"),
                *("gpus", "instances", "estimator"),
            )
        },
    )


def model_dir_of(model: str) -> str | None:
    """The checkpoint's folder, absolute; None for a model given by name."""
    return str(Path(model).resolve()) if Path(model).is_dir() else None


def _model(model: str) -> tuple[str, ModelShape, KnownModel | None]:
    if not Path(model).is_dir():
        known = known_model(model)
        return known.name, known.shape, known
    path = Path(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; --model takes a checkpoint's folder") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    return model, ModelShape.from_hf_config(config), None


def _ranks(given: tuple[str, ...], known: KnownModel | None) -> tuple[tuple[int, float], ...]:
    if not given:
        if known is None:
            raise click.UsageError("give --lora-rank: only named models have a usual rank")
        return ((known.lora_rank, 1.0),)
    found = []
    for text in given:
        rank, separator, share = text.partition("=")
        try:
            found.append((int(rank), float(share) if separator else 1.0))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not R or R=SHARE", param_hint="--lora-rank") from None
    return tuple(found)


def _rate(options: dict[str, Any], load: TraceLoad) -> float | None:
    if options["request_rate"] is not None:
        if options["peak"]:
            raise click.UsageError("--peak takes the rate from the trace; give it or --request-rate")
        return options["request_rate"]
    return load.peak_rate_per_s if options["peak"] else load.rate_per_s


def _popularity(options: dict[str, Any], load: TraceLoad) -> tuple[NDArray[np.float64], str]:
    """Probabilities, and where they come from: --popularity, --adapters, else the trace."""
    num_adapters, path, s = options["num_adapters"], options["popularity"], options["zipf"]
    if path is not None and (num_adapters is not None or s is not None):
        raise click.UsageError("--popularity says it all; give it, or --adapters with --zipf")
    if path is not None:
        return _array(read_counts(path)), f"counts in {path}"
    if num_adapters is not None:
        s = _USUAL_ZIPF if s is None else s
        return _array(zipf([str(index) for index in range(num_adapters)], s)), f"Zipf {s:g}"
    if s is not None:
        raise click.UsageError("--zipf needs --adapters")
    named = load.popularity()
    if named is None:
        raise click.UsageError(
            "the trace names no adapters; give --adapters N [--zipf S], or --popularity FILE"
        )
    return _array(named), "the trace's adapters"


def _array(popularity: Popularity) -> NDArray[np.float64]:
    return np.asarray(popularity.probabilities)
