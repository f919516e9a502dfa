# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint directory to a model with its weights."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from moe_lora.core.errors import ConfigError
from moe_lora.core.progress import Show, silent
from moe_lora.core.shape import NEVER_QUANTISED
from moe_lora.core.shard import ModelShard
from moe_lora.core.wrong_files import read_config
from moe_lora.families import model_spec
from moe_lora.families.schema.family import ModelSpec
from moe_lora.kernels.cpu.library import advise_huge_pages
from moe_lora.kernels.quantised import Format, format_of

from .causal_lm import Attention, CausalLM, NormedQkv
from .checkpoint import Checkpoint
from .linear import ExpertLinear, LoraLinear
from .quantised_weight import Quantisation, QuantisedWeight, WeightLayout, common_layout
from .stored_weight import StoredWeight
from .weights import Piece, WeightMap, refuse_unexpected, stored_pieces, weight_map

if TYPE_CHECKING:
    from .random_weights import RandomCheckpoint

_NORMED = ("q_norm", "k_norm")
"""Norms of a `NormedQkv`, in module order."""
_CACHE_LINE, _HUGE_PAGE = 64, 2 << 20
_AHEAD_BYTES, _AT_ONCE_BYTES = 256 << 20, 64 << 20
"""Weights that the kernel reads ahead, and weights whose reads end together."""


class Cut(NamedTuple):
    """source: part of a piece's tensor.  target: part of the rank's parameter."""

    source: tuple[slice, ...]
    target: tuple[Any, ...]


@dataclass(frozen=True)
class HeldRanges:
    """whole: shape in the whole model.  held: a rank's ranges of each dim, in local order."""

    whole: tuple[int, ...]
    held: tuple[tuple[range, ...], ...]

    def cuts(self, index: tuple[Any, ...]) -> list[Cut]:
        """Cuts of a tensor that fills `index` of the whole parameter; empty if the rank needs no part."""
        given = (*index, *[slice(None)] * (len(self.whole) - len(index)))
        dims = [_overlaps(*one) for one in zip(given, self.whole, self.held, strict=True)]
        return [
            Cut(tuple(one for one, _ in found if one is not None), tuple(one for _, one in found))
            for found in itertools.product(*dims)
        ]


def _overlaps(given: Any, size: int, held: Iterable[range]) -> list[tuple[slice | None, Any]]:
    single = isinstance(given, int)
    start, stop = (given, given + 1) if single else given.indices(size)[:2]
    found: list[tuple[slice | None, Any]] = []
    place = 0
    for part in held:
        first, end = max(part.start, start), min(part.stop, stop)
        if first < end:
            at = place + first - part.start
            target = at if single else slice(at, at + end - first)
            found.append((None if single else slice(first - start, end - start), target))
        place += len(part)
    return found


def held_ranges(model: CausalLM) -> dict[str, HeldRanges]:
    """Ranges of the rank's parameters, by name."""
    shard = model.shard
    found = {name: _undivided(tuple(weight.shape)) for name, weight in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear | ExpertLinear):
            weight = _of_site(shard, module.site, isinstance(module, ExpertLinear))
            found[f"{name}.weight"] = weight
            found[f"{name}.bias"] = HeldRanges(weight.whole[:-1], weight.held[:-1])
            if isinstance(module, NormedQkv):
                site = shard.whole.sites[module.site]
                for part, width, held in zip(_NORMED, site.out_features, shard.outputs(site), strict=False):
                    found[f"{name}.{part}.weight"] = HeldRanges((width,), (held,))
        elif isinstance(module, Attention):
            found[f"{name}.sinks"] = HeldRanges((shard.whole.num_heads,), ((shard.heads,),))
    vocabulary = _undivided((shard.whole.vocab_size, shard.whole.hidden_size))
    found["head"] = HeldRanges(vocabulary.whole, ((shard.vocabulary,), vocabulary.held[1]))
    found["head_bias"] = HeldRanges(vocabulary.whole[:1], ((shard.vocabulary,),))
    return found


def _undivided(shape: tuple[int, ...]) -> HeldRanges:
    return HeldRanges(shape, tuple((range(size),) for size in shape))


def _of_site(shard: ModelShard, number: int, per_expert: bool) -> HeldRanges:
    site = shard.whole.sites[number]
    rows = [
        range(column + part.start, column + part.stop)
        for column, parts in zip(site.columns, shard.outputs(site), strict=True)
        for part in parts
    ]
    whole: tuple[int, ...] = (site.total_out_features, site.in_features)
    held: tuple[tuple[range, ...], ...] = (_joined(rows), (shard.inputs(site),))
    if per_expert:
        whole, held = (site.num_experts, *whole), ((shard.copies(site),), *held)
    return HeldRanges(whole, held)


def _joined(parts: Iterable[range]) -> tuple[range, ...]:
    found: list[range] = []
    for part in parts:
        if found and found[-1].stop == part.start:
            found[-1] = range(found[-1].start, part.stop)
        else:
            found.append(part)
    return tuple(found)


logger = logging.getLogger(__name__)

Source: TypeAlias = "Checkpoint | RandomCheckpoint"
Target = torch.Tensor | QuantisedWeight
Stored = dict[str, dict[int, "torch.Tensor | StoredWeight"]]
"""Opened tensors, by parameter and local piece."""


def load_model(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    shard: ModelShard | None = None,
    quantisation: Quantisation | None = None,
    show: Show = silent,
) -> CausalLM:
    """Build the model of a checkpoint directory and load its weights.

    shard None: the whole model.  quantisation: applied while reading; None: keep the checkpoint's formats.
    """
    spec, checkpoint, weights = _opened(model_dir)
    return _loaded(spec, checkpoint, weights, dtype, device, shard, quantisation, show)


def _opened(model_dir: Path) -> tuple[ModelSpec, Checkpoint, WeightMap]:
    config = read_config(model_dir)
    checkpoint = Checkpoint(model_dir, config)
    spec = model_spec(config, checkpoint)
    weights = weight_map(spec, checkpoint)
    if checkpoint.scheme is not None:
        weights = stored_pieces(weights, checkpoint.scheme, checkpoint.file_of, spec.shape.num_experts)
    return spec, checkpoint, weights


def random_model(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    shard: ModelShard | None = None,
    quantisation: Quantisation | None = None,
    show: Show = silent,
) -> CausalLM:
    """As `load_model`, with a `RandomCheckpoint`."""
    from .random_weights import RandomCheckpoint

    spec = model_spec(config)
    checkpoint = RandomCheckpoint(spec, config, device)
    return _loaded(spec, checkpoint, checkpoint.weights, dtype, device, shard, quantisation, show)


def refill(model: CausalLM, model_dir: Path) -> None:
    """Read the weights again into place.  Raises ConfigError, also if the tensors differ."""
    _, checkpoint, weights = _opened(model_dir)
    _fill(model, checkpoint, weights, {}, silent)


def refill_random(model: CausalLM, config: Mapping[str, Any], device: torch.device) -> None:
    """Make the random weights again in place."""
    from .random_weights import RandomCheckpoint

    checkpoint = RandomCheckpoint(model_spec(config), config, device)
    _fill(model, checkpoint, checkpoint.weights, {}, silent)


def held_weights(model: CausalLM) -> list[torch.Tensor]:
    """The tensors that a checkpoint fills."""
    quantised = (one for one in model.modules() if isinstance(one, QuantisedWeight))
    return [
        *(weight.data for weight in model.parameters()),
        *itertools.chain(*(one.buffers() for one in quantised)),
    ]


def _loaded(
    spec: ModelSpec,
    checkpoint: Source,
    weights: WeightMap,
    dtype: torch.dtype,
    device: torch.device,
    shard: ModelShard | None,
    quantisation: Quantisation | None,
    show: Show,
) -> CausalLM:
    with torch.device("meta"):
        model = CausalLM(spec, shard).to(dtype)
    stored = _hold_quantised(model, checkpoint, weights, quantisation, device)
    model = _allocated(model, device)
    _fill(model, checkpoint, weights, stored, show)
    return model


def _allocated(model: CausalLM, device: torch.device) -> CausalLM:
    spec = model.spec
    # `to_empty` imports sympy, over half a second.
    if device.type == "cpu":
        model._apply(_side_by_side([*model.parameters(), *model.buffers()]))
    else:
        model._apply(lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device))
    frequencies = torch.tensor(spec.rope.inverse_frequencies, dtype=torch.float32, device=device)
    model.register_buffer("inverse_frequencies", frequencies, persistent=False)
    if spec.tie_word_embeddings and not isinstance(model.head, QuantisedWeight):
        model.head = model.own_head(model.embedding)
    return model.eval()


def _side_by_side(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a tensor like each of these, from one block of memory on huge pages.

    Alone, small matrices have few huge pages: a step took 1.2 times as long.
    """

    def room(one: torch.Tensor) -> int:
        return -(-one.nbytes // _CACHE_LINE) * _CACHE_LINE

    size = sum(map(room, tensors))
    memory = torch.empty(size + _HUGE_PAGE, dtype=torch.uint8)
    advise_huge_pages(memory)
    start = -memory.data_ptr() % _HUGE_PAGE
    free = memory[start : start + size]
    placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for one in tensors:
        taken, free = free[: one.nbytes], free[room(one) :]
        placed[id(one)] = one, taken.view(one.dtype).as_strided(one.shape, one.stride())
    return lambda one: placed.get(id(one), (one, one))[1]


def _hold_quantised(
    model: CausalLM,
    checkpoint: Source,
    weights: WeightMap,
    quantisation: Quantisation | None,
    device: torch.device,
) -> Stored:
    """Replace parameters of a model without storage by `QuantisedWeight`s.

    Returns the opened tensors.  Raises ConfigError for a dynamic format on a GPU, and for an unfit shape.
    """
    layers = linear_layers(model)
    head: list[tuple[nn.Module, str, str]] = [(model, "head", "head")]
    divided = held_ranges(model)
    stored: Stored = {}
    if quantisation is None:
        held, stored = _as_stored(model, checkpoint, weights, layers + head * ("head" in weights))
        in_fp8 = {name for name, one in held.items() if one.form.name == "fp8"}
        if in_fp8 and not _multiplies_fp8(device):
            held = {name: one for name, one in held.items() if name not in in_fp8}
    elif quantisation.form is None:
        held = {}
    else:
        if device.type != "cpu" and quantisation.form.dynamic:
            name = quantisation.form.name
            raise ConfigError(
                f"quantize={name!r} runs on CPU only so far, not on {device.type}; use device='cpu' or "
                f"quantize={name.removesuffix('-dynamic')!r}"
            )
        if quantisation.form.name == "fp8" and not _multiplies_fp8(device):
            raise ConfigError(
                "quantize='fp8' needs a GPU of compute capability 8.9 or more; choose int8, or a newer GPU"
            )
        held = {
            name: _chosen(quantisation.form, weights.get(name, []), divided[name])
            for _, _, name in layers + head * quantisation.head
        }
    for owner, attribute, name in layers + head:
        if name in held:
            weight = getattr(owner, attribute)
            try:
                quantised = QuantisedWeight(weight, held[name])
            except ValueError as error:
                raise ConfigError(
                    f"quantize={held[name].form.name!r} can't hold {name} of shape {tuple(weight.shape)}: "
                    f"{error}; choose a group size that divides it, or int8"
                ) from error
            delattr(owner, attribute)  # a module can't replace a registered parameter
            setattr(owner, attribute, quantised)
    return stored


def _multiplies_fp8(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def linear_layers(model: CausalLM) -> list[tuple[nn.Module, str, str]]:
    """Quantisable layers, with attribute and parameter name."""
    return [
        (module, "weight", f"{name}.weight")
        for name, module in model.named_modules()
        if isinstance(module, (LoraLinear, ExpertLinear))
        and model.spec.shape.sites[module.site].name not in NEVER_QUANTISED
    ]


def _chosen(form: Format, pieces: list[Piece], ranges: HeldRanges) -> WeightLayout:
    """The requested layout.  Blocks of rows shrink if a part of the weight ends inside a block."""
    if form.row_group == 1:
        return WeightLayout(form)
    row_group = math.gcd(form.row_group, *_first_rows(pieces, ranges))
    return WeightLayout(format_of(form.name, form.group_size, row_group))


def _first_rows(pieces: list[Piece], ranges: HeldRanges) -> list[int]:
    return [cut.target[-2].start for piece in pieces for cut in ranges.cuts(piece.index)]


def _as_stored(
    model: CausalLM, checkpoint: Source, weights: WeightMap, layers: list[tuple[nn.Module, str, str]]
) -> tuple[dict[str, WeightLayout], Stored]:
    held: dict[str, WeightLayout] = {}
    opened: Stored = {}
    divided = held_ranges(model)
    for _, _, name in layers:
        if not any(piece.extra_keys for piece in weights[name]):
            continue
        own = _held_pieces(weights[name], divided[name])
        kept = {i: checkpoint.tensor(piece) for i, piece, _ in own if piece.extra_keys}
        parts = [_part(kept[i], cut, piece) for i, piece, cuts in own if i in kept for cut in cuts]
        stored = [part for part in parts if isinstance(part, StoredWeight)]
        if not stored:
            continue
        opened[name] = kept
        found = common_layout(stored, _first_rows(weights[name], divided[name]), model.embedding.dtype)
        if found is not None and len(stored) == sum(len(cuts) for _, _, cuts in own):
            held[name] = found
    if opened:
        kinds = ", ".join(sorted({layout.form.name for layout in held.values()}))
        num_mixed = len(opened) - len(held)
        logger.info(
            "%d weights are held as stored (%s), %d dequantised: their parts differ",
            *(len(held), kinds, num_mixed),
        )
    return held, opened


def _fill(model: CausalLM, checkpoint: Source, weights: WeightMap, stored: Stored, show: Show) -> None:
    """Copy the checkpoint into the model's parameters, converting to their dtype.

    Empties `stored`.  Raises ConfigError for a missing, misshapen or unexpected tensor.
    """
    targets: dict[str, Target] = {name: weight.data for name, weight in model.named_parameters()}
    targets |= {name: module for name, module in model.named_modules() if isinstance(module, QuantisedWeight)}
    if model.spec.tie_word_embeddings and "head" in targets:
        weights = weights | {"head": weights["embedding"]}
    missing = weights.keys() ^ targets.keys()
    assert all(name.endswith(".bias") and name in weights for name in missing), missing
    refuse_unexpected(model.spec, checkpoint, weights)
    ranges = held_ranges(model)
    held = {name: _held_pieces(weights[name], ranges[name]) for name in targets}
    sizes = {name: _num_bytes(target) for name, target in targets.items()}
    done, ended, ahead, total, following = 0, 0, 0, sum(sizes.values()), iter(held.items())
    before: list[Piece] = []  # still read while the next weights' reads start
    now: list[Piece] = []
    for name, target in targets.items():
        while ahead < min(total, done + _AHEAD_BYTES):
            coming, pieces = next(following)
            checkpoint.will_read(piece for _, piece, _ in pieces)
            ahead += sizes[coming]
        opened = stored.pop(name, {})
        for i, piece, cuts in held[name]:
            tensor = opened.pop(i) if i in opened else checkpoint.tensor(piece)
            _check_shape(piece, tensor, ranges[name], checkpoint)
            for cut in cuts:
                _fill_part(target, cut, _part(tensor, cut, piece), piece, checkpoint)
        now += [piece for _, piece, _ in held[name]]
        done += sizes[name]
        if done >= ended + _AT_ONCE_BYTES:
            checkpoint.release(before)
            before, now, ended = now, [], done
        show(f"{done / 1e9:.3g} of {total / 1e9:.3g} GB of weights loaded", done, total)
    checkpoint.release(before + now)


def _held_pieces(pieces: list[Piece], ranges: HeldRanges) -> list[tuple[int, Piece, list[Cut]]]:
    """Number, piece and cuts of the rank's pieces."""
    return [(i, one, cuts) for i, one in enumerate(pieces) if (cuts := ranges.cuts(one.index))]


def _num_bytes(target: Target) -> int:
    held = [target] if isinstance(target, torch.Tensor) else list(target.buffers())
    return sum(tensor.nbytes for tensor in held)


def _check_shape(
    piece: Piece, tensor: torch.Tensor | StoredWeight, ranges: HeldRanges, checkpoint: Source
) -> None:
    given = zip(ranges.whole, itertools.chain(piece.index, itertools.repeat(slice(None))), strict=False)
    wanted = tuple(len(range(size)[part]) for size, part in given if isinstance(part, slice))
    if tuple(tensor.shape) != wanted:
        raise ConfigError(
            f"{piece.key} in {checkpoint.model_dir} has shape {tuple(checkpoint[piece.key].shape)}, "
            f"giving {tuple(tensor.shape)} where config.json asks for {wanted}"
        )


def _part(tensor: torch.Tensor | StoredWeight, cut: Cut, piece: Piece) -> torch.Tensor | StoredWeight:
    if isinstance(tensor, torch.Tensor):
        return tensor[cut.source]
    try:
        return tensor.part(*cut.source)
    except ValueError as error:
        raise ConfigError(
            f"{piece.key} can't be divided over the ranks: {error}; choose another tensor_parallel, give "
            "expert_parallel as many too, which leaves experts whole, or quantize='none'"
        ) from error


def _fill_part(
    into: Target, cut: Cut, tensor: torch.Tensor | StoredWeight, piece: Piece, checkpoint: Source
) -> None:
    if isinstance(into, torch.Tensor):
        if isinstance(tensor, torch.Tensor):
            if piece.transform is not None or not checkpoint.read_into(piece, into[cut.target]):
                into[cut.target].copy_(tensor)
        else:
            _dequantise_into(into[cut.target], tensor)
        return
    try:
        into.fill(cut.target, tensor, functools.partial(checkpoint.read_into, piece))
    except ValueError as error:
        raise ConfigError(f"{piece.key} in {checkpoint.model_dir} can't be quantised: {error}") from error


def _dequantise_into(target: torch.Tensor, stored: StoredWeight, num_rows: int = 128) -> None:
    for row in range(0, len(target), num_rows):
        rows = slice(row, min(row + num_rows, len(target)))
        target[rows].copy_(stored.dequantised(rows, target.dtype))
