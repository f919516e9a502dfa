"""The order of columns in the lora_B of a 3-D expert parameter: PEFT's, or the one Unsloth wrote for a while.

Legend: O out_features, R LoRA rank, E experts.  PEFT writes lora_B [O, R·E] ("rank_major", column r·E + e).
Unsloth's own expert code, from 2026-02-05 to 2026.9.5, trained and saved [O, E·R] ("grouped_by_expert",
column e·R + r) and left no word of it in the file; trained with UNSLOTH_MOE_LORA_MERGED=1 it was rank-major.
From 2026.9.6 on it writes PEFT's order and says so.  Both orders have one shape, so only the config can tell.
Source: unsloth_zoo, temporary_patches/moe_utils.py (read at 2026.10.9).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_lora.core.errors import AdapterError

FLAT_KEY, DETAIL_KEY = "lora_B_layout", "unsloth_fused_expert_lora"
RANK_MAJOR, GROUPED_BY_EXPERT = "rank_major", "grouped_by_expert"


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """What an adapter_config.json says of the order of its experts' lora_B columns.

    Read when an expert tensor asks for it only: a file without such tensors may say anything.
    """

    stated: tuple[Any, ...] = ()
    details: tuple[Any, ...] = ()
    from_unsloth: bool = False
    where: str = ""

    @classmethod
    def parse(cls, fields: Mapping[str, Any], where: str) -> ExpertLayout:
        """From the JSON object; PEFT may have moved Unsloth's keys into `auto_mapping`."""
        auto_mapping = fields.get("auto_mapping")
        sources = [fields, auto_mapping] if isinstance(auto_mapping, Mapping) else [fields]
        return cls(
            stated=tuple(source[FLAT_KEY] for source in sources if source.get(FLAT_KEY) is not None),
            details=tuple(source[DETAIL_KEY] for source in sources if source.get(DETAIL_KEY) is not None),
            from_unsloth=isinstance(auto_mapping, Mapping) and bool(auto_mapping.get("unsloth_fixed")),
            where=where,
        )

    def is_grouped(self, parameter: str, key: str) -> bool:
        """True if the lora_B of this parameter (`key` in the weights) is grouped by expert.

        Raises AdapterError if the config names no layout though Unsloth wrote it, names one that is
        not known, or two.
        """
        layouts = [*self.stated, *self._in_details(parameter)]
        for layout in layouts:
            if layout not in (RANK_MAJOR, GROUPED_BY_EXPERT):
                raise AdapterError(
                    f"{self.where}: {FLAT_KEY}={layout!r} for {parameter} is not supported; "
                    f"allowed are {RANK_MAJOR!r} (as PEFT writes it) and {GROUPED_BY_EXPERT!r}; "
                    "save the adapter again in one of them"
                )
        if RANK_MAJOR in layouts and GROUPED_BY_EXPERT in layouts:
            raise AdapterError(
                f"{self.where}: {FLAT_KEY} and {DETAIL_KEY} name two layouts for {parameter}, so it is "
                "unclear which expert a column belongs to; correct the wrong one, or save the adapter again"
            )
        if not layouts and (self.from_unsloth or self.details):
            raise AdapterError(
                f"{self.where}: saved by Unsloth (auto_mapping.unsloth_fixed) without {FLAT_KEY}, and {key} "
                "is an expert tensor: versions before 2026.9.6 grouped its columns by expert, or by rank as "
                "PEFT does when trained with UNSLOTH_MOE_LORA_MERGED=1, and the shapes don't tell; read "
                "the wrong way, each expert would compute with other experts' weights.  Load and save the "
                "adapter with Unsloth 2026.9.6 or newer; or, if you know how it was trained, add "
                f'"{FLAT_KEY}": "{GROUPED_BY_EXPERT}" (their default) or "{RANK_MAJOR}" (merged) to this file'
            )
        return GROUPED_BY_EXPERT in layouts

    def _in_details(self, parameter: str) -> list[Any]:
        """Layouts that the detailed record names for this parameter."""
        found = []
        for detail in self.details:
            parameters = detail.get("parameters") if isinstance(detail, Mapping) else None
            if not isinstance(parameters, Mapping):
                raise AdapterError(
                    f"{self.where}: {DETAIL_KEY}={detail!r} must be an object with 'parameters', as Unsloth "
                    "writes it; remove it and state the layout with "
                    f'"{FLAT_KEY}": "{RANK_MAJOR}" or "{GROUPED_BY_EXPERT}"'
                )
            if detail.get("lora_A_layout", GROUPED_BY_EXPERT) != GROUPED_BY_EXPERT:
                raise AdapterError(
                    f"{self.where}: {DETAIL_KEY}.lora_A_layout={detail['lora_A_layout']!r} is not supported; "
                    f"only {GROUPED_BY_EXPERT!r} is, which PEFT and Unsloth write; save the adapter again"
                )
            entry = parameters.get(parameter)
            if entry is not None:
                found.append(entry.get(FLAT_KEY) if isinstance(entry, Mapping) else entry)
        return found
