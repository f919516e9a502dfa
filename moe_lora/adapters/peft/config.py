"""adapter_config.json as PEFT writes it: which modules are targeted, with which rank and scale.

Source: the semantics of peft's LoraConfig (suffix match of target names, patterns at the path's end).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moe_lora.core.errors import AdapterError
from .config_fields import FieldReader, refuse_unsupported
from .expert_layout import ExpertLayout


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The part of a PEFT LoRA config that decides what is computed. `where` is named in errors."""

    where: str
    lora_rank: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: tuple[str, ...] | str = ()
    target_parameters: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    base_model: str | None = None
    expert_layout: ExpertLayout = field(default_factory=ExpertLayout)

    @classmethod
    def parse(cls, fields: Any, where: str) -> AdapterConfig:
        """Read the JSON object of an adapter_config.json.

        Raises AdapterError naming `where` and the key for anything that is not plain LoRA, not known,
        or of the wrong type.
        """
        if not isinstance(fields, dict):
            raise AdapterError(f"{where}: expected a JSON object, found {type(fields).__name__}")
        refuse_unsupported(fields, where)
        reader = FieldReader(fields, where)
        return cls(
            where=where,
            lora_rank=reader.positive_int("r"),
            lora_alpha=reader.number("lora_alpha"),
            use_rslora=reader.flag("use_rslora"),
            rank_pattern=reader.pattern("rank_pattern", integers=True),
            alpha_pattern=reader.pattern("alpha_pattern", integers=False),
            target_modules=reader.names("target_modules", regex=True),
            target_parameters=tuple(reader.names("target_parameters")),
            exclude_modules=reader.names("exclude_modules", regex=True),
            layers_to_transform=reader.layers(),
            layers_pattern=reader.one_or_more("layers_pattern"),
            base_model=reader.text("base_model_name_or_path"),
            expert_layout=ExpertLayout.parse(fields, where),
        )

    @property
    def all_linear(self) -> bool:
        """True for target_modules="all-linear"."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear"

    def excludes(self, path: str) -> bool:
        """True if exclude_modules names this module path."""
        if isinstance(self.exclude_modules, str):
            return bool(self.exclude_modules) and re.fullmatch(self.exclude_modules, path) is not None
        return _has_suffix(path, frozenset(self.exclude_modules))

    def targets_module(self, path: str) -> bool:
        """True if target_modules (list or regex, not all-linear) names this module path."""
        if self.excludes(path):
            return False
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, path) is not None
        return _has_suffix(path, self._module_names) and self._in_layers(path)

    def targets_parameter(self, path: str) -> bool:
        """True if target_parameters names this parameter path."""
        return _has_suffix(path, self._parameter_names)

    def rank_of(self, path: str) -> int:
        """LoRA rank of a module or parameter path: the first rank_pattern at its end, else r."""
        return int(_first_match(self._ranks, path, self.lora_rank))

    def scale_of(self, path: str) -> float:
        """alpha / rank (rsLoRA: alpha / sqrt(rank)) of a module or parameter path."""
        rank = self.rank_of(path)
        alpha = _first_match(self._alphas, path, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @cached_property
    def _module_names(self) -> frozenset[str]:
        return frozenset(self.target_modules)

    @cached_property
    def _parameter_names(self) -> frozenset[str]:
        return frozenset(self.target_parameters)

    @cached_property
    def _ranks(self) -> list[tuple[str, re.Pattern[str], float]]:
        return _compiled(self.rank_pattern)

    @cached_property
    def _alphas(self) -> list[tuple[str, re.Pattern[str], float]]:
        return _compiled(self.alpha_pattern)

    def _in_layers(self, path: str) -> bool:
        if not self.layers_to_transform:
            return True
        for pattern in self.layers_pattern or (r"[^.]*",):
            found = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", path)
            if found:
                return int(found.group(1)) in self.layers_to_transform
        return False


def dot_suffixes(path: str) -> list[str]:
    """ "a.b.c" → ["a.b.c", "b.c", "c"]: the names under which a list may target this path."""
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def _has_suffix(path: str, names: frozenset[str]) -> bool:
    return bool(names) and any(suffix in names for suffix in dot_suffixes(path))


def _compiled(patterns: Mapping[str, float]) -> list[tuple[str, re.Pattern[str], float]]:
    """(what a path that matches ends with, the expression, the value), compiled once for all paths."""
    return [
        (
            pattern.rpartition(".")[2] if re.fullmatch(r"[\w.]+", pattern) else "",
            re.compile(rf"(.*\.)?({pattern})$"),
            value,
        )
        for pattern, value in patterns.items()
    ]


def _first_match(patterns: list[tuple[str, re.Pattern[str], float]], path: str, default: float) -> float:
    return next(
        (value for end, pattern, value in patterns if path.endswith(end) and pattern.match(path)), default
    )
