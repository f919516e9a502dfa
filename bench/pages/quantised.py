# SPDX-License-Identifier: Apache-2.0
"""Quantised bases on a CPU, whole steps and layers alone: docs/results/quantised.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .evidence import records
from .markdown import table

_ISAS = ("amx_bf16", "avx512_bf16", "avx2")


def with_amx() -> str:
    """Tokens/s of bf16 and each format's share over it, Llama / Mixtral, by requests (+ adapters)."""
    found: dict[tuple[str, str, str], tuple[float, float]] = {}
    for one in records("quantised_amx.jsonl"):
        config, result = one["config"], one["result"]
        if config["bench"] == "quantised":
            requests, adapters = config["num_requests"], config["num_adapters"]
            cell = f"{requests} + {adapters}" if adapters else str(requests)
            speed = result["tokens_per_s"], result["over_bf16"]["median"]
            found[config["quantize"], cell, config["model"]] = speed
    cells = list(dict.fromkeys(cell for _, cell, _ in found))
    rows = [("bf16, tokens/s", *(_pair(found, "none", cell, 0, ".0f") for cell in cells))]
    formats = dict.fromkeys(form for form, _, _ in found if form != "none")
    rows += [(f"`{form}`", *(_pair(found, form, cell, 1, ".2f") for cell in cells)) for form in formats]
    return table(("requests", *cells), rows)


def by_isa() -> str:
    """Layers over bf16 by rows, with AMX / AVX-512 and dots of bf16 / AVX2: the lower of both layers."""
    found: dict[tuple[str, str, str], float] = {}
    for one in records("quantised_isa.jsonl"):
        config, over = one["config"], one["result"]["over_bf16"]["median"]
        cell = config["format"], str(config["rows"]), config["isa"]
        found[cell] = min(found.get(cell, over), over)
    cells = list(dict.fromkeys(rows for _, rows, _ in found))
    formats = dict.fromkeys(form for form, _, _ in found if form != "bf16")
    pairs = {
        (form, rows): " / ".join(f"{found[form, rows, isa]:.2f}" for isa in _ISAS)
        for form in formats
        for rows in cells
    }
    rows = [(f"`{form}`", *(pairs[form, cell] for cell in cells)) for form in formats]
    return table(("rows", *cells), rows)


def _pair(
    found: dict[tuple[str, str, str], tuple[float, float]], form: str, cell: str, which: int, shown: str
) -> str:
    return " / ".join(f"{found[form, cell, model][which]:{shown}}" for model in ("llama", "mixtral"))


def quality() -> str:
    """Perplexity by format of the weights: the demo model with its answers, and a byte model."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for one in records("quantised_perplexity.jsonl"):
        config = one["config"]
        found.setdefault(config["weights"], {})[config["model"]] = one["result"]
    rows = []
    for weights, models in found.items():
        demo, of_bytes = models["demo"], models["bytes"]
        cells = [f"{one[key]:.4f}" for one in (demo, of_bytes) for key in ("perplexity", "over_unquantised")]
        cells.insert(2, f"{demo['exact_answers']:.1%}")
        rows.append((f"`{weights}`", *cells))
    head = ("weights", "demo: perplexity", "over unquantised", "answers exact", "bytes: perplexity")
    return table((*head, "over unquantised"), rows)


def beside_openvino() -> str:
    """Tokens/s, and over OpenVINO's base of as many bits, median (extremes): a row a format."""

    def shown(result: Any) -> str:
        over = result["over_openvino"]
        spread = f"{over['median']:.2f} ({over['min']:.2f} to {over['max']:.2f})"
        return f"{result['tokens_per_s']:.0f}; {spread}"

    return _by_format("tokens/s; over OpenVINO", shown)


def beside_openvino_in_short() -> str:
    """Speed over OpenVINO's base of as many bits, medians: a row a format."""
    return _by_format("tokens/s over OpenVINO's", lambda result: f"{result['over_openvino']['median']:.2f}")


def _by_format(title: str, shown: Callable[[Any], str]) -> str:
    """By requests, with adapters in brackets."""
    found: dict[str, dict[str, str]] = {}
    for one in records("quantised_openvino.jsonl"):
        config = one["config"]
        requests, adapters = config["num_requests"], config["num_adapters"]
        cell = f"{requests} ({adapters} adapters)" if adapters else str(requests)
        found.setdefault(config["quantize"], {})[cell] = shown(one["result"])
    cells = list(next(iter(found.values())))
    rows = [(f"`{form}`", *(by_cell[cell] for cell in cells)) for form, by_cell in found.items()]
    return table((f"{title}, requests", *cells), rows)
