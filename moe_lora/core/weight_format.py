# SPDX-License-Identifier: Apache-2.0
"""Formats of linear layers' weights, for plans."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError
from .shape import NEVER_QUANTISED, ModelShape

DEFAULT_GROUP_SIZE = 64
"""Inputs of an int4 weight that share a scale."""


@dataclass(frozen=True)
class WeightFormat:
    """name: "none" (the model's dtype), "int8", "int4-64", "fp8-128" and so on; "+head" with the head.

    attention_bits, expert_bits: per weight, with scales; None: the model's dtype.
    """

    name: str = "none"
    attention_bits: float | None = None
    expert_bits: float | None = None

    @property
    def head(self) -> bool:
        """True if the format covers the vocabulary head."""
        return self.name.endswith("+head")


UNQUANTISED = WeightFormat()


def refuse_widths(shape: ModelShape, quantize: str, quantize_group_size: int | None) -> None:
    """Raises ConfigError if int4 groups don't divide an input width."""
    if not quantize.startswith("int4"):
        return
    for site in shape.sites:
        refusal = group_refusal(site.in_features, quantize_group_size or DEFAULT_GROUP_SIZE)
        if refusal and site.name not in NEVER_QUANTISED:
            raise ConfigError(
                f"quantize={quantize!r} can't hold {site.name}: {refusal}; choose a quantize_group_size that "
                "divides it, or int8"
            )


def group_refusal(width: int, group_size: int) -> str | None:
    """Error text for an indivisible input width; else None."""
    return (
        f"its {width} inputs are no multiple of the group size {group_size}" if width % group_size else None
    )
