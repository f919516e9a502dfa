"""Rows that other ranks computed arrive bit for bit, however the experts are chosen."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moe_lora.core.errors import EngineDeadError
from moe_lora.engine.ranks import exchange
from moe_lora.engine.ranks.exchange import ReduceExchange, RowExchange, open_group

CPU = torch.device("cpu")
NUM_EXPERTS, TOP_K, WIDTH = 12, 3, 10
WAYS = {"rows": lambda group: RowExchange(group, NUM_EXPERTS), "reduce": ReduceExchange}


def on_ranks(size: int, work, folder: Path) -> list:
    """work(group) on each rank of a new group, each in a thread; their results in rank order."""
    with ThreadPoolExecutor(size) as pool:
        open_and_work = lambda dist_rank: work(open_group(folder / "meet", dist_rank, size, CPU))  # noqa: E731
        return list(pool.map(open_and_work, range(size)))


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


def test_rank_that_stays_away_is_an_error_not_a_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "TIMEOUT_S", 2.0)
    ids = torch.tensor([[0, 5, 11]], dtype=torch.int32)

    def work(group):
        if group.rank() == 0:
            with pytest.raises(EngineDeadError, match="restart the instance"):
                RowExchange(group, NUM_EXPERTS).fill(torch.zeros(TOP_K, WIDTH), ids)
        return group

    on_ranks(2, work, tmp_path)
