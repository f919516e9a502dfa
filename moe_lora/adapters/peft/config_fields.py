"""Typed reading of adapter_config.json, and the refusal of what is not plain LoRA.

A key that is not known here is an error, because it could change what the adapter computes, unless its value
is null: then it asks for nothing.
"""

from __future__ import annotations

import re
from typing import Any

from moe_lora.core.errors import AdapterError
from .expert_layout import DETAIL_KEY, FLAT_KEY

# Keys that never change what a trained adapter computes at inference.
_WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
        *("inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core"),
        *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type", "velora_config"),
    )
)
_READ = frozenset(
    (
        *("alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern"),
        *("layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules"),
        *("target_parameters", "use_rslora", FLAT_KEY, DETAIL_KEY),
    )
)
# Keys of LoraConfig that are served at their defaults only (falsy: null, false, empty), and the way out.
# Source: peft 0.1 to 0.21.2, tuners/lora/config.py.
_MUST_BE_UNSET = {
    "use_dora": "DoRA is not supported: merge the adapter into a base model, or train with use_dora=false",
    "modules_to_save": "an adapter that replaces whole base modules is not supported: train without it",
    "fan_in_fan_out": "transposed base weights are not supported: no supported model family has them",
    "lora_bias": "biases in LoRA layers are not supported: train with lora_bias=false",
    "layer_replication": "a base with replicated layers is not supported: train on the plain base model",
    "megatron_config": "Megatron layers are not supported: convert the adapter to plain PEFT layers",
    "trainable_token_indices": "trained token embeddings are not supported: train without them",
    "alora_invocation_tokens": "activated LoRA is not supported: train a plain LoRA",
    "use_qalora": "QALoRA is not supported: train a plain LoRA",
    "use_bdlora": "block-diagonal LoRA is not supported: train a plain LoRA",
    "arrow_config": "Arrow routing is not supported: serve its experts as adapters of their own",
    "kasa_config": "KaSA is not supported: train a plain LoRA",
    "monteclora_config": "MonteCLoRA is not supported: train a plain LoRA",
    "enable_lora": "LoRA on parts of a fused layer is not supported: save the adapter with peft 0.4 or later",
    "merge_weights": "a delta merged into the base is not supported: save the adapter with peft 0.4 or later",
}
# Other initialisations also change the base weights, so the delta alone is not the adapter.
_ADDITIVE_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
_MAX_NUMBER = 1e30
_MAX_LORA_RANK = 1_000_000
_MAX_PATTERNS = 1000
_MAX_SHOWN_CHARS = 100
_DUMMY_TARGET = "dummy-target-modules"


def refuse_unsupported(fields: dict[str, Any], where: str) -> None:
    """Raise AdapterError if the config asks for more than plain LoRA or has a key that is not known."""
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
    if init not in _ADDITIVE_INITS:
        raise AdapterError(
            f"{where}: init_lora_weights={shown(init)} changes the base weights too; save the adapter with "
            "path_initial_model_for_weight_conversion, which turns it into a plain LoRA"
        )
    for key, way_out in _MUST_BE_UNSET.items():
        if fields.get(key):
            raise AdapterError(f"{where}: {key}={shown(fields[key])}: {way_out}")
    known = _WITHOUT_EFFECT | _READ | set(_MUST_BE_UNSET)
    unknown = sorted(key for key, value in fields.items() if value is not None and key not in known)
    if unknown:
        raise AdapterError(
            f"{where}: unknown key{'s' * (len(unknown) > 1)} {', '.join(map(shown, unknown[:10]))}: such a "
            "key may change what the adapter computes; remove it, or set it to null, if it does not"
        )


def shown(value: Any) -> str:
    """repr for an error's text, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__} of too many digits"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"


class FieldReader:
    """Typed access to the JSON object; every refusal names the file and the key."""

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        self.fields, self.where = fields, where

    def fail(self, key: str, allowed: str) -> AdapterError:
        return AdapterError(f"{self.where}: {key}={shown(self.fields.get(key))} must be {allowed}")

    def positive_int(self, key: str) -> int:
        value: Any = self.fields.get(key)
        if not _is_rank(value):
            raise self.fail(key, _RANKS)
        return int(value)

    def number(self, key: str) -> float:
        value: Any = self.fields.get(key)
        if not _is_finite(value):
            raise self.fail(key, "a finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.fields.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return bool(value)

    def text(self, key: str) -> str | None:
        value = self.fields.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, "a string or null")
        return value or None

    def pattern(self, key: str, integers: bool) -> dict[str, Any]:
        value = self.fields.get(key) or {}
        if not isinstance(value, dict):
            raise self.fail(key, "an object of pattern: number")
        if len(value) > _MAX_PATTERNS:
            raise AdapterError(
                f"{self.where}: {key} has {len(value)} patterns, at most {_MAX_PATTERNS} are read; "
                "join those of equal value in one regular expression"
            )
        for regex, number in value.items():
            if not (_is_rank if integers else _is_finite)(number) or not _compiles(regex):
                wanted = _RANKS if integers else "a finite number"
                raise self.fail(
                    key, f"regular expressions mapped to {wanted} (see {shown(regex)}: {shown(number)})"
                )
        return value

    def names(self, key: str, regex: bool = False) -> Any:
        value = self.fields.get(key)
        if regex and isinstance(value, str):
            if not _compiles(value):
                raise self.fail(key, "a valid regular expression or a list of names")
            return () if value == _DUMMY_TARGET else value
        is_list = isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(v, str) for v in value)
        if value is not None and not is_list:
            raise self.fail(key, "a list of names" + (" or a regular expression" if regex else ""))
        return tuple(sorted(name for name in value or () if name != _DUMMY_TARGET))

    def one_or_more(self, key: str) -> tuple[str, ...]:
        value = self.fields.get(key)
        names = tuple([value] if isinstance(value, str) and value else self.names(key) if value else ())
        if not all(_compiles(name) for name in names):
            raise self.fail(key, "valid regular expressions")
        return names

    def layers(self) -> tuple[int, ...]:
        value = self.fields.get("layers_to_transform")
        layers = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
            raise self.fail("layers_to_transform", "a layer number or a list of them")
        if layers and isinstance(self.fields.get("target_modules"), str):
            raise self.fail("layers_to_transform", "unset when target_modules is a string")
        return tuple(layers)


_RANKS = f"an integer from 1 to {_MAX_LORA_RANK}"


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_LORA_RANK


def _is_finite(value: Any) -> bool:
    """A number that float32 can hold (the kernels' scale is float32)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER


def _compiles(pattern: str) -> bool:
    """True if this is a regular expression, alone and as the end of a path (see rank_pattern)."""
    try:
        re.compile(pattern)
        re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError):
        return False
    return True
