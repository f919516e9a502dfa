# SPDX-License-Identifier: Apache-2.0
"""Steps of a model with unequal layers: recurrent states, or KV heads of two sizes.

The first columns of a block table are pages of states.  With heads of two sizes a page holds the layers with
a window, then the full layers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from moe_lora.cache.orders import Namespace
from moe_lora.cache.pages import PRIVATE, BlockTable, Node, encode
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.shape import ModelShape
from moe_lora.engine.ranks.exchange import ALONE, Exchanges
from moe_lora.engine.sequence import Sequence
from moe_lora.kernels.cpu.cpu import StepAttention, delta_rule
from moe_lora.kernels.operands import KvLayout, StepTables, with_full_layers
from moe_lora.lora.backend import LoraBackend
from moe_lora.lora.row_routing import RowRouting
from moe_lora.policies.caching.caching import CachingPolicy
from moe_lora.scheduling.views import Scheduled

from .execution_context import ExecutionContext
from .runner import ModelRunner
from .step_batch import StepBatch

MARKS = 3
"""Most snapshots of a state in a step."""
SNAPSHOT = -(1 << 62)
"""Token of a snapshot's node, outside any vocabulary."""


@dataclass(eq=False)
class StateTable(BlockTable):
    """`BlockTable` with pages of a state beside the KV.

    snapshot: read by the first step, pinned until then.  kept: by number of tokens, pages of the next step's
    snapshots.  branch: blocks found without a state end there; 0: none.
    """

    state: list[int] = field(default_factory=list)
    snapshot: Node | None = None
    kept: dict[int, list[int]] = field(default_factory=dict)
    end: int = 0
    branch: int = 0
    num_done: int = 0
    is_read: bool = False

    def columns(self, start: int, end: int) -> list[int]:
        """Of a step: pages of the state after and before, then tokens and pages of snapshots."""
        before = self.state
        if self.snapshot is not None and start == self.num_matched:
            assert self.snapshot.device_pages is not None
            before, self.is_read = self.snapshot.device_pages, True
        marks = [[at, *pages] for at, pages in self.kept.items() if start < at <= end]
        return [*self.state, *before, *chain.from_iterable(marks)]


class StateCache(UnifiedCache):
    """`UnifiedCache` with the pages of a sequence's state, and snapshots of states for shared prefixes.

    A snapshot is a node below its blocks: KV of a prefix serves only with the state after the prefix.
    Prompts leave snapshots at their last block, where they part from known blocks, and at multiples of the
    tokens whose KV takes as much memory.
    """

    _make_table = StateTable

    def __init__(self, *, state_pages: int, block_size: int, policy: CachingPolicy, **settings: Any) -> None:
        settings["prefix_caching"] = settings["prefix_caching"] and policy.traits.keeps_history
        super().__init__(block_size=block_size, policy=policy, **settings)
        self._num_state_pages, self._spacing = state_pages, state_pages * block_size
        self._key = encode([SNAPSHOT] * self._spacing)

    def match(
        self, namespace: Namespace, tokens: Seq[int], now_s: float, *, again: bool = False, salt: str = ""
    ) -> BlockTable:
        """As `UnifiedCache.match`, up to a snapshot."""
        table = super().match(namespace, tokens, now_s, again=again, salt=salt)
        assert isinstance(table, StateTable)
        while table.tail is not None and not self._pin_snapshot(table, now_s):
            lost = self._shorten(table)
            if not again:
                counters = self.counters
                counters.kv_host_hit_tokens -= lost.num_tokens if lost.moving_in else 0
                counters.kv_device_hit_tokens -= 0 if lost.moving_in else lost.num_tokens
        table.num_done = table.num_matched
        table.end = max(0, len(tokens) - 1) // self._block_size * self._block_size
        if table.snapshot is not None and not again:
            self._tree.columns.visit([table.snapshot], now_s, table.tenant)
        return table

    def _take(self, table: BlockTable, path: list[Node]) -> int:
        """As `UnifiedCache._take`, up to the deepest snapshot."""
        deepest = next((i for i in range(len(path), 0, -1) if self._snapshot(path[i - 1]) is not None), 0)
        if deepest < len(path):
            assert isinstance(table, StateTable)
            table.branch = path[-1].first_token + path[-1].num_tokens
            del path[deepest:]
        return super()._take(table, path)

    def _snapshot(self, node: Node) -> Node | None:
        found = self._tree.child(node, self._key)
        return None if found is None or found.gone or found.lost else found

    def _pin_snapshot(self, table: StateTable, now_s: float) -> bool:
        assert table.tail is not None
        found = self._snapshot(table.tail)
        if found is None or (found.device_pages is None and not self._bring_in([found], now_s)):
            return False
        self._mover.pin(found)
        table.snapshot = found
        if found.moving_in:
            table.arriving.append(found)
        return True

    def _unpin_snapshot(self, table: StateTable) -> None:
        if table.snapshot is not None:
            self._mover.unpin(table.snapshot)
            table.snapshot = None

    def _shorten(self, table: StateTable) -> Node:
        """Cut the last node off a matched table."""
        tail = table.tail
        assert tail is not None
        assert tail.parent is not None
        table.num_shared -= tail.num_pages
        table.num_matched -= tail.num_tokens
        del table.pages[table.num_shared :]
        table.arriving = [node for node in table.arriving if node is not tail]
        if tail.parent.is_adapter:
            self._mover.unpin(tail)
            table.tail = None
        else:
            self._move_tail(table, tail.parent, owned=False)
        return tail

    def grow(self, table: BlockTable, num_tokens: int, now_s: float) -> bool:
        """As `UnifiedCache.grow`, for the state too, and for snapshots if there is room."""
        assert isinstance(table, StateTable)
        self._drop_kept(table)
        if not table.state:
            table.state = self._room.take_kv(self._num_state_pages, PRIVATE, now_s) or []
        has_room = bool(table.state) and super().grow(table, num_tokens, now_s)
        # The last request must not lack the pages of its own snapshot.
        if not has_room and not (self._use_up_snapshot(table) and super().grow(table, num_tokens, now_s)):
            return False
        last = min(num_tokens, table.end)
        for at in {table.branch, last // self._spacing * self._spacing, table.end}:
            if self._sharing and table.num_done < at <= last:
                pages = self._room.take_kv(self._num_state_pages, PRIVATE, now_s)
                if pages is not None:
                    table.kept[at] = pages
        return True

    def _use_up_snapshot(self, table: StateTable) -> bool:
        """Make the snapshot's pages the request's state, before its first step."""
        node = table.snapshot
        if node is None or node.pins > 1 or node.moving or table.is_read:
            return False
        self._unpin_snapshot(table)
        self._mover.device.give_back(table.state)
        table.state, node.device_pages = node.device_pages or [], []
        self._mover.device.hand_over(table.state, PRIVATE)
        self._mover.drop(node)
        return True

    def _drop_kept(self, table: StateTable) -> None:
        for pages in table.kept.values():
            self._mover.device.give_back(pages)
        table.kept.clear()

    def keep_private(self, table: BlockTable) -> None:
        """Also the state: without further snapshots, or the one that was read."""
        assert isinstance(table, StateTable)
        self._drop_kept(table)
        self._unpin_snapshot(table)
        table.end = table.branch = 0

    def publish(self, table: BlockTable, tokens: Seq[int], num_computed: int, now_s: float) -> None:
        """As `UnifiedCache.publish`, with the step's snapshots."""
        super().publish(table, tokens, num_computed, now_s)
        assert isinstance(table, StateTable)
        if table.is_read or num_computed > table.num_matched:
            self._unpin_snapshot(table)
        for at in sorted(table.kept):
            if table.num_done < at <= num_computed and self._keep(table, at, table.kept[at], now_s):
                del table.kept[at]
        self._drop_kept(table)
        table.num_done = num_computed

    def _keep(self, table: StateTable, at: int, pages: list[int], now_s: float) -> bool:
        """Put a snapshot into the tree; False without the blocks, or with a snapshot there."""
        node = table.tail
        while node is not None and not node.is_adapter and node.first_token >= at:
            node = node.parent
        if node is None or node.is_adapter or node.dying or node.first_token + node.num_tokens < at:
            return False
        if node.first_token + node.num_tokens > at:
            if node.moving:
                return False
            node = self._mover.split(node, (at - node.first_token) // self._block_size)
        found, heir = self._tree.child(node, self._key), node.heir
        if found is not None:
            if found.device_pages is not None or found.moving:
                return False
            self._mover.settle(found, pages)
            return True
        before: Node | None = node.parent
        while before is not None and not before.is_adapter and self._snapshot(before) is None:
            before = before.parent
        first = 0 if before is None or before.is_adapter else before.first_token + before.num_tokens
        found = self._tree.add_kv(node, self._key, now_s)
        node.heir, found.is_whole = heir, True
        columns = self._tree.columns
        columns.tenant[found.row] = table.tenant
        columns.first_token[found.row], columns.num_tokens[found.row] = first, at - first
        self._mover.settle(found, pages)
        return True

    def release(self, table: BlockTable, now_s: float) -> None:
        if isinstance(table, StateTable):
            self._drop_kept(table)
            self._mover.device.give_back(table.state)
            table.state = []
            self._unpin_snapshot(table)
        super().release(table, now_s)


class RecurrentContext(ExecutionContext):
    """`ExecutionContext` with states of sequences.

    `store_states` runs after the last layer, so a step that raised may run again.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        layout: KvLayout,
        backend: LoraBackend,
        shape: ModelShape,
        exchanges: Exchanges = ALONE,
    ) -> None:
        super().__init__(arena, layout, backend, exchanges, shape.num_layers)
        assert shape.delta is not None
        page_bytes = layout.page_bytes
        layers = range(shape.num_layers)
        self._kv_number = {n: i for i, n in enumerate(n for n in layers if not shape.is_recurrent(n))}
        self._state_number = {layer: i for i, layer in enumerate(shape.delta.layers)}
        self._num_pages = shape.state_pages(page_bytes)
        self._layer_pages = self._num_pages // len(shape.delta.layers)
        self._delta = shape.delta
        self._pages = arena[: arena.numel() // page_bytes * page_bytes].view(-1, page_bytes)
        self._numbers = self._pages.view(torch.float32)
        self.num_columns = 2 * self._num_pages + MARKS * (self._num_pages + 1)
        self._before = self._after = torch.empty(0)
        self._spans = torch.empty(0), torch.empty(0)
        self._changed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        """Make `step` the operations' batch.  A sequence's first step starts from zeros."""
        self._changed.clear()
        starts, ends, live = step.query_start[:-1], step.query_start[1:], step.seq_lens > 0
        num, spans = self._num_pages, (starts, ends, step.seq_lens == ends - starts)
        tables, lengths, ends = step.block_tables[live].long(), step.seq_lens[live], ends[live]
        after, self._before = tables[:, :num], tables[:, num : 2 * num]
        marks, pages = [], [after]
        for first in range(2 * num, min(tables.shape[1], self.num_columns), num + 1):
            found = tables[:, first].nonzero()[:, 0]
            marks.append(torch.stack([found, ends[found] - lengths[found] + tables[found, first]], dim=1))
            pages.append(tables[found, first + 1 : first + 1 + num])
        self._after = torch.cat(pages)
        no_marks = torch.empty(0, 2, dtype=torch.int64)
        self._spans = (
            torch.stack([part[live].long() for part in spans], dim=1),
            torch.cat([*marks, no_marks]),
        )
        kv_tables = step.block_tables[:, self.num_columns :]
        if not kv_tables.shape[1]:
            kv_tables = step.block_tables[:, :1]
        super().begin_step(replace(step, block_tables=kv_tables.contiguous()), routing)

    def abandon_step(self) -> None:
        """Drop a step that raised, with its states."""
        self._changed.clear()
        super().abandon_step()

    def paged_attention(self, layer: int, *operands: Any) -> torch.Tensor:
        return super().paged_attention(self._kv_number[layer], *operands)

    def delta_rule(
        self,
        layer: int,
        qkv: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        conv: torch.Tensor,
        v_dim: int,
    ) -> torch.Tensor:
        """`kernels.cpu.cpu.delta_rule` of each sequence."""
        first = self._state_number[layer] * self._layer_pages
        of_layer = slice(first, first + self._layer_pages)
        before = self._before[:, of_layer]
        out, states = delta_rule(qkv, log_decay, beta, conv, self._delta, self._spans, before, self._pages)
        self._changed.append((self._after[:, of_layer], states))
        return out

    def store_states(self) -> None:
        """Write the states of the step."""
        for pages, states in self._changed:
            self._numbers[pages.flatten()] = states.flatten(0, 1)
        self._changed.clear()


class RecurrentRunner(ModelRunner):
    """`ModelRunner` over a `RecurrentContext`."""

    _has_stored = False

    def can_repeat(self, error: Exception) -> bool:
        """As `ModelRunner.can_repeat`, until a rank has stored the states."""
        return super().can_repeat(error) and not self._has_stored and not self._is_with_others

    def run(self, plan: Seq[Scheduled[Sequence]], drawn: torch.Tensor | None = None) -> torch.Tensor:
        self._has_stored = False
        return super().run(plan, drawn)

    def _batch(self, plan: Seq[Scheduled[Sequence]], num_rows: int, *, any_rows: bool = False) -> StepBatch:
        """As `ModelRunner._batch`, with the columns of states first."""
        batch = super()._batch(plan, num_rows, any_rows=any_rows)
        assert isinstance(self._context, RecurrentContext)
        kv_tables = batch.tables.block_tables
        columns = torch.zeros(len(kv_tables), self._context.num_columns, dtype=torch.int32)
        for row, item in enumerate(plan):
            table, start = item.sequence.table, item.sequence.num_computed
            assert isinstance(table, StateTable)
            of_state = table.columns(start, start + item.num_tokens)
            columns[row, : len(of_state)] = torch.tensor(of_state, dtype=torch.int32)
        tables = replace(batch.tables, block_tables=torch.cat([columns, kv_tables], dim=1))
        return replace(batch, tables=tables)

    def _compute(self, batch: StepBatch) -> torch.Tensor:
        logits = super()._compute(batch)
        assert isinstance(self._context, RecurrentContext)
        self._context.store_states()
        self._has_stored = True
        return logits


class SizedContext(ExecutionContext):
    """`ExecutionContext` with KV of two layouts in each page."""

    def __init__(
        self,
        arena: torch.Tensor,
        layout: KvLayout,
        backend: LoraBackend,
        shape: ModelShape,
        exchanges: Exchanges = ALONE,
    ) -> None:
        super().__init__(arena, layout, backend, exchanges, shape.num_layers)
        assert shape.global_heads is not None
        full = set(shape.global_heads.layers)
        whole = replace(layout, num_layers=shape.num_layers, least_bytes=0)
        self._full_layout = with_full_layers(whole, shape.global_heads)[1]
        self._full_attention: StepAttention | None = None
        windowed = (layer for layer in range(shape.num_layers) if layer not in full)
        self._numbers = {layer: number for number, layer in enumerate(windowed)}
        last = self._full_layout.num_layers - len(full)
        self._full_numbers = {layer: last + i for i, layer in enumerate(sorted(full))}

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        """Make `step` the operations' batch."""
        super().begin_step(step, routing)
        self._full_attention = StepAttention(step, self._full_layout, self._arena)

    def paged_attention(self, layer: int, *operands: Any) -> torch.Tensor:
        """As `ExecutionContext.paged_attention`, by the layer's heads."""
        if layer in self._numbers:
            return super().paged_attention(self._numbers[layer], *operands)
        assert self._full_attention is not None, "begin_step comes first"
        return self._full_attention(self._full_numbers[layer], *operands)
