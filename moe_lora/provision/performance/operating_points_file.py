"""Operating points in a JSON file: {rank: tokens/s}, and how they were found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_lora.core.errors import ConfigError

from .operating_points import OperatingPoint, PointLoad, SloGoal
from moe_lora.provision.profile_fields import file_fields

FORMAT = "moe-lora operating points"
KINDS = ("measured", "simulated")


def points_content(
    points: Sequence[OperatingPoint],
    *,
    kind: str,
    slo: SloGoal,
    load: PointLoad,
    settings: Mapping[str, Any],
    env: Mapping[str, Any],
) -> dict[str, Any]:
    """The file's fields.  kind: "measured" on an engine, or "simulated".  Tokens: of prompts and answers."""
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r} is unknown; choose one of {', '.join(KINDS)}")
    return {
        "format": FORMAT,
        "kind": kind,
        "operating_points": {str(point.lora_rank): point.tokens_per_s for point in points},
        "slo": asdict(slo),
        "load": asdict(load),
        "searches": [asdict(point) for point in points],
        "settings": dict(settings),
        "env": dict(env),
    }


def read_operating_points(path: str | Path) -> dict[int, float]:
    """{rank: tokens/s} of a file of `moe-lora operating-points`, as `placement.place_adapters` takes it.

    A file with nothing but {"rank": tokens/s} is taken too.  Raises ConfigError naming the file and what is
    wrong with it.
    """
    with file_fields(path, "moe-lora operating-points MODEL_DIR --out FILE") as top:
        if top.has("format") and top.text("format") != FORMAT:
            raise ConfigError(f"format is not {FORMAT!r}; give a file of `moe-lora operating-points`")
        section = top.section("operating_points") if top.has("format") else top
        points = {_rank(key): section.number(key) for key, _ in section.items()}
        if not points:
            raise ConfigError("it has no rank; it needs tokens/s of one or more")
    return dict(sorted(points.items()))


def _rank(key: str) -> int:
    if not key.isdecimal() or int(key) < 1:
        raise ConfigError(f"{key!r} is no rank; ranks are whole numbers >= 1")
    return int(key)
