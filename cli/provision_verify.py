"""How `moe-lora provision --verify` shows its replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_lora.provision.replayed import Verified

_SPEEDS = {"slo": "steps as slow as the TPOT SLO", "predicted": "steps as predicted"}
_ARRIVALS = {"trace": "the trace's own arrivals", "poisson": "Poisson arrivals of the plan's rate"}
_COLUMNS = ("adapters", "at once", "waited for a slot", "waited for KV or batch", "P95 TTFT", "TPOT")


def verified_json(found: Sequence[Verified]) -> list[dict[str, Any]]:
    return [{"speed": one.speed, "arrivals": one.arrivals, **asdict(one.replay)} for one in found]


def verified_lines(found: Sequence[Verified]) -> list[str]:
    """A table for each kind of arrivals and speed, a line a capacity."""
    lines = []
    for (arrivals, speed), group in groupby(found, lambda one: (one.arrivals, one.speed)):
        replays = [one.replay for one in group]
        heading = f"Simulated, {_ARRIVALS[arrivals]}, {_SPEEDS[speed]} ({replays[0].num_requests} requests):"
        lines += ["", heading, _row(_COLUMNS)]
        lines += [
            _row(
                (
                    str(replay.capacity),
                    _shown(replay.admitted_at_once, ".2%"),
                    _shown(replay.waited_for_adapter, ".2%"),
                    _shown(replay.waited_for_room, ".2%"),
                    _shown(replay.p95_ttft_s, ".3f") + " s",
                    _shown(replay.mean_tpot_s, ".4f") + " s",
                )
            )
            for replay in replays
        ]
    return lines


def _row(cells: Sequence[str]) -> str:
    widths = (max(10, len(name)) for name in _COLUMNS)
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
