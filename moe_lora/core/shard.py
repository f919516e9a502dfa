# SPDX-License-Identifier: Apache-2.0
"""The part of a model on one rank of an instance, and partial sums.

With tensor parallelism T each rank has 1/T of the heads, a dense MLP's inner width, and the vocabulary head.
Outputs of qkv, output_gate and gate_up are column-parallel; inputs of o and down row-parallel, with outputs
summed over ranks (Megatron-LM, arXiv 1909.08053, section 3).  With fewer KV heads than ranks, several ranks
hold a head.  Experts are divided like a dense MLP, or (expert parallelism) distributed whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from .errors import ConfigError
from .shape import ModelShape, Site, check_expert_parallel, experts_of_rank

ROW_PARALLEL = ("o", "down", "shared_down", "dense_down")
"""Sites with divided inputs."""
INNER_SIZES = ("intermediate_size", "shared_size", "dense_size")
"""Widths of an MLP between gate_up and down."""


@dataclass(frozen=True)
class ModelShard:
    """One of max(tensor_parallel, expert_parallel) ranks.

    Raises ConfigError for numbers that don't divide the model.
    """

    whole: ModelShape
    tensor_parallel: int = 1
    expert_parallel: int = 1
    dist_rank: int = 0

    def __post_init__(self) -> None:
        size, shape = self.tensor_parallel, self.whole
        check_expert_parallel(shape.num_experts, self.expert_parallel)
        parts = {"num_heads": shape.num_heads}
        if self.divides_inner:
            parts |= {name: getattr(shape, name) for name in INNER_SIZES}
        for kind in shape.special_layers if size > 1 else ():
            raise ConfigError(
                f"tensor_parallel={size} and {kind} do not go together: the heads are not divided; "
                f"choose tensor_parallel=1, or expert_parallel={size}"
            )
        for name, number in parts.items():
            if number % size:
                raise ConfigError(
                    f"tensor_parallel={size} does not divide {name}={number}; choose one that does"
                )
        if shape.num_kv_heads % size and size % shape.num_kv_heads:
            raise ConfigError(
                f"tensor_parallel={size} neither divides num_kv_heads={shape.num_kv_heads} nor is a multiple "
                "of it; choose one that is"
            )

    @property
    def divides_inner(self) -> bool:
        """True if an MLP's or expert's inner width is divided."""
        return self.tensor_parallel > 1 and self.expert_parallel == 1

    @cached_property
    def experts(self) -> range:
        """Experts of each layer on this rank."""
        return experts_of_rank(self.whole.num_experts, self.expert_parallel, self._of_experts)

    def copies(self, site: Site) -> range:
        """The site's copies on this rank: experts, or all heads."""
        return self.experts if site.is_routed else range(site.num_experts)

    @property
    def _of_experts(self) -> int:
        return self.dist_rank if self.expert_parallel > 1 else 0

    @property
    def _of_heads(self) -> int:
        return self.dist_rank if self.tensor_parallel > 1 else 0

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes on this rank; num_experts and vocab_size are the whole model's."""
        by = self.tensor_parallel if self.divides_inner else 1
        return replace(
            self.whole,
            num_heads=len(self.heads),
            num_kv_heads=len(self._kv_heads),
            **{name: getattr(self.whole, name) // by for name in INNER_SIZES},
        )

    @cached_property
    def outer_sites(self) -> tuple[Site, ...]:
        """`ModelShape.outer_sites` with this rank's rows of the head."""
        head, embedding = self.whole.outer_sites
        first = self.shape.num_entries
        rows = (len(self.vocabulary),)
        return replace(head, out_features=rows, entry_base=first), replace(embedding, entry_base=first + 1)

    @property
    def heads(self) -> range:
        return _share(self.whole.num_heads, self.tensor_parallel, self._of_heads)

    @property
    def _kv_heads(self) -> range:
        total = self.whole.num_kv_heads
        if total >= self.tensor_parallel:
            return _share(total, self.tensor_parallel, self._of_heads)
        first = self._of_heads * total // self.tensor_parallel
        return range(first, first + 1)

    @property
    def owns_kv_heads(self) -> bool:
        """True on the first rank with these KV heads."""
        return self._of_heads % max(1, self.tensor_parallel // self.whole.num_kv_heads) == 0

    @property
    def vocabulary(self) -> range:
        """Rows of the head; the last ranks may have fewer."""
        share = -(-self.whole.vocab_size // self.tensor_parallel)
        first = self._of_heads * share
        return range(min(first, self.whole.vocab_size), min(first + share, self.whole.vocab_size))

    def is_summed(self, site: Site) -> bool:
        """True if this rank's output of the site is a summand."""
        return site.name in ROW_PARALLEL and (
            self.tensor_parallel > 1 if site.name == "o" else self.divides_inner
        )

    def inputs(self, site: Site) -> range:
        match site.name:
            case "o":
                return _wide(self.heads, site.in_features // self.whole.num_heads)
            case "down" | "shared_down" | "dense_down":
                return self._inner(site.in_features)
        return range(site.in_features)

    def outputs(self, site: Site) -> tuple[tuple[range, ...], ...]:
        """Local outputs of each module of a site, in local order."""
        match site.name:
            case "qkv":
                return self._qkv(len(site.modules))
            case "output_gate":
                return ((_wide(self.heads, self.whole.head_dim),),)
            case "gate_up" | "shared_gate_up" | "dense_gate_up":
                size = site.total_out_features // 2
                parts = self._inner(size), _moved(self._inner(size), size)
                return (parts,) if len(site.modules) == 1 else (parts[:1],) * 2
            case "head":
                return ((self.vocabulary,),)
        return tuple((range(width),) for width in site.out_features)

    def _inner(self, size: int) -> range:
        return _share(size, self.tensor_parallel, self.dist_rank) if self.divides_inner else range(size)

    def _qkv(self, num_modules: int) -> tuple[tuple[range, ...], ...]:
        shape = self.whole
        q, kv = (_wide(heads, shape.head_dim) for heads in (self.heads, self._kv_heads))
        if num_modules == 3:
            return (_wide(self.heads, shape.head_dim * (1 + shape.gated_q)),), (kv,), (kv,)
        sizes = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return ((q, _moved(kv, sizes[0]), _moved(kv, sum(sizes))),)


def _share(total: int, size: int, number: int) -> range:
    return range(number * (total // size), (number + 1) * (total // size))


def _wide(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _moved(part: range, by: int) -> range:
    return range(part.start + by, part.stop + by)
