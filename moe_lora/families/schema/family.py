# SPDX-License-Identifier: Apache-2.0
"""A model family as data: sizes, layers, names of weights and of LoRA pairs.

Legend: E experts, F inner size of an expert or a dense MLP, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape

from .config_json import TEXT_SECTIONS, ConfigJson, text_config
from .rope import RopeSpec, context_of, rope_spec

Form = Literal["matrix", "fused", "rows", "mxfp4", "stacked", "heads"]
NAME_ORDERS = (("model.language_model.", ""), ("language_model.model.", "language_model."))
"""Of multimodal checkpoints: in place of `model.` and before the head's name."""
THINKER = ("thinker.model.", "thinker.")
"""The same of Qwen3-Omni."""
_BESIDE_TEXT = (
    *("visual", "vision_tower", "audio_tower", "embed_vision", "embed_audio"),
    *("multi_modal_projector", "mm_projector"),
)
LARGEST = {"num_layers": 10_000, "head_dim": 65_536}
"""Limits, since lists have these lengths."""
BESIDE_TEXT = (
    *("talker.", "code2wav."),
    *(f"{front}{part}." for front in ("", "model.", "thinker.") for part in _BESIDE_TEXT),
)
"""Beginnings of tensors of images and sound."""
_PARTS = frozenset((*TEXT_SECTIONS, "vision_config"))
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model's architecture; sizes are in `shape`.

    qk_norm: RMS norms of each head of q and k.  full_qk_norm: of all heads of q, and of k, together.
    attention_bias: of q, k, v and o.  qkv_bias: of q, k and v.  clip_qkv: q, k and v are clamped to +- this
    value.  rotates_neighbours: rotation turns pairs of neighbours, not of halves.  window: per layer in
    tokens; 0: full.  unrotated: layers without rotary embedding.  rope_by_window: frequencies of window
    layers, then of full layers.  input_norms: before attention and MLP.  output_norms: of attention and MLP,
    before the residual add.

    gate: "softmax_topk" takes the top k of the softmax over all experts, "topk_softmax" the softmax over the
    top k logits, "sigmoid_topk" the top k of the sigmoids.  gate_norm: p of the p-norm dividing the chosen
    weights; None: not normalised.  gate_correction: a stored fp32 bias changes the choice, not the weights.
    gate_in_fp32: the gate's weight and logits.  gate_groups: equal groups of experts; the choice is among the
    top_groups with the largest sums of group_scores scores.

    dense_beside: shared and routed experts, and the gate, have their own norms; experts and layers have
    scales.

    activation: "silu" is silu(gate) * up, "gelu_tanh" gelu(gate) * up, "swigluoai" a clamped form.  unused:
    starts of names of checkpoint tensors outside the layers.  attention_multiplier: factor on q @ k; None:
    head_dim ** -0.5.  rounds_multiplier: embedding_multiplier is rounded to the model's dtype.  logits_cap: c
    of c * tanh(logits / c).  norm_offset: RMS norms multiply by 1 + the stored weight, in fp32.
    """

    shape: ModelShape
    rope: RopeSpec
    norm_eps: float
    window: tuple[int, ...]
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_offset: bool = False
    qk_norm: bool = False
    full_qk_norm: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    sinks: bool = False
    clip_qkv: float | None = None
    rotates_neighbours: bool = False
    unrotated: tuple[int, ...] = ()
    rope_by_window: bool = False
    input_norms: bool = True
    output_norms: bool = False
    gate: Literal["softmax_topk", "topk_softmax", "sigmoid_topk", "sparsemixer"] = "softmax_topk"
    gate_jitter: float = 0.0
    gate_norm: float | None = 1.0
    gate_correction: bool = False
    gate_in_fp32: bool = False
    gate_groups: int = 1
    top_groups: int = 1
    group_scores: int = 2
    routed_scale: float = 1.0
    dense_beside: bool = False
    gate_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gelu_tanh", "swigluoai"] = "silu"
    activation_limit: float = 7.0
    tie_word_embeddings: bool = False
    unused: tuple[str, ...] = ()
    head_bias: bool = False
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """A weight of a layer in a checkpoint, or a LoRA pair in an adapter.

    path: the module below the layer; {} is an expert's number.  modules: numbers of the site's modules.
    expert: None: dense, or all at once.  form: "matrix", a linear layer [out, in].  "fused", a parameter [E,
    out, in].  "rows", a parameter [E * F, H], down transposed.  "mxfp4", blocks and scales of a fused
    parameter.  "stacked", LoRA tensors [E or 1, ...] of linear layers.  "heads", kv_b_proj of latent
    attention: two sites with a copy for each head.  interleaved: gate and up alternate.  transposed: [E, in,
    out]; None: by shape.  optional_linear: a linear layer in older transformers only.  is_split: True in an
    adapter's second form (Unsloth's linear experts, older names), False in the first, None in both.
    """

    path: str
    site: str
    modules: tuple[int, ...] = (0,)
    parameter: str = "weight"
    form: Form = "matrix"
    expert: int | None = None
    interleaved: bool = False
    transposed: bool | None = False
    optional_linear: bool = False
    is_split: bool | None = None

    @property
    def key(self) -> str:
        """The tensor's name below the layer."""
        return f"{self.path}.{self.parameter}{'_blocks' if self.form == 'mxfp4' else ''}"

    @property
    def bias_key(self) -> str:
        """The bias' name below the layer."""
        return f"{self.path}.bias" if self.form == "matrix" else f"{self.path}.{self.parameter}_bias"

    def of(self, expert: int) -> Place:
        return replace(self, path=self.path.format(expert), expert=expert)


def of_all_experts(places: Iterable[Place], num_experts: int) -> Iterator[Place]:
    """The places with a number for each {}, expert by expert."""
    places = tuple(places)
    yield from (place for place in places if "{}" not in place.path)
    numbered = [place for place in places if "{}" in place.path]
    yield from (place.of(expert) for expert in range(num_experts) for place in numbered)


SIZES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("intermediate_size",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "max_position": ("max_position_embeddings",),
}
"""Fields of `ModelShape` and most families' keys in config.json."""
EXPERT_SIZES: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("num_local_experts", "num_experts"),
    "num_experts_per_token": ("num_experts_per_tok", "experts_per_token"),
}
TENSORS: Mapping[str, str] = {
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
}
"""Parameters without a LoRA site and most families' tensors."""
QK_NORMS: Mapping[str, str] = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
FULL_QK_NORMS: Mapping[str, str] = {
    "attention.qkv.q_norm.weight": "self_attn.q_norm.weight",
    "attention.qkv.k_norm.weight": "self_attn.k_norm.weight",
}
OUTPUT_NORMS: Mapping[str, str] = {
    "add_attention.norm.weight": "post_attention_layernorm.weight",
    "add_mlp.norm.weight": "post_feedforward_layernorm.weight",
}
"""Norms of layers without input norms."""
ATTENTION = (
    *(Place(path=f"self_attn.{name}_proj", site="qkv", modules=(i,)) for i, name in enumerate("qkv")),
    Place(path="self_attn.o_proj", site="o"),
)
OUTPUT_GATE = Place(path="self_attn.gate_proj", site="output_gate")
"""The sigmoid of this projection scales the heads' outputs."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def linear_mlp(path: str, leaves: tuple[str, str, str] = PROJECTIONS, *, kind: str = "") -> tuple[Place, ...]:
    """Gate, up and down as linear layers.  path: with {} for each expert, else the dense MLP.

    kind: "shared_" or "dense_" beside experts.
    """
    modules = ((f"{kind}gate_up", (0,)), (f"{kind}gate_up", (1,)), (f"{kind}down", (0,)))
    return tuple(
        Place(path=f"{path}.{leaf}", site=site, modules=numbers, optional_linear="{}" in path)
        for leaf, (site, numbers) in zip(leaves, modules, strict=True)
    )


def fused_experts(path: str, **fields: Any) -> tuple[Place, ...]:
    """gate_up_proj and down_proj of all experts, each 3-D."""
    fields = {"path": path, "form": "fused", **fields}
    return (
        Place(site="gate_up", modules=(0, 1), parameter="gate_up_proj", **fields),
        Place(site="down", parameter="down_proj", **{**fields, "interleaved": False}),
    )


SHARED_EXPERT = (
    *linear_mlp("mlp.shared_expert", kind="shared_"),
    Place(path="mlp.shared_expert_gate", site="shared_gate"),
)
DENSE_MLP = linear_mlp("mlp")
_GATE = Place(path="mlp.gate", site="router", optional_linear=True)
_FUSED, _LINEAR = fused_experts("mlp.experts"), linear_mlp("mlp.experts.{}")
EXPERT_FORMS = ((_GATE, *_FUSED), (_GATE, *_LINEAR))
"""Router and experts in most families' checkpoints."""
ADAPTED_EXPERTS = (_GATE, *_FUSED, *_LINEAR)
"""Their places in adapters."""


def one_window(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    """sliding_window for all layers; without, full attention."""
    return (config.size("sliding_window", default=0, least=0),) * num_layers


def late_windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    """With use_sliding_window, windows from layer max_window_layers on, or by layer_types."""
    if not config.flag("use_sliding_window"):
        return (0,) * num_layers
    return windows_after(config, num_layers, 28)


def windows_after(config: ConfigJson, num_layers: int, most_full: int) -> tuple[int, ...]:
    """Windows from layer max_window_layers on, or by layer_types."""
    num_full = min(config.size("max_window_layers", default=most_full, least=0), num_layers)
    kinds = ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    return windows_by_type(config, stated_window(config), kinds)


def stated_window(config: ConfigJson) -> int:
    """sliding_window: null is none, and 4096 without the key."""
    return config.size("sliding_window", default=0 if config.states("sliding_window") else 4096, least=0)


def rope_types(*kinds: str) -> dict[str, tuple[str, ...]]:
    """Allowed values of every key that names a rotation."""
    sections, keys = ("rope_parameters", "rope_scaling"), ("rope_type", "type")
    return {f"{section}.{key}": kinds for section in sections for key in keys}


def _full(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    """Full attention.  A window as long as the context has no effect."""
    window = config.get("sliding_window", default=None)
    if window is not None and config.size("sliding_window") < config.size("max_position_embeddings"):
        raise config.refusal("sliding_window", window, "is not supported by its family; remove it")
    return (0,) * num_layers


def dense_layers(config: ConfigJson, layers: Iterable[int]) -> Mapping[str, Any]:
    """Fields of `ModelShape`: dense layers among layers with experts."""
    numbers = tuple(layers)
    return {"dense_layers": numbers, "dense_size": config.size("intermediate_size")} if numbers else {}


def shared_and_dense(config: ConfigJson, num_shared: int, layers: Iterable[int]) -> Mapping[str, Any]:
    """Fields of `ModelShape`: shared experts of a routed expert's size, and dense layers."""
    shared_size = num_shared * config.size("moe_intermediate_size")
    return {"shared_size": shared_size, **dense_layers(config, layers)}


def stepped_experts(config: ConfigJson, num_layers: int, shared_size: int) -> Mapping[str, Any]:
    """Fields of `ModelShape`: a shared expert behind a gate, dense layers by number or step."""
    step, named = config.size("decoder_sparse_step", default=1), set(config.numbers("mlp_only_layers"))
    dense = (layer for layer in range(num_layers) if layer in named or (layer + 1) % step)
    return {
        "shared_size": config.size("shared_expert_intermediate_size", default=shared_size),
        "has_shared_gate": True,
        **dense_layers(config, dense),
    }


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family; docs/guides/families.md explains the main fields.

    defaults: values of absent keys.  multimodal: further ones inside a multimodal model.  sizes: fields of
    `ModelShape` and keys; without num_experts, a dense family.  theta, theta_keys, rope: without
    rope_parameters, if `layers` gives no rope.  rotary_factor: rotated share of head_dim without
    partial_rotary_factor, or a function (config, head_dim); None: all.  norm_eps: without rms_norm_eps.
    stack: prefix of the layers.  tensors: parameters without a site; older_tensors: names in older files.
    attention: places of both checkpoints and adapters.  mlp: the last form is the default.  adapted: other
    places of LoRA pairs; places of one path are in the order of PEFT's nesting.  older_path: start of the
    adapted paths, and in older files.  own_format: quant_method of checkpoints with `mlp`'s tensors.
    experts_stay: quantisers of linear layers leave the experts.
    """

    title: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    multimodal: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SIZES)
    fused_qkv: bool = False
    fused_gate_up: bool = False
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    layers: Callable[[ConfigJson], Mapping[str, Any]] = lambda config: {}
    windows: Callable[[ConfigJson, int], tuple[int, ...]] = _full
    beside_experts: Callable[[ConfigJson, int], Mapping[str, Any]] = lambda config, num_layers: {}
    theta: float = 1e4
    theta_keys: tuple[str, ...] = ("rope_theta",)
    rope: Mapping[str, Any] = field(default_factory=dict)
    rotary_factor: float | Callable[[ConfigJson, int], float] | None = None
    norm_eps: float = 1e-6

    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    stack: str = "model.layers"
    tensors: Mapping[str, str] = field(default_factory=lambda: TENSORS)
    older_tensors: Mapping[str, str] = field(default_factory=dict)
    recurrent_tensors: Mapping[str, str] = field(default_factory=dict)
    attention: tuple[Place, ...] = ATTENTION
    beside: tuple[Place, ...] = ()
    mlp: tuple[tuple[Place, ...], ...] = EXPERT_FORMS
    adapted: tuple[Place, ...] = ADAPTED_EXPERTS
    older_path: tuple[str, str] | None = None
    own_format: str | None = None
    experts_stay: bool = False
    tool_format: str = ""

    def named_in(self, checkpoint: Container[str], tied: bool = False) -> Family:
        """The family with its names in the checkpoint: multimodal or not.

        tied: the head's tensor is the embedding if alone, as safetensors.torch.save_model writes.
        """
        found = self
        for text, front in (*NAME_ORDERS, THINKER):
            embedding, norm, stack = (
                name.replace("model.", text, 1) for name in (self.embedding, self.norm, self.stack)
            )
            if norm in checkpoint:
                head = self.head if self.head in checkpoint else front + self.head
                found = replace(self, embedding=embedding, norm=norm, stack=stack, head=head)
                break
        if tied and found.embedding not in checkpoint and found.head in checkpoint:
            return replace(found, embedding=found.head)
        return found

    def shape(self, name: str, config: Mapping[str, Any]) -> ModelShape:
        """Sizes of the model."""
        found = self._language_model(name, config)
        found.require({"hidden_act": ("silu", "swish"), "is_causal": (True,), **self.supported})
        hidden = found.size(*self.sizes["hidden_size"])
        heads = found.size(*self.sizes["num_heads"])
        defaults = {"num_kv_heads": heads, "head_dim": hidden // heads}
        sizes: dict[str, Any] = {
            size: found.size(*keys, default=defaults[size]) if size in defaults else found.size(*keys)
            for size, keys in self.sizes.items()
        }
        for size, largest in LARGEST.items():
            if sizes.get(size, 0) > largest:
                raise found.refusal(self.sizes[size][0], sizes[size], f"must be at most {largest}")
        sizes["max_position"] = context_of(found, sizes["max_position"], self.rope)
        windows = self.windows(found, sizes["num_layers"])
        beside = self.beside_experts(found, sizes["num_layers"])
        known: dict[str, Any] = {"num_experts": 0, "num_experts_per_token": 0, **sizes, **beside}
        return ModelShape(
            **known,
            family=name,
            fused_qkv=self.fused_qkv,
            fused_gate_up=self.fused_gate_up,
            num_windowed_layers=sum(window > 0 for window in windows),
            dtype_bytes=_dtype_bytes(found),
        )

    def spec(self, shape: ModelShape, config: Mapping[str, Any]) -> ModelSpec:
        """Layers of the model."""
        found = self._language_model(shape.family, config)
        fields: dict[str, Any] = {
            "norm_eps": found.number("rms_norm_eps", default=self.norm_eps),
            "window": self.windows(found, shape.num_layers),
            "tie_word_embeddings": found.flag("tie_word_embeddings"),
            **self.layers(found),
        }
        if not _PARTS.isdisjoint(config):
            fields["unused"] = (*fields.get("unused", ()), *BESIDE_TEXT)
        if "rope" in fields:
            return ModelSpec(shape=shape, **fields)
        factor = self.rotary_factor
        if callable(factor):
            factor = factor(found, shape.head_dim)
        rotated = shape.head_dim if shape.mla is None else shape.mla.rope_dim
        rope = rope_spec(found, rotated, self.theta_keys, self.theta, self.rope, factor)
        return ModelSpec(shape=shape, rope=rope, **fields)

    def _language_model(self, name: str, config: Mapping[str, Any]) -> ConfigJson:
        text = text_config(config)
        kind = text.get("model_type") or (name if _PARTS.isdisjoint(config) else "")
        return ConfigJson({**self.defaults, **(self.multimodal if kind != name else {}), **text})

    def cut(self, config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
        """The config.json with the first layers only.  Raises ConfigError for too few."""
        keys, config = self.sizes["num_layers"], text_config(config)
        known = ConfigJson(config).size(*keys)
        if num_layers > known:
            raise ConfigError(
                f"num_layers={num_layers} is more than the model's {known}; lower it or leave it out"
            )
        cut = {**config, next(key for key in keys if config.get(key) is not None): num_layers}
        for key in ("layer_types", "mlp_layer_types"):
            if isinstance(kinds := config.get(key), list):
                cut[key] = kinds[:num_layers]
        return cut


def windows_by_type(config: ConfigJson, window: int, kinds: list[str]) -> tuple[int, ...]:
    """A window for sliding layers.  kinds: of a config without layer_types."""
    pattern = ("sliding_attention", "full_attention")
    given = config.get("layer_types", default=kinds)
    if not isinstance(given, list) or len(given) != len(kinds) or not all(kind in pattern for kind in given):
        raise ConfigError(
            f"config.json has layer_types={given!r}; needed are {len(kinds)} of {' or '.join(pattern)}"
        )
    return tuple(window if kind == pattern[0] else 0 for kind in given)


def windows_by_step(config: ConfigJson, window: int, step: int, num_layers: int) -> tuple[int, ...]:
    """As `windows_by_type`; without layer_types each step-th layer is full."""
    kinds = ["sliding_attention" if (i + 1) % step else "full_attention" for i in range(num_layers)]
    return windows_by_type(config, window, kinds)


def _dtype_bytes(config: ConfigJson) -> int:
    name = str(config.get("dtype", "torch_dtype", default="bfloat16")).removeprefix("torch.")
    if name not in _DTYPE_BYTES:
        raise ConfigError(f"dtype={name!r} is not supported; use one of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[name]
