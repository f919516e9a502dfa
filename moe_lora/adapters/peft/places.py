# SPDX-License-Identifier: Apache-2.0
"""The places of LoRA pairs in a model: PEFT's paths mapped to sites.  Torch-free.

PEFT nests parameters of one module: the last has the bare key, each earlier one `.base_layer` more, so places
are in order of definition.

Legend: E experts, R LoRA rank, I inputs, O outputs of the whole parameter.

Tinker and Megatron-Bridge stack experts: A [E or 1, R, I] and B [E or 1, O, R], with 1 shared by all.
Megatron-Bridge writes the partner of a shared matrix once per expert.
Source: tinker-cookbook, weights/_merge.py; Megatron-Bridge, models/conversion/peft_bridge.py.

PEFT flattens a 3-D parameter: A's rows are expert-major [E·R, I], B's columns rank-major [O, R·E].  Some
versions (0.17 and 0.18) exchanged A and B ("swapped") of parameters [E, O, I]: A [E·R, O], B [I, R·E].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from moe_lora.core.attention_shapes import LATENT_SITES
from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape, Site
from moe_lora.families import family_named
from moe_lora.families.schema.family import PROJECTIONS, Place, of_all_experts

from .names import OuterPaths

if TYPE_CHECKING:
    import torch

    from moe_lora.adapters.packed import Pair

    from .config import ExpertLayout

STACKED_NAMES = (("w1", "w3", "w2"), PROJECTIONS)
"""Names of gate, up and down by Tinker and by Megatron-Bridge."""
_STACKED_SITES = (("gate_up", (0,)), ("gate_up", (1,)), ("down", (0,)))


@dataclass(frozen=True)
class PlaceMap:
    """All places of a model: module path → (layer, places in order of definition).

    Head and embedding are in one more layer.  older: front of module paths in older files.  stacked: paths of
    matrices of all experts.
    """

    by_path: dict[str, tuple[int, tuple[Place, ...]]]
    layer_prefix: str
    outer: OuterPaths
    older: str | None
    stacked: frozenset[str]


@lru_cache(maxsize=8)
def place_map(shape: ModelShape, older_names: bool = False) -> PlaceMap:
    """Places of every layer.  older_names: by `Family.older_path`."""
    family = family_named(shape.family)
    new, old = family.older_path or ("", "")
    in_layer: dict[str, tuple[Place, ...]] = {}
    listed = (*family.attention, *family.beside, *family.adapted, *_stacked_places(family.adapted))
    for place in of_all_experts(listed, shape.num_experts):
        renamed = older_names and place.path.startswith(new)
        path = old + place.path.removeprefix(new) if renamed else place.path
        in_layer[path] = (*in_layer.get(path, ()), place)
    by_path = {
        f"{family.stack}.{layer}.{path}": (layer, held)
        for layer in range(shape.num_layers)
        for path, places in in_layer.items()
        if (held := tuple(place for place in places if shape.has_site(layer, place.site)))
    }
    outer = OuterPaths(family.head.removesuffix(".weight"), family.embedding.removesuffix(".weight"))
    for path, site in zip(outer, shape.outer_sites, strict=True):
        by_path[path] = shape.num_layers, (Place(path=path, site=site.name),)
    stacked = frozenset(path for path, (_, places) in by_path.items() if places[0].form == "stacked")
    return PlaceMap(by_path, family.stack, outer, old or None, stacked)


def _stacked_places(adapted: Iterable[Place]) -> Iterator[Place]:
    """Gate, up and down below each module with fused experts."""
    for container in dict.fromkeys(place.path for place in adapted if place.form == "fused"):
        for names in STACKED_NAMES:
            for leaf, (site, modules) in zip(names, _STACKED_SITES, strict=True):
                yield Place(path=f"{container}.{leaf}", site=site, modules=modules, form="stacked")


STRANGERS = 1000
"""Allowance of foreign tensors, so that a few are refused by name."""


@lru_cache(maxsize=8)
def max_tensors(shape: ModelShape) -> int:
    """Most tensors of an adapter: an A and a B per place."""
    return 2 * sum(len(places) for _, places in place_map(shape).by_path.values())


FLOATS = ("torch.float32", "torch.bfloat16", "torch.float16", "torch.float64")


class Shaped(Protocol):
    """A tensor, or its entry in a file's header."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class PairSource:
    """One pair in the file, with its config.

    keys_a, keys_b: a tensor, or one per expert.  grouped: see `config.ExpertLayout`.
    """

    place: Place
    keys_a: tuple[str, ...]
    keys_b: tuple[str, ...]
    lora_rank: int
    scale: float
    grouped: bool = False


def make_pairs(
    source: PairSource, tensors: Mapping[str, torch.Tensor], shape: ModelShape, swapped: bool
) -> list[Pair]:
    """Views [N, R, D] of the pair's tensors; tensors of single experts are copied.

    kv_b_proj of latent attention gives two pairs, others one.
    """
    import torch

    from moe_lora.adapters.packed import Pair

    place, site = source.place, shape.sites_by_name[source.place.site]
    a, b = (
        tensors[keys[0]] if len(keys) == 1 else torch.stack([tensors[key] for key in keys])
        for keys in (source.keys_a, source.keys_b)
    )
    if place.form == "heads":
        return _pairs_of_heads(source, a, b, shape)
    experts = range(max(1, site.num_experts))
    if place.expert is not None:
        experts = range(place.expert, place.expert + 1)
    shrink, expand = _views(source, a, b, site, swapped)
    about: dict[str, Any] = {"scale": source.scale, "source": source.keys_a[0]}
    expands = _split(expand, place)
    return [Pair(site=site, modules=place.modules, experts=experts, shrink=shrink, expands=expands, **about)]


def _pairs_of_heads(source: PairSource, a: torch.Tensor, b: torch.Tensor, shape: ModelShape) -> list[Pair]:
    """The delta of kv_b_proj on both sides of the latent, by head; heads share A.

    For queries the delta is transposed: B's rows of K shrink and A expands.
    """
    from moe_lora.adapters.packed import Pair

    assert shape.mla is not None
    b_NOR, a_1RC = b.view(shape.num_heads, -1, source.lora_rank), a.unsqueeze(0)
    k_NRO, v_NRO = b_NOR.transpose(1, 2).split([shape.mla.nope_dim, shape.mla.v_dim], dim=2)
    about: dict[str, Any] = {"scale": source.scale, "source": source.keys_a[0], "modules": (0,)}
    about["experts"] = range(shape.num_heads)
    key_site, value_site = map(shape.site, LATENT_SITES)
    return [
        Pair(site=key_site, shrink=k_NRO, expands=(a_1RC,), **about),
        Pair(site=value_site, shrink=a_1RC, expands=(v_NRO,), **about),
    ]


def no_floats(key: str, tensor: Shaped, where: str) -> AdapterError:
    """The error for a dtype outside FLOATS."""
    return AdapterError(
        f"{where}: {key}: dtype {tensor.dtype} is not supported; save the adapter in float32, bfloat16 or "
        "float16"
    )


def check_pair(
    source: PairSource, tensors: Mapping[str, Shaped], shape: ModelShape, where: str, swapped: bool
) -> None:
    """Raises AdapterError for a wrong shape or a non-float dtype."""
    for key in (*source.keys_a, *source.keys_b):
        if str(tensors[key].dtype) not in FLOATS:
            raise no_floats(key, tensors[key], where)
    shapes = expected_shapes(source, shape, swapped)
    for keys, expected in zip((source.keys_a, source.keys_b), shapes, strict=True):
        for key in keys:
            sizes: tuple[int, ...] = expected
            if source.place.form == "stacked" and len(keys) == 1:
                first = tuple(tensors[key].shape)[:1]
                sizes = (*(first if first == (1,) else (shape.num_experts,)), *expected)
            _check_shape(where, key, tensors[key], sizes, source)
    both = [tuple(tensors[keys[0]].shape) for keys in (source.keys_a, source.keys_b)]
    if (
        source.place.form == "stacked"
        and all(len(one) == 3 and one[0] == 1 for one in both)
        and shape.num_experts > 1
    ):
        raise AdapterError(
            f"{where}: {source.keys_a[0]} and {source.keys_b[0]} are both shared by all experts, and one of "
            f"the two has a matrix for each of {shape.num_experts}; save the adapter again"
        )


def expected_shapes(
    source: PairSource, shape: ModelShape, swapped: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Required shapes of lora_A and lora_B."""
    place, site, rank = source.place, shape.sites_by_name[source.place.site], source.lora_rank
    inputs = site.in_features
    outputs = sum(site.out_features[module] for module in place.modules)
    if place.form == "fused":
        first, last = (outputs, inputs) if swapped else (inputs, outputs)
        return (rank * shape.num_experts, first), (last, rank * shape.num_experts)
    if place.form == "heads":
        assert shape.mla is not None
        outputs = shape.num_heads * (shape.mla.nope_dim + shape.mla.v_dim)
        return (rank, shape.mla.kv_rank), (outputs, rank)
    if place.form == "rows":
        return (rank, shape.hidden_size), (shape.num_experts * shape.intermediate_size, rank)
    return (rank, inputs), (outputs, rank)


def is_swapped(
    sources: list[PairSource], tensors: Mapping[str, Shaped], shape: ModelShape, layout: ExpertLayout
) -> bool:
    """True if the fused pairs have the layout with A and B exchanged.

    Square parameters fit both layouts; the rest of the file decides, then `layout`.
    """
    fused = [source for source in sources if source.place.form == "fused"]
    fits = {
        swapped: all(
            (tensors[source.keys_a[0]].shape, tensors[source.keys_b[0]].shape)
            == expected_shapes(source, shape, swapped)
            for source in fused
        )
        for swapped in (False, True)
    }
    if not fused or not all(fits.values()) or fused[0].place.transposed:
        return bool(fused) and fits[True] and not fits[False]
    return layout.is_swapped(fused[0].keys_a[0])


def _check_shape(where: str, key: str, tensor: Shaped, expected: tuple[int, ...], source: PairSource) -> None:
    found = tuple(tensor.shape)
    if len(found) == 1 and expected != found:
        raise AdapterError(
            f"{where}: {key}: shape {list(found)} has one dimension, expected {list(expected)}; a flat part "
            "of a tensor, as DeepSpeed and FSDP save without gathering; save again from a full state dict"
        )
    if found != expected:
        raise AdapterError(
            f"{where}: {key}: expected shape {list(expected)} (lora_rank {source.lora_rank} by the config), "
            f"found {list(found)}; the adapter was trained for another base model, or r or rank_pattern "
            "in adapter_config.json is not that of these tensors"
        )


def _views(
    source: PairSource, a: torch.Tensor, b: torch.Tensor, site: Site, swapped: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(shrink [N, R, I], expand [N, R, O]) as views."""
    rank = source.lora_rank
    if source.place.form == "fused":
        experts = site.num_experts
        by_expert = a.view(experts, rank, a.shape[1])
        if source.grouped:
            transposed = b.view(b.shape[0], experts, rank).permute(1, 2, 0)
        else:
            transposed = b.view(b.shape[0], rank, experts).permute(2, 1, 0)
        return (transposed, by_expert) if swapped else (by_expert, transposed)
    if source.place.form == "rows":
        shared = a.unsqueeze(0)
        sliced = b.view(site.num_experts, -1, rank).transpose(1, 2)
        # The down matrix is applied untransposed, so B shrinks and A expands.
        return (sliced, shared) if site.name == "down" else (shared, sliced)
    if source.place.form == "stacked":
        return a, b.transpose(1, 2)
    return a.unsqueeze(0), b.t().unsqueeze(0)


def _split(expand: torch.Tensor, place: Place) -> tuple[torch.Tensor, ...]:
    """One view per module: gate and up follow one another, or alternate."""
    if len(place.modules) == 1:
        return (expand,)
    if place.interleaved:
        return expand[..., 0::2], expand[..., 1::2]
    half = expand.shape[-1] // 2
    return expand[..., :half], expand[..., half:]
