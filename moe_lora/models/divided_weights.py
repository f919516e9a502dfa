# SPDX-License-Identifier: Apache-2.0
"""The part of each checkpoint tensor on a rank, and its place in the rank's parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_lora.core.shard import ModelShard

from .causal_lm import Attention, CausalLM, NormedQkv
from .linear import ExpertLinear, LoraLinear

_NORMED = ("q_norm", "k_norm")
"""Norms of a `NormedQkv`, in the order of the site's modules."""


class Cut(NamedTuple):
    """source: part of a piece's tensor.  target: part of the rank's parameter."""

    source: tuple[slice, ...]
    target: tuple[Any, ...]


@dataclass(frozen=True)
class HeldRanges:
    """whole: shape of a parameter of the whole model.  held: a rank's ranges of each dim, in local order."""

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
    """Ranges of all parameters of the rank's model, by name."""
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
