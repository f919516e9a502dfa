# SPDX-License-Identifier: Apache-2.0
"""Rows that other ranks computed arrive bit for bit, however the experts are chosen."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from moe_lora.core.errors import EngineDeadError
from moe_lora.engine.ranks import exchange
from moe_lora.engine.ranks.exchange import RankSums, ReduceExchange, RowExchange, open_group
from tests.patience import PATIENCE_S

CPU = torch.device("cpu")
NUM_EXPERTS, TOP_K, WIDTH = 12, 3, 10
WAYS = {"rows": lambda group: RowExchange(group, NUM_EXPERTS), "reduce": ReduceExchange}


def on_ranks(size: int, work, folder: Path, *timeout_s: float) -> list:
    """work(group) on each rank of a new group, each in a thread; their results in rank order."""

    def open_and_work(dist_rank: int):
        return work(open_group(folder / "meet", dist_rank, size, CPU, *timeout_s))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(open_and_work, range(size)))


def on_ranks_soon(work, folder: Path) -> None:
    """As `on_ranks` for two ranks that wait for answers for a short time: longer, if they had to wait so long
    for each other's group."""
    for limit_s in (0.5, 5.0, 50.0, PATIENCE_S):
        (folder / str(limit_s)).mkdir()
        with suppress(EngineDeadError):
            on_ranks(2, work, folder / str(limit_s), limit_s)
            return
    raise AssertionError("the ranks do not meet")


def routing(kind: str, num_tokens: int) -> torch.Tensor:
    """[T, K] expert ids, ascending, the last token being padding."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    if kind == "one_rank":
        scores[:, TOP_K:] = -1
    ids = scores.topk(TOP_K, dim=1).indices.sort(dim=1).values.int()
    ids[-1] = -1
    return ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["spread", "one_rank"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_every_rank_ends_up_with_all_rows(way, size, kind, dtype, tmp_path):
    batches = []
    for num_tokens in (1, 2, 33):
        ids = routing(kind, num_tokens)
        full = torch.randn(ids.numel(), WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
        full[:, 0], full[:, 1] = -0.0, float("inf")
        full[ids.view(-1) < 0] = 0
        batches.append((ids, full))

    def work(group):
        filler = WAYS[way](group)
        found = []
        for ids, full in batches:
            own = (ids.view(-1) >= 0) & (ids.view(-1) // (NUM_EXPERTS // size) == group.rank())
            y = torch.where(own[:, None], full, 0)
            filler.fill(y, ids)
            found.append(y)
        return found

    for found in on_ranks(size, work, tmp_path):
        for y, (_, full) in zip(found, batches, strict=True):
            assert torch.equal(y.view(torch.uint8), full.view(torch.uint8))


def test_own_rows_go_once_to_each_other_rank(tmp_path):
    size, ids = 3, routing("spread", 33)

    def work(group):
        filler = RowExchange(group, NUM_EXPERTS)
        filler.fill(torch.zeros(ids.numel(), WIDTH), ids)
        return filler.num_messages, filler.sent_bytes

    flat = ids.view(-1)
    for dist_rank, (num_messages, sent_bytes) in enumerate(on_ranks(size, work, tmp_path)):
        num_rows = int(((flat >= 0) & (flat // (NUM_EXPERTS // size) == dist_rank)).sum())
        assert num_messages == size - 1
        assert sent_bytes == (size - 1) * num_rows * WIDTH * 4


def test_rank_that_stays_away_is_an_error_not_a_hang(tmp_path):
    ids = torch.tensor([[0, 5, 11]], dtype=torch.int32)

    def work(group):
        if group.rank() == 0:
            with pytest.raises(EngineDeadError, match="restart the instance"):
                RowExchange(group, NUM_EXPERTS).fill(torch.zeros(TOP_K, WIDTH), ids)
        return group

    on_ranks_soon(work, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_summands_are_added_in_rank_order_in_one_round_or_two(size, dtype, tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(size)
    batches = [torch.randn(size, num_rows, 12, generator=generator).to(dtype) for num_rows in (1, 5, 64)]
    small, large = batches[1][0].nbytes, batches[2][0].nbytes
    monkeypatch.setattr(exchange, "TWO_ROUNDS_BYTES", large)

    def work(group):
        sums, found = RankSums(group), []
        for parts in batches:
            y = parts[group.rank()].clone()
            before = sums.sent_bytes, sums.num_messages
            sums.add_up(y)
            found.append((y, sums.sent_bytes - before[0], sums.num_messages - before[1]))
        return found

    for found in on_ranks(size, work, tmp_path):
        for (y, _, _), parts in zip(found, batches, strict=True):
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            assert torch.equal(y, total.to(dtype))
        assert found[1][1:] == ((size - 1) * small, size - 1)
        if size > 2:
            assert found[2][1:] == (2 * (size - 1) * large // size, 2 * (size - 1))


@pytest.mark.parametrize("vocab_size", [12, 11, 9, 5])
def test_logits_of_all_ranks_come_side_by_side_to_the_first(vocab_size, tmp_path):
    size, whole = 4, torch.randn(5, vocab_size)
    share = -(-vocab_size // size)

    def work(group):
        own = whole[:, group.rank() * share : (group.rank() + 1) * share]
        sums = RankSums(group)
        assert sums.gather(own[:0], vocab_size).shape == (0, vocab_size)
        return sums.gather(own.contiguous(), vocab_size)

    first, *others = on_ranks(size, work, tmp_path)
    assert torch.equal(first, whole)
    assert all(other.shape == whole.shape for other in others)


def test_logits_are_written_where_they_are_wanted_and_at_the_first_rank_alone(tmp_path):
    size, whole = 3, torch.randn(2, 8)

    def work(group):
        own = whole[:, group.rank() * 3 : (group.rank() + 1) * 3].contiguous()
        out = torch.full_like(whole, 7)
        assert RankSums(group).gather(own, 8, out) is out
        return out

    first, *others = on_ranks(size, work, tmp_path)
    assert torch.equal(first, whole)
    assert all((other == 7).all() for other in others)


def test_rank_that_sends_no_summand_is_an_error_not_a_hang(tmp_path):
    def work(group):
        if group.rank() == 0:
            with pytest.raises(EngineDeadError, match="restart the instance"):
                RankSums(group).add_up(torch.zeros(3, WIDTH))
        return group

    on_ranks_soon(work, tmp_path)
