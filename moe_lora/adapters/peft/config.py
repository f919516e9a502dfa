# SPDX-License-Identifier: Apache-2.0
"""adapter_config.json as PEFT writes it; refusal of all but plain LoRA.

Source: peft's LoraConfig.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from moe_lora.core.errors import AdapterError, shown

if TYPE_CHECKING:
    from .patterns import Patterns

FLAT_KEY, DETAIL_KEY = "lora_B_layout", "unsloth_fused_expert_lora"
RANK_MAJOR, GROUPED_BY_EXPERT = "rank_major", "grouped_by_expert"


@dataclass(frozen=True)
class ExpertLayout:
    """The column order of the experts' lora_B, from adapter_config.json.

    PEFT writes lora_B [O, R·E] ("rank_major", column r·E + e).  Unsloth, from 2026-02-05 to 2026.9.5, saved
    [O, E·R] ("grouped_by_expert", column e·R + r) without a mark, or rank-major with
    UNSLOTH_MOE_LORA_MERGED=1; from 2026.9.6 on PEFT's order with a mark.  Shapes are equal, so only the
    config can tell.
    Source: unsloth_zoo, temporary_patches/moe_utils.py (read at 2026.10.9).

    PEFT may move Unsloth's keys into `auto_mapping`.
    """

    fields: Mapping[str, Any]
    where: str

    def is_grouped(self, parameter: str, key: str) -> bool:
        """True if this parameter's lora_B is grouped by expert.

        Raises AdapterError for an unknown or ambiguous layout.
        """
        auto_mapping = self.fields.get("auto_mapping")
        sources = [self.fields, auto_mapping] if isinstance(auto_mapping, Mapping) else [self.fields]
        details = [source[DETAIL_KEY] for source in sources if source.get(DETAIL_KEY) is not None]
        layouts = [source[FLAT_KEY] for source in sources if source.get(FLAT_KEY) is not None]
        if details:
            layouts += self._in_details(details, parameter)
        for layout in layouts:
            if layout not in (RANK_MAJOR, GROUPED_BY_EXPERT):
                raise AdapterError(
                    f"{self.where}: {FLAT_KEY}={shown(layout)} for {parameter} is not supported; "
                    f"allowed are {RANK_MAJOR!r} (as PEFT writes it) and {GROUPED_BY_EXPERT!r}; "
                    "save the adapter again in one of them"
                )
        if RANK_MAJOR in layouts and GROUPED_BY_EXPERT in layouts:
            raise AdapterError(
                f"{self.where}: {FLAT_KEY} and {DETAIL_KEY} name two layouts for {parameter}, so it is "
                "unclear which expert a column belongs to; correct the wrong one, or save the adapter again"
            )
        if not layouts and (details or sources[-1].get("unsloth_fixed")):
            raise AdapterError(
                f"{self.where}: saved by Unsloth (auto_mapping.unsloth_fixed) without {FLAT_KEY}, and {key} "
                "is an expert tensor: versions before 2026.9.6 grouped its columns by expert, or by rank as "
                "PEFT does when trained with UNSLOTH_MOE_LORA_MERGED=1, and the shapes don't tell; read "
                "the wrong way, each expert would compute with other experts' weights.  Load and save the "
                "adapter with Unsloth 2026.9.6 or newer; or, if you know how it was trained, add "
                f'"{FLAT_KEY}": "{GROUPED_BY_EXPERT}" (their default) or "{RANK_MAJOR}" (merged) to this file'
            )
        return GROUPED_BY_EXPERT in layouts

    def is_swapped(self, key: str) -> bool:
        """True if A and B of square parameters are exchanged, as PEFT wrote them before 0.19.

        A layout stated by Unsloth is not.  Raises AdapterError if the config names no version.
        """
        version = str(self.fields.get("peft_version"))
        found = re.match(r"(\d{1,3})\.(\d{1,3})\.\d", version)
        is_old = found is not None and (int(found[1]), int(found[2])) < (0, 19)
        sources = (one for one in (self.fields, self.fields.get("auto_mapping")) if isinstance(one, Mapping))
        if any(source.get(FLAT_KEY) or source.get(DETAIL_KEY) for source in sources):
            return False
        if found is None or (is_old and "dev" in version):
            raise AdapterError(
                f"{self.where}: peft_version={shown(version)} does not tell the layout of {key}: the "
                "parameter is square, and PEFT before 0.19.0 exchanged its A and B; add "
                '"peft_version" to this file: the version that saved the adapter, as "0.18.1" or "0.19.0"'
            )
        return is_old

    def _in_details(self, details: Sequence[Any], parameter: str) -> list[Any]:
        found = []
        for detail in details:
            parameters = detail.get("parameters") if isinstance(detail, Mapping) else None
            if not isinstance(parameters, Mapping):
                raise AdapterError(
                    f"{self.where}: {DETAIL_KEY}={shown(detail)} must be an object with 'parameters', as "
                    "Unsloth writes it; remove it and state the layout with "
                    f'"{FLAT_KEY}": "{RANK_MAJOR}" or "{GROUPED_BY_EXPERT}"'
                )
            if detail.get("lora_A_layout", GROUPED_BY_EXPERT) != GROUPED_BY_EXPERT:
                raise AdapterError(
                    f"{self.where}: {DETAIL_KEY}.lora_A_layout={shown(detail['lora_A_layout'])} is not "
                    f"supported; only {GROUPED_BY_EXPERT!r} is, which PEFT and Unsloth write; save the "
                    "adapter again"
                )
            entry = parameters.get(parameter)
            if entry is not None:
                found.append(entry.get(FLAT_KEY) if isinstance(entry, Mapping) else entry)
        return found


# Without effect on a trained adapter's inference.
_WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config"),
        *("inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core"),
        *("qalora_group_size", "revision", "runtime_config", "task_type", "velora_config"),
    )
)
_READ = frozenset(
    (
        *(
            "alora_invocation_tokens",
            "alpha_pattern",
            "bias",
            "ensure_weight_tying",
            "exclude_modules",
            "init_lora_weights",
        ),
        "layers_pattern",
        *("layers_to_transform", "lora_alpha", "modules_to_save", "peft_type", "peft_version", "r"),
        "rank_pattern",
        *("target_modules", "target_parameters", "trainable_token_indices", "use_rslora"),
        *("use_dora", "lora_bias"),
        *(FLAT_KEY, DETAIL_KEY),
    )
)
# Keys of LoraConfig served at falsy defaults only.
# Source: peft 0.1 to 0.21.2, tuners/lora/config.py.
_MUST_BE_UNSET = {
    "fan_in_fan_out": "transposed base weights are not supported: no supported model family has them",
    "layer_replication": "a base with replicated layers is not supported: train on the plain base model",
    "megatron_config": "Megatron layers are not supported: convert the adapter to plain PEFT layers",
    "use_qalora": "QALoRA is not supported: train a plain LoRA",
    "use_bdlora": "block-diagonal LoRA is not supported: train a plain LoRA",
    "arrow_config": "Arrow routing is not supported: serve its experts as adapters of their own",
    "kasa_config": "KaSA is not supported: train a plain LoRA",
    "monteclora_config": "MonteCLoRA is not supported: train a plain LoRA",
    "enable_lora": "LoRA on parts of a fused layer is not supported: save the adapter with peft 0.4 or later",
    "merge_weights": "a delta merged into the base is not supported: save the adapter with peft 0.4 or later",
}
_UNSET_IF_FALSE = (
    *("alora_invocation_tokens", "modules_to_save", "trainable_token_indices"),
    *("use_dora", "lora_bias"),
)
# Other initialisations also change the base weights.
_ADDITIVE_INITS = (None, True, False, "gaussian", "eva", "mica", "orthogonal")
_SUBTRACTED_INITS = re.compile(r"pissa(?:_niter_\d+)?|olora|corda|lora_ga")
"""The base loses the initial delta, so the initial adapter converts the trained one."""
_MAX_NUMBER = 1e6
_MAX_LORA_RANK = 1_000_000
_NAME_LISTS = ("target_modules", "target_parameters", "exclude_modules")
_MODULE_KEYS = ("target_modules", "exclude_modules")
_PATTERN_KEYS = ("rank_pattern", "alpha_pattern", "layers_pattern")
# Qwen3-235B's experts have 36 096 modules.
_MOST_ITEMS = {
    **dict.fromkeys(_NAME_LISTS, (50_000, "names", "name modules by the last part of their paths")),
    **dict.fromkeys(_PATTERN_KEYS, (1000, "patterns", "join those of equal value in one regular expression")),
    "layers_to_transform": (10_000, "layers", "leave out those that the model has not"),
    "alora_invocation_tokens": (1024, "tokens", "train with a shorter invocation"),
}
_DUMMY_TARGET = "dummy-target-modules"


def refuse_unsupported(fields: dict[str, Any], where: str, subtracts: bool = False) -> None:
    """Raises AdapterError for more than plain LoRA, or an unknown key that is neither null nor false.

    subtracts: the caller subtracts PiSSA's initial adapter.
    """
    if "lora_parameters" in fields and "peft_type" not in fields:
        raise AdapterError(
            f"{where}: an adapter of mlx-lm, and PEFT's files are kept here; write them by moe-lora adapters "
            "convert SRC DST --model BASE"
        )
    if fields.get("peft_type") != "LORA":
        raise AdapterError(
            f"{where}: peft_type={shown(fields.get('peft_type'))} is not supported; only 'LORA' adapters are"
        )
    if fields.get("bias", "none") not in ("none", None):
        raise AdapterError(
            f"{where}: bias={shown(fields['bias'])} is not supported; train with bias='none' "
            "(trained base biases are no part of a LoRA delta)"
        )
    init = fields.get("init_lora_weights")
    is_subtracted = isinstance(init, str) and _SUBTRACTED_INITS.fullmatch(init) is not None
    columns = next((key for key in ("use_dora", "lora_bias") if fields.get(key)), None)
    if init not in _ADDITIVE_INITS and not (is_subtracted and subtracts and columns is None):
        way_out = "merge the adapter into its changed base, or train with init_lora_weights=true"
        if is_subtracted and columns is None:
            way_out = (
                "convert it with the adapter saved before training: moe-lora adapters convert SRC DST "
                "--model BASE --initial INITIAL"
            )
        elif is_subtracted:
            way_out = f"with {columns}=true no plain pair computes it; {way_out}"
        raise AdapterError(
            f"{where}: init_lora_weights={shown(init)} changes the base weights too; {way_out}"
        )
    for key, way_out in _MUST_BE_UNSET.items():
        if fields.get(key):
            raise AdapterError(f"{where}: {key}={shown(fields[key])}: {way_out}")
    known = _WITHOUT_EFFECT | _READ | set(_MUST_BE_UNSET)
    unknown = sorted(
        key for key, value in fields.items() if value is not None and value is not False and key not in known
    )
    if unknown:
        raise AdapterError(
            f"{where}: unknown key{'s' * (len(unknown) > 1)} {', '.join(map(shown, unknown[:10]))}: such a "
            "key may change what the adapter computes; remove it, or set it to null, if it does not"
        )


_RANKS = f"an integer from 1 to {_MAX_LORA_RANK}"
_NAMES = "a list of names or a valid regular expression"
_ALLOWED = {
    "r": _RANKS,
    "lora_alpha": "a number between -1000000 and 1000000",
    "use_rslora": "true or false",
    "use_dora": "true or false",
    "lora_bias": "true or false",
    "ensure_weight_tying": "true or false",
    "rank_pattern": f"an object of regular expressions mapped to {_RANKS}",
    "alpha_pattern": "an object of regular expressions mapped to numbers between -1000000 and 1000000",
    "target_modules": _NAMES,
    "target_parameters": "a list of names",
    "exclude_modules": _NAMES,
    "layers_to_transform": "a layer number or a list of them, and unset when target_modules is a string",
    "layers_pattern": "valid regular expressions",
    "alora_invocation_tokens": "a list of token ids",
    "base_model_name_or_path": "a string or null",
    "modules_to_save": "a list of names",
    "trainable_token_indices": "a list of token ids, or an object of names mapped to such lists",
}
_Rank = Annotated[int, msgspec.Meta(ge=1, le=_MAX_LORA_RANK)]
_Number = Annotated[float, msgspec.Meta(gt=-_MAX_NUMBER, lt=_MAX_NUMBER)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Layer = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


class AdapterConfig(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    dict=True,
    rename={"lora_rank": "r", "base_model": "base_model_name_or_path"},
):
    """The computing part of a PEFT LoRA config.  `where`: for errors."""

    lora_rank: _Rank
    lora_alpha: _Number
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    rank_pattern: dict[str, _Rank] = {}
    alpha_pattern: dict[str, _Number] = {}
    target_modules: frozenset[str] | str = frozenset()
    target_parameters: frozenset[str] = frozenset()
    exclude_modules: frozenset[str] | str = frozenset()
    layers_to_transform: frozenset[_Layer] = frozenset()
    layers_pattern: tuple[str, ...] = ()
    base_model: str = ""
    alora_invocation_tokens: tuple[_Token, ...] = ()
    ensure_weight_tying: bool = False
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[_Token, ...] | dict[str, tuple[_Token, ...]] = ()
    where: str = ""
    all_linear: bool = False
    """True for target_modules="all-linear"."""
    expert_layout: ExpertLayout = ExpertLayout({}, "")

    @classmethod
    def parse(cls, fields: Any, where: str, subtracts: bool = False) -> AdapterConfig:
        """Read the JSON object of an adapter_config.json.

        Raises AdapterError for anything but plain LoRA.
        """
        if not isinstance(fields, dict):
            raise AdapterError(f"{where}: expected a JSON object, found {type(fields).__name__}")
        refuse_unsupported(fields, where, subtracts)

        def wrong(key: str, detail: object) -> AdapterError:
            return AdapterError(f"{where}: {key}={shown(fields.get(key))} must be {_ALLOWED[key]} ({detail})")

        given = {key: value for key, value in fields.items() if value or key not in _UNSET_IF_FALSE}
        given = {key: value for key, value in given.items() if value is not None}
        _check_lengths(given, where)
        for key in ("layers_to_transform", "layers_pattern"):
            if isinstance(alone := given.get(key), (int, str)):
                given[key] = [] if alone == "" else [alone]
        try:
            read = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            key = next(key for key in _ALLOWED if re.search(rf"`(\$\.)?{key}[`\[]", str(error)))
            raise wrong(key, error) from error
        config = msgspec.structs.replace(
            read,
            where=where,
            target_modules=_without_marker(read.target_modules),
            target_parameters=_without_marker(read.target_parameters),
            exclude_modules=_without_marker(read.exclude_modules),
            all_linear=isinstance(read.target_modules, str) and read.target_modules.lower() == "all-linear",
            expert_layout=ExpertLayout(fields, where),
        )
        modules = [key for key in _MODULE_KEYS if isinstance(getattr(config, key), str)]
        expressions = {key: [getattr(config, key)] for key in modules}
        expressions |= {key: [*listed] for key in _PATTERN_KEYS if (listed := getattr(config, key))}
        if expressions:
            from .patterns import check_expressions

            if problem := check_expressions(expressions, where):
                raise wrong(problem[0], f"see {shown(problem[1])}")
        if config.layers_to_transform and isinstance(config.target_modules, str):
            raise wrong("layers_to_transform", "it is one")
        return config

    def excludes(self, path: str) -> bool:
        """True if exclude_modules or modules_to_save names this module path."""
        if has_suffix(path, frozenset(self.modules_to_save)):
            return True
        if isinstance(self.exclude_modules, str):
            return bool(self.exclude_modules) and self._patterns.matches(self.exclude_modules, path)
        return has_suffix(path, self.exclude_modules)

    def targets_module(self, path: str) -> bool:
        """True if target_modules (not all-linear) names this module path.

        layers_to_transform leaves whole paths alone.
        """
        if self.excludes(path):
            return False
        if isinstance(self.target_modules, str):
            return self._patterns.matches(self.target_modules, path)
        if not self.layers_to_transform or path in self.target_modules:
            return has_suffix(path, self.target_modules)
        return has_suffix(path, self.target_modules) and self._patterns.in_layers(path)

    def rank_and_scale(self, path: str) -> tuple[int, float]:
        """LoRA rank of a path, and alpha / rank (rsLoRA: alpha / sqrt(rank)).

        The first pattern that matches the path's end decides, else r and lora_alpha.
        """
        rank, alpha = self.lora_rank, self.lora_alpha
        if self.rank_pattern:
            rank = int(self._patterns.rank(path, rank))
        if self.alpha_pattern:
            alpha = self._patterns.alpha(path, alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @cached_property
    def _patterns(self) -> Patterns:
        from .patterns import Patterns

        return Patterns(self)


def has_suffix(path: str, names: frozenset[str]) -> bool:
    """True if a list of targets names this path."""
    return bool(names) and any(suffix in names for suffix in suffixes(path))


def suffixes(path: str) -> Iterator[str]:
    """Suffixes of this path: "a.b.c", "b.c", "c"."""
    parts = path.split(".")
    return (".".join(parts[i:]) for i in range(len(parts)))


def _check_lengths(fields: Mapping[str, Any], where: str) -> None:
    for key, (limit, what, way_out) in _MOST_ITEMS.items():
        value = fields.get(key)
        if isinstance(value, (list, tuple, dict)) and len(value) > limit:
            raise AdapterError(f"{where}: {key} has {len(value)} {what}, at most {limit} are read; {way_out}")


def _without_marker(names: frozenset[str] | str) -> Any:
    """Names, or a regular expression, without PEFT's marker of no target."""
    if isinstance(names, str):
        return frozenset() if names == _DUMMY_TARGET else names
    return names - {_DUMMY_TARGET}
