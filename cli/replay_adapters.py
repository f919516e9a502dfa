# SPDX-License-Identifier: Apache-2.0
"""Which adapters `moe-lora replay` asks for, from its options and what the server lists."""

from __future__ import annotations

from typing import Any

from moe_lora.report.load_client import ServedModels
from moe_lora.workload.popularity.functions import map_adapters, read_invocations, with_invocations
from moe_lora.workload.popularity.named import parse_popularity
from moe_lora.workload.popularity.popularity import Popularity, read_counts
from moe_lora.workload.traces.records import Trace

_MOST_NAMES_SHOWN = 20


def adapter_popularity(options: dict[str, Any], served: ServedModels) -> Popularity | None:
    """From --lora-modules, --num-adapters, --adapter-counts and --popularity; None without any of them."""
    _exclusive(options, "lora_modules", "num_adapters", "adapter_counts")
    _exclusive(options, "zipf", "adapter_counts", "popularity", "functions")
    if options["adapter_counts"]:
        return read_counts(options["adapter_counts"])
    text = popularity_text(options)
    return None if text is None else parse_popularity(text, _named(options, served))


def popularity_text(options: dict[str, Any]) -> str | None:
    """--popularity, or what --zipf says in its words; None where neither applies."""
    if options["functions"] or options["adapter_counts"]:
        return None
    if options["popularity"] or not (options["lora_modules"] or options["num_adapters"] is not None):
        return options["popularity"]
    return "zipf" if options["zipf"] is None else f"zipf:{options['zipf']}"


def with_identities(options: dict[str, Any], trace: Trace, served: ServedModels) -> Trace:
    """The trace with arrivals and adapters of --functions, or its own names mapped; else as it is."""
    if options["functions"] is None and options["skewness"] is None:
        return trace
    names, skewness = _named(options, served), 1 if options["skewness"] is None else options["skewness"]
    if not names:
        raise ValueError("no adapter to map to; give --lora-modules or --num-adapters")
    if options["functions"] is None:
        return map_adapters(trace, names, skewness)
    invocations = read_invocations(
        options["functions"],
        names,
        skewness,
        request_rate_per_s=None if options["arrivals"] == "gamma" else options["request_rate"],
        duration_s=None if options["busiest"] else options["duration_s"],
        seed=options["seed"],
    )
    return with_invocations(trace, invocations)


def check_served(adapters: set[str | None], served: ServedModels, url: str) -> None:
    """Raises ValueError if an adapter is not among the server's models."""
    known = (*served.adapters, *served.base)
    missing = sorted(name for name in adapters if name is not None and name not in known)
    if missing:
        raise ValueError(f"{url} does not serve {_some(missing)}; it serves {_some(known) or 'nothing'}")


def _exclusive(options: dict[str, Any], *names: str) -> None:
    given = [name for name in names if options[name] not in (None, ())]
    if len(given) > 1:
        said = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{said} exclude each other; give one of them")


def _named(options: dict[str, Any], served: ServedModels) -> tuple[str, ...]:
    """--lora-modules, or the first --num-adapters that the server lists; none without either."""
    wanted = options["num_adapters"]
    if wanted is None:
        return tuple(options["lora_modules"])
    if not 1 <= wanted <= len(served.adapters):
        raise ValueError(
            f"--num-adapters {wanted}: the server lists {len(served.adapters)} adapters; "
            f"choose 1 to {len(served.adapters)}, or load more into the server"
        )
    return tuple(served.adapters[:wanted])


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = len(names) - _MOST_NAMES_SHOWN
    return ", ".join(names[:_MOST_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
