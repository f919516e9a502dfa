# SPDX-License-Identifier: Apache-2.0
"""Tensor names in an adapter's file, without known wrapper prefixes.

PEFT matched the config with or without wrappers, so both readings are kept.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from moe_lora.core.errors import AdapterError, cut
from moe_lora.core.wrong_files import WHOLE_EXPERTS

WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DataParallel, DistributedDataParallel or DeepSpeed",
    "_fsdp_wrapped_module": "FSDP",
    "_fpw_module": "FairScale's FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning Fabric",
}
"""Segments without a meaning, and their wrappers."""
LANGUAGE_PARTS = frozenset(("language_model", "text_model", "language_tower", "thinker", "llm"))
_PEFT_PREFIX = "base_model.model."
_KEY = re.compile(
    rf"(?P<peft>(?:{re.escape(_PEFT_PREFIX)})*)(?P<path>.+?)(?P<nested>(?:\.base_layer)*)"
    r"\.(?:lora_(?P<part>[AB])(?:\.(?P<adapter>[^.]+))?\.weight|"
    r"lora_embedding_(?P<embedding_part>[AB])(?:\.(?P<embedding_adapter>[^.]+))?)"
)
TINKER_HEAD = "unembed_tokens"
"""Tinker's name of lm_head, below `model`."""
_SHORT, _LONG = ".attn.", ".self_attn."
_WRAPPER = "|".join(map(re.escape, WRAPPERS))
_OUTERMOST = re.compile(rf"(?:(?:{_WRAPPER})\.)*base_model\.(?:(?:{_WRAPPER})\.)*model\.")
_IN_STACK = re.compile(r"(?P<front>(?:[^.]+\.)*?)(?P<stack>layers|blocks)\.(?P<rest>\d+\..+)")
_STRANGERS = (
    (
        r"lora_magnitude_vector",
        "a magnitude of DoRA, and adapter_config.json has no use_dora=true; save the adapter again with PEFT",
    ),
    (
        r"token_adapter\.",
        "trained rows, and trainable_token_indices of adapter_config.json does not name them; save the "
        "adapter again with PEFT",
    ),
    (
        r"\.lora_B(\.[^.]+)?\.bias$",
        "a bias of lora_B, and adapter_config.json has no lora_bias=true; save the adapter again with PEFT",
    ),
    (
        r"lm_head\.(?:modules_to_save\..*)?bias$",
        "biases of a saved head are not supported; train without lm_head in modules_to_save",
    ),
    (r"\.bias$", "trained biases of the base are not supported; train with bias='none'"),
    (
        r"modules_to_save",
        "a module that modules_to_save of adapter_config.json does not name; save again with PEFT",
    ),
    (
        r"lora_embedding_|embed_tokens|wte|lm_head",
        "unknown tensor of the embedding or the head; expected are lora_embedding_A and lora_embedding_B of "
        "the embedding, and lora_A.weight and lora_B.weight of lm_head; save the adapter again with PEFT",
    ),
    (
        r"flat_param",
        "a flattened parameter of FSDP; save the adapter from a full state dict (FULL_STATE_DICT)",
    ),
    (r"\.lora_[ab]$", "a name as mlx-lm writes it; convert the adapter to PEFT's format"),
    (r"lora_(?:down|up)\.", "a name as diffusers and kohya write it; convert the adapter to PEFT's format"),
    (
        r"(?:^|\.)(?:score|classifier|v_head|value_head|reward_head)\.",
        "the head of a classifier or a value model is not supported; train an adapter of a causal LM",
    ),
    (r"\.experts\.(?!.*lora_)(?:.+\.weight|\w+)$", WHOLE_EXPERTS),
    (
        r"\.base_layer\.weight$|\.(?:layers|blocks)\.\d+\.(?!.*lora_).*\.weight$",
        "a weight of the base model: the file holds a whole model; save the adapter alone with "
        "PeftModel.save_pretrained, or pick its tensors by get_peft_model_state_dict",
    ),
)
_OTHER_PARTS = re.compile(
    r"(?:^|\.)(?:visual|vision\w*|audio\w*|image\w*|mm_projector|multi_modal_projector|connector|talker)\."
)


@dataclass(frozen=True)
class TensorName:
    """A LoRA tensor's key in parts.

    path: by the served model's names.  depth: nesting of PEFT's wrapper.  part: "A" or "B".  front: prefix of
    the layers, without wrappers.  read_as: the file's path below PEFT's outermost prefix, without and with
    wrappers.  expert: of one expert beside a matrix of all (see `PlaceMap`).
    """

    path: str
    depth: int
    part: str
    adapter: str | None
    front: str
    read_as: tuple[str, ...]
    is_embedding: bool
    expert: int | None = None


@dataclass(frozen=True)
class Names:
    """The names of a file, sorted.  notes: warnings of removed prefixes."""

    by_key: dict[str, TensorName]
    notes: tuple[str, ...]
    _layer_prefix: str
    _fronts: tuple[str, ...]
    _read_as: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def with_stacked(self, known: Container[str], stacked: Container[str]) -> Names:
        """Names with Tinker's `attn` as `self_attn`, and with the partners of a shared matrix at its path.

        stacked: paths of matrices of all experts.  The config may name a partner's former path.
        """
        by_key, parts = dict(self.by_key), dict[str, set[str]]()
        for key, name in self.by_key.items():
            long = name.path.replace(_SHORT, _LONG)
            if long in known and name.path not in known:
                by_key[key] = name = replace(name, path=long)
            if name.path in stacked:
                parts.setdefault(name.path, set()).add(name.part)
        partners = {path: ({"A", "B"} - found).pop() for path, found in parts.items() if len(found) == 1}
        if not partners:
            return replace(self, by_key=by_key)
        by_key = {key: _joined(name, partners) for key, name in by_key.items()}
        read_as = {path: dict.fromkeys(paths) for path, paths in self._read_as.items()}
        for name in by_key.values():
            if name.expert is not None:
                readings = dict.fromkeys(self.readings(name.path))
                read_as.setdefault(name.path, readings).update(dict.fromkeys(name.read_as))
        return replace(self, by_key=by_key, _read_as={path: tuple(paths) for path, paths in read_as.items()})

    def readings(self, path: str) -> tuple[str, ...]:
        """The module's paths in the config."""
        if not (self._fronts or self._read_as):
            return (path,)
        own = f"{self._layer_prefix.rpartition('.')[0]}."
        fronts = self._fronts if path.startswith(own) else ()
        rest = path.removeprefix(own)
        found = (*(front + rest for front in fronts), *self._read_as.get(path, ()))
        return tuple(dict.fromkeys(found)) or (path,)


def _joined(name: TensorName, partners: Mapping[str, str]) -> TensorName:
    """A partner of one expert, moved to the shared matrix's place."""
    front, _, leaf = name.path.rpartition(".")
    container, _, number = front.rpartition(".")
    path = f"{container}.{leaf}"
    if number.isdecimal() and partners.get(path) == name.part:
        return replace(name, path=path, expert=int(number))
    return name


class OuterPaths(NamedTuple):
    """Module paths of the served family outside the layers."""

    head: str
    embedding: str


def read_names(
    keys: Iterable[str], layer_prefix: str, outer: OuterPaths, where: str, rows: Iterable[str] = ()
) -> Names:
    """The keys of a file in parts.  layer_prefix: e.g. `model.layers`.  rows: keys of replaced rows.

    Raises AdapterError for a name of no LoRA tensor, two adapters, or two prefixes.
    """
    by_key = {key: _read_name(key, layer_prefix, outer, where) for key in sorted(keys)}
    if len({name.adapter for name in by_key.values()}) > 1:
        raise _two_adapters(by_key, where)
    _check_one_front(by_key, layer_prefix, where)
    leaf = outer.embedding[outer.embedding.rfind(".") :]
    plain = (without_wrappers(key).removeprefix(_PEFT_PREFIX) for key in rows)
    fronts = {key[: key.rindex(leaf) + 1]: None for key in plain if leaf in key}
    read_as: dict[str, dict[str, None]] = {}
    for name in by_key.values():
        in_layers = name.path.startswith(f"{layer_prefix}.")
        if name.read_as == (name.path,) or not (in_layers or name.path in outer):
            continue
        read_as.setdefault(name.path, {}).update(dict.fromkeys(name.read_as))
        for one in name.read_as:
            if found := _IN_STACK.fullmatch(one):
                fronts[found["front"]] = None
            elif name.path == outer.embedding:
                fronts[one[: one.rfind(".") + 1]] = None
    readings = {path: tuple(paths) for path, paths in read_as.items()}
    notes = tuple(_notes(by_key, layer_prefix, where))
    return Names(by_key, notes, layer_prefix, tuple(fronts), readings)


def stranger(key: str) -> str | None:
    """Cause of the refusal of a tensor; None if unknown."""
    return next((way_out for pattern, way_out in _STRANGERS if re.search(pattern, key)), None)


def unplaced(path: str, layer_prefix: str, is_known: bool) -> str | None:
    """Cause of the refusal of a path outside the served model; None for another model's path."""
    if _OTHER_PARTS.search(path):
        return (
            "trained on a multimodal wrapper: the tensor belongs to a part beside the language model, and "
            "only the language model is served; train with targets in the language model alone"
        )
    if path.endswith(".conv1d"):
        return (
            "a pair on the convolution of a recurrent layer is not supported; train without conv1d in "
            "target_modules"
        )
    found = _IN_STACK.fullmatch(path)
    front = found["front"] if found else ""
    if found is None or not is_known:
        return None
    if not front:
        return (
            f"the name begins at {found['stack']}, as on a model without its head (AutoModel); if the base "
            f"is the same, name the tensors {_PEFT_PREFIX}{layer_prefix}.… and load again"
        )
    return (
        f"the prefix {cut(front)!r} before {found['stack']} is of an unknown wrapper; if the model inside is "
        f"the base, name the tensors {_PEFT_PREFIX}{layer_prefix}.… and load again"
    )


def without_wrappers(key: str) -> str:
    """The key without wrapper segments, and with one PEFT prefix at most."""
    plain = ".".join(part for part in key.split(".") if part not in WRAPPERS)
    while plain.startswith(2 * _PEFT_PREFIX):
        plain = plain.removeprefix(_PEFT_PREFIX)
    return plain


def _read_name(key: str, layer_prefix: str, outer: OuterPaths, where: str) -> TensorName:
    plain = ".".join(part for part in key.split(".") if part not in WRAPPERS)
    found = _KEY.fullmatch(plain)
    if found is None:
        raise AdapterError(
            f"{where}: {key}: "
            + (
                stranger(plain)
                or "unknown tensor; expected only keys like base_model.model.<module>.lora_A.weight and "
                ".lora_B.weight"
            )
        )
    path, front = found["path"], found["peft"]
    stack = layer_prefix.rpartition(".")[2]
    inside = _IN_STACK.fullmatch(path)
    if inside and inside["stack"] == stack and _is_known_front(inside["front"], layer_prefix):
        front += inside["front"]
        path = f"{layer_prefix}.{inside['rest']}"
    elif inside is None:
        path = outer_path(path, layer_prefix, outer)
    raw = key[: key.rindex(".lora_")]
    while raw.endswith(".base_layer"):
        raw = raw.removesuffix(".base_layer")
    outermost = _OUTERMOST.match(raw)
    has_own_name = outermost and path.rpartition(".")[2] == found["path"].rpartition(".")[2]
    read_as = found["path"] if has_own_name else path, raw[outermost.end() :] if outermost else raw
    return TensorName(
        path=path,
        depth=found["nested"].count("."),
        part=found["part"] or found["embedding_part"],
        adapter=found["adapter"] or found["embedding_adapter"],
        front=front,
        read_as=tuple(dict.fromkeys(read_as)),
        is_embedding=found["part"] is None,
    )


def outer_path(path: str, layer_prefix: str, outer: OuterPaths) -> str:
    """The served model's path of its head or embedding; other paths unchanged."""
    front, _, leaf = path.rpartition(".")
    own = layer_prefix.rpartition(".")[0]
    if leaf == TINKER_HEAD and front == own:
        return outer.head
    parts = set(front.split(".")) - {""}
    in_language = len(LANGUAGE_PARTS & parts) == 1 and parts <= {own, "model", *LANGUAGE_PARTS}
    return next((one for one in outer if in_language and leaf == one.rpartition(".")[2]), path)


def _is_known_front(front: str, layer_prefix: str) -> bool:
    own = layer_prefix.rpartition(".")[0]
    parts = front.split(".")[:-1]
    if parts and parts[-1] == own and set(parts[:-1]) <= {"model"}:
        return True
    return len(LANGUAGE_PARTS & set(parts)) == 1 and set(parts) <= {own, "model", *LANGUAGE_PARTS}


def _two_adapters(by_key: Mapping[str, TensorName], where: str) -> AdapterError:
    second, other = list({name.adapter: (key, name) for key, name in by_key.items()}.values())[-1]
    first = min(
        (key for key, name in by_key.items() if name.adapter != other.adapter),
        key=lambda key: (by_key[key].path != other.path, by_key[key].part != other.part, key),
    )
    return AdapterError(
        f"{where}: {first} and {second} are tensors of two adapters, by the names in their keys; give "
        "one adapter only, from a PEFT model by get_peft_model_state_dict(model, adapter_name=...)"
    )


def _check_one_front(by_key: Mapping[str, TensorName], layer_prefix: str, where: str) -> None:
    firsts: dict[str, str] = {}
    for key, name in by_key.items():
        if name.path.startswith(f"{layer_prefix}."):
            firsts.setdefault(name.front, key)
    if len(firsts) > 1:
        (front, first), (other, second) = list(firsts.items())[:2]
        raise AdapterError(
            f"{where}: {first} and {second} lie below two prefixes ({front!r} and {other!r}), as tensors of "
            "two models do; save the adapter of one model, or name all tensors alike"
        )


def _notes(by_key: Mapping[str, TensorName], layer_prefix: str, where: str) -> Iterable[str]:
    parts = {part for key in by_key for part in key.split(".")} & WRAPPERS.keys()
    for part in sorted(parts):
        yield (f"{where}: names of tensors carry {part}. (from {WRAPPERS[part]}); it is removed")
    fronts = {name.front for name in by_key.values() if name.path.startswith(f"{layer_prefix}.")}
    for front in fronts:
        language = LANGUAGE_PARTS & set(front.split("."))
        own = layer_prefix.rpartition(".")[0] + "."
        if language:
            yield (
                f"{where}: trained on a multimodal wrapper (names begin with {front}); the answers are right "
                "only if the served base is the language model of that wrapper"
            )
        elif front.removeprefix(_PEFT_PREFIX) != own:
            yield f"{where}: names of tensors begin with {front}; it is read as {_PEFT_PREFIX}{own}"
