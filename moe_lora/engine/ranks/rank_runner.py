# SPDX-License-Identifier: Apache-2.0
"""The runner of a rank: deltas, merged weights, graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from moe_lora.adapters.packed import PackedAdapter, entries_of_experts
from moe_lora.engine.arena_size import max_model_len
from moe_lora.engine.step.execution_context import ExecutionContext
from moe_lora.engine.step.runner import ModelRunner
from moe_lora.engine.step.step_batch import StepBuffer
from moe_lora.lora.backend import LoraBackend, RoutedBackend
from moe_lora.lora.local import LocalBackend
from moe_lora.lora.row_routing import Source

from .exchange import ALONE, Exchanges
from .rank import Rank

if TYPE_CHECKING:
    from moe_lora.dist.host_workers.workers import HostWorkers
    from moe_lora.engine.merging.merged_weights import MergedWeights
    from moe_lora.engine.step.step_graphs import StepGraphs
    from moe_lora.engine.step.step_pieces import StepCapture
    from moe_lora.lora.outer import OuterDeltas

    from .followers import Followers


def make_runner(
    rank: Rank,
    exchanges: Exchanges = ALONE,
    followers: Followers | None = None,
    host: HostWorkers | None = None,
    *,
    find: Callable[[str], PackedAdapter],
) -> ModelRunner:
    """The runner of the rank's part of steps."""
    backends: dict[int, LoraBackend] = {}
    capture = _capture(rank)
    pushed = None
    if rank.lora_server is not None:
        backends[Source.LEASED] = rank.lora_server.backend
        pushed = rank.lora_server.pushed
    if capture is not None:
        from moe_lora.engine.step.step_pieces import HostCalled, between_graphs

        exchanges = between_graphs(exchanges, capture)
        backends = {source: HostCalled(one, capture) for source, one in backends.items()}
    if pushed is not None:
        backends[Source.PUSHED] = pushed
    if host is not None:
        backends[Source.HOST] = host.backend
    is_alone = capture is not None and rank.config.num_ranks == 1 and not backends
    backends[Source.LOCAL] = LocalBackend(
        rank.shard.shape, rank.arena, rank.slots, kernel=rank.config.lora_kernel, beside=is_alone
    )
    routed = RoutedBackend(backends, None if host is None else rank.present)
    backend: LoraBackend = routed
    profile = rank.config.emulation.step_profile
    if profile is not None:
        from moe_lora.lora.paced import PacedBackend

        backend = PacedBackend(backend, rank.shape, profile, remote=rank.lora_server is not None)
    layers = None
    if followers is not None and host is not None:
        layers = followers.loaded_layers(rank.slots.present, rank.shape.num_layers)
    of_step, context = _step_parts(rank, backend, exchanges)
    context.with_columns = cache(partial(_with_columns, rank, backend))
    sources = [Source.LOCAL if s.name in rank.local_sites else Source.LEASED for s in rank.shape.sites]
    return of_step(
        rank.model,
        context,
        rank.device,
        sources,
        num_taken_over=lambda: routed.num_taken_over,
        present=layers,
        eager=rank.config.eager,
        decode_buckets=rank.config.decode_buckets or (),
        announce=None if followers is None else followers.tell,
        merged=_merged_weights(rank, routed, find) if rank.merges else None,
        pushed=pushed,
        graphs=None if capture is None else _graphs(rank, capture, backends, sources),
        outer=cache(partial(_outer_deltas, rank)),
    )


def _step_parts(
    rank: Rank, backend: LoraBackend, exchanges: Exchanges
) -> tuple[type[ModelRunner], ExecutionContext]:
    """The kind of runner, and the context of steps."""
    if rank.shape.global_heads is not None:
        from moe_lora.engine.step.unequal_layers import SizedContext

        return ModelRunner, SizedContext(rank.arena, rank.layout, backend, rank.shape, exchanges)
    if rank.shape.delta is None:
        return ModelRunner, ExecutionContext(rank.arena, rank.layout, backend, exchanges)
    from moe_lora.engine.step.unequal_layers import RecurrentContext, RecurrentRunner

    return RecurrentRunner, RecurrentContext(rank.arena, rank.layout, backend, rank.shape, exchanges)


def _with_columns(rank: Rank, backend: LoraBackend) -> LoraBackend:
    from moe_lora.lora.columns import ColumnBackend

    return ColumnBackend(backend, rank.shard, rank.arena, rank.slots)


def _outer_deltas(rank: Rank) -> OuterDeltas:
    from moe_lora.lora.outer import OuterDeltas

    where = (rank.shape.num_layers, rank.arena, rank.slots, rank.config.lora_kernel)
    return OuterDeltas(rank.shard.outer_sites, *where)


def _capture(rank: Rank) -> StepCapture | None:
    """Records steps; None without CUDA graphs."""
    config = rank.config
    if rank.device.type != "cuda" or config.eager or config.emulation.step_profile is not None:
        return None
    from moe_lora.engine.step.step_pieces import CudaRecorder, StepCapture

    return StepCapture(CudaRecorder())


def _graphs(
    rank: Rank, capture: StepCapture, backends: Mapping[int, LoraBackend], sources: Sequence[Source]
) -> StepGraphs:
    """Graphs of decode steps, and of steps with prompts in an instance of one rank.

    Host workers compute prompts.
    """
    from moe_lora.engine.step.step_graphs import StepGraphs, prompt_buckets
    from moe_lora.engine.step.step_pieces import HostCalled

    config = rank.config
    hosts = {source: one for source, one in backends.items() if isinstance(one, HostCalled)}
    found = enumerate(sorted(set(sources)))
    leased = Source.PUSHED if Source.PUSHED in backends else Source.LEASED
    places = tuple((int(leased if one == Source.LEASED else one), group) for group, one in found)
    return StepGraphs(
        StepBuffer(rank.device),
        capture,
        partial(rank.slots.site_ranks, sites=(*rank.shape.sites, *rank.shape.outer_sites)),
        rows=config.decode_buckets or (),
        max_tokens=max_model_len(config, rank.shape),
        block_size=config.block_size,
        kv_tokens=rank.arena.numel() // rank.layout.page_bytes * config.block_size,
        places=places,
        hosts=hosts,
        prompt_rows=prompt_buckets(config.max_num_batched_tokens) if config.num_ranks == 1 else (),
        max_sequences=config.max_num_seqs,
    )


def _merged_weights(
    rank: Rank, backend: RoutedBackend, find: Callable[[str], PackedAdapter]
) -> MergedWeights:
    from moe_lora.engine.merging.merged_weights import MergedWeights

    leased = [i for i, site in enumerate(rank.shape.sites) if site.name not in rank.local_sites]
    return MergedWeights(
        rank.weight_merge,
        backend,
        rank.arena,
        rank.slots,
        leased=frozenset(leased),
        kept=entries_of_experts(rank.shape, rank.shard.experts) & ~rank.kept_entries(rank.dist_rank),
        find=find,
        kernel=rank.config.lora_kernel,
        verify=rank.config.verify_merge,
    )
