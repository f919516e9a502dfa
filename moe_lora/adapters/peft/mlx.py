# SPDX-License-Identifier: Apache-2.0
"""Adapters of mlx-lm, by PEFT's config and names.

mlx-lm writes `lora_a` [I, R] and `lora_b` [R, O], y += scale · x a b; of experts [E, R, I] and [E, O, R].
Before October 2025 the `lora_a` of experts was [E·R, I], by expert.
Source: mlx-lm, tuner/utils.py, tuner/lora.py and tuner/dora.py (read at d78bf58e).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec

from moe_lora.core.errors import AdapterError, shown
from moe_lora.core.shape import ModelShape
from moe_lora.core.wrong_files import TensorEntry
from moe_lora.families import family_named

from .base import one_place
from .files import CONFIG_FILE, MLX_FILE, MLX_KEY
from .places import place_map

_OF_EXPERTS = ("switch_mlp", "switch_glu")
_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}


class _Parameters(msgspec.Struct):
    rank: Annotated[int, msgspec.Meta(ge=1)]
    scale: Annotated[float, msgspec.Meta(gt=-1e6, lt=1e6)]
    alpha: float | None = None
    keys: list[str] | None = None


@dataclass(frozen=True)
class MlxConfig:
    """fields: of adapter_config.json, called `where` in errors."""

    fields: Mapping[str, Any]
    where: str

    @cached_property
    def _parameters(self) -> _Parameters:
        try:
            return msgspec.convert(self.fields[MLX_KEY], _Parameters)
        except msgspec.ValidationError as error:
            raise AdapterError(
                f"{self.where}: {MLX_KEY} must have a rank from 1 on, a scale between -1000000 and 1000000, "
                f"and a list of names as keys, if any ({error}); save the adapter again"
            ) from error

    def as_peft(self) -> dict[str, Any]:
        """PEFT's fields without targets.  Raises AdapterError."""
        kind, parameters = self.fields.get("fine_tune_type", "lora"), self._parameters
        if kind not in ("lora", "dora"):
            raise AdapterError(
                f"{self.where}: fine_tune_type={shown(kind)} is not supported; train with 'lora' or 'dora'"
            )
        if "num_layers" not in self.fields and parameters.alpha not in (None, parameters.rank):
            raise AdapterError(
                f"{self.where}: {MLX_KEY} has an alpha, and early versions of mlx-lm multiplied the scale by "
                "alpha / rank; remove alpha, and set scale to the factor of the delta"
            )
        base = self.fields.get("model")
        return {
            "peft_type": "LORA",
            "r": parameters.rank,
            "lora_alpha": parameters.scale * parameters.rank,
            "use_dora": kind == "dora",
            "base_model_name_or_path": base if isinstance(base, str) else None,
        }

    def weights_file(self, folder: Path, called: str) -> Path:
        """Path of the folder's tensors.  Raises AdapterError if absent."""
        if not (found := folder / MLX_FILE).is_file():
            raise AdapterError(
                f"{called}{MLX_FILE}: missing; copy the file that mlx-lm wrote beside {CONFIG_FILE}"
            )
        return found

    def targets(self, modules: Iterable[str], paths: _Paths) -> frozenset[str]:
        """Paths of all trained modules: of lora_parameters.keys, else as these.  Raises AdapterError."""
        name = "num_layers" if "num_layers" in self.fields else "lora_layers"
        number, layers = self.fields.get(name), paths.num_layers
        if not isinstance(number, int) or isinstance(number, bool):
            raise AdapterError(
                f"{self.where}: {name}={shown(number)} must be the number of trained layers; set it"
            )
        trained = range(max(0, layers - number) if number > 0 else 0, layers)
        keys = self._parameters.keys
        parts = map(paths.parts, modules if keys is None else keys)
        named = dict.fromkeys(("" if keys is None else layer, module) for layer, module in parts)
        return frozenset(
            paths.named(layer, module) for only, module in named for layer in ([only] if only else trained)
        )


def as_peft(
    entries: Mapping[str, TensorEntry], config: MlxConfig, shape: ModelShape, where: str
) -> tuple[dict[str, TensorEntry], frozenset[str], frozenset[str]]:
    """The entries by PEFT's names and shapes; keys of those stored transposed; all targets.

    Raises AdapterError.
    """
    paths, found, before, transposed = _Paths(shape), dict[str, TensorEntry](), dict[str, str](), set[str]()
    parts = {key: (module, part) for key in sorted(entries) for module, _, part in [key.rpartition(".")]}
    targets = config.targets((module for module, part in parts.values() if part in _PARTS), paths)
    for key, (module, part) in parts.items():
        path = paths.named(*paths.parts(module))
        if part not in _PARTS or path not in paths.served:
            raise AdapterError(
                f"{where}: {key}: no {', '.join(_PARTS)} of a module in the {shape.family} base model's "
                "layers, nor of lm_head; serve the adapter with its base, or train without this module"
            )
        if path not in targets:
            raise AdapterError(
                f"{where}: {key}: num_layers or lora_parameters.keys of {config.where} leave it out; correct "
                "them, or save the adapter again"
            )
        named, sizes = f"base_model.model.{path}.{_PARTS[part]}", entries[key].shape
        if named in before:
            raise one_place(key, before[named], where)
        before[named] = key
        if path in paths.stacked:
            if len(sizes) == 2 and part == "lora_a" and sizes[0] % shape.num_experts == 0:
                sizes = shape.num_experts, sizes[0] // shape.num_experts, sizes[1]
        elif len(sizes) == 2:
            sizes = sizes[::-1]
            transposed.add(named)
        found[named] = replace(entries[key], shape=sizes)
    return found, frozenset(transposed), targets


class _Paths:
    """The served family's paths of mlx-lm's modules."""

    def __init__(self, shape: ModelShape) -> None:
        places = place_map(shape)
        self.num_layers, self.stacked = shape.num_layers, places.stacked
        self.served = places.by_path.keys() - {places.outer.embedding}
        self._front, self._head = f"{places.layer_prefix}.", places.outer.head
        self._older = family_named(shape.family).older_path or ("", "\0")
        self._known = {self.parts(path)[1] for path in self.served}
        of_experts = (self.parts(path)[1] for path in sorted(places.stacked))
        self._experts = {path.rpartition(".")[2]: path for path in of_experts}
        held = ((path, places[0]) for path, (_, places) in places.by_path.items())
        gates = (path for path, place in held if (place.site, place.form) == ("router", "matrix"))
        self._gate = self.parts(next(gates, ""))[1]

    def parts(self, path: str) -> tuple[str, str]:
        """(layer, module), or ("", path) outside the layers."""
        path = path.removeprefix("language_model.")
        layer, _, module = path.removeprefix(self._front).partition(".")
        return (layer, module) if path.startswith(self._front) else ("", path)

    def named(self, layer: str | int, module: str) -> str:
        """The path; experts go by their leaf."""
        new, old = self._older
        if module.startswith(old):
            module = new + module.removeprefix(old)
        front, _, leaf = module.rpartition(".")
        if module not in self._known and front.rpartition(".")[2] in _OF_EXPERTS:
            module = self._experts.get(leaf, module)
        elif module not in self._known and leaf == "gate" and self._gate:
            module = self._gate
        return module if module == self._head or layer == "" else f"{self._front}{layer}.{module}"
