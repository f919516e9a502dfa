"""How `moe-lora provision --verify` shows its replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_lora.provision.replayed import Verified

_SPEEDS = {"slo": "steps as slow as the TPOT SLO", "predicted": "steps as predicted"}


def verified_json(found: Sequence[Verified]) -> list[dict[str, Any]]:
    return [{"speed": one.speed, **asdict(one.replay)} for one in found]


def verified_lines(found: Sequence[Verified]) -> list[str]:
    """A heading a speed, a line a capacity."""
    lines = []
    for speed, heading in _SPEEDS.items():
        replays = [one.replay for one in found if one.speed == speed]
        lines += ["", f"Simulated, {heading} ({replays[0].num_requests} requests):"]
        lines += [
            f"  {replay.capacity:>6} adapters: {_shown(replay.admitted_at_once, '.2%')} start at once, "
            f"P95 TTFT {_shown(replay.p95_ttft_s, '.3f')} s, TPOT {_shown(replay.mean_tpot_s, '.4f')} s"
            for replay in replays
        ]
    return lines


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
