# SPDX-License-Identifier: Apache-2.0
"""Kernels that put, over a stand-in for NVSHMEM's calls that promises no more than these do.

(Started by `tests/kernels/triton/test_in_interpreter.py`.)
"""

from __future__ import annotations

import time

import pytest
import torch

from bench.gpu.exchange_parts import send_and_receive
from moe_lora.dist.transport.device_puts import PUT_BLOCKS, STATUS_BYTES, WORDS_PER_SIGNAL, AnswerRows
from moe_lora.kernels.triton.configs import interpreted
from moe_lora.kernels.triton.exchange import ENDED
from tests.patience import PATIENCE_S

from . import symmetric_memory
from .peers import pattern

pytestmark = pytest.mark.skipif(not interpreted(), reason="in a process of its own, with TRITON_INTERPRET=1")
SIZE, SIGNAL = 1 << 16, 3


@pytest.fixture
def group(tmp_path):
    """Member 0 of two; the other only has memory."""
    symmetric_memory.install()
    for number in range(2):
        with open(tmp_path / f"0.{number}", "wb") as file:
            file.truncate(SIZE + 64 * (SIGNAL + 1))
    found = symmetric_memory.StandInGroup(tmp_path, 0, 2, longest_s=0.02)
    yield found
    symmetric_memory._groups.remove(found)


def peers_memory(group) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and signal words of member 1."""
    memory = torch.from_numpy(group._heaps[0].members[1])
    return memory[:SIZE], memory[SIZE:].view(torch.int64)


def until(word: torch.Tensor, value: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while int(word) < value:
        assert time.monotonic() < deadline_s, f"{int(word)} after 20 s"
        time.sleep(0.0005)
    assert int(word) == value


@pytest.mark.parametrize("sizes", [(1,), (15, 130), (16 * PUT_BLOCKS,), (5000, 1), (4096, 20_001)])
def test_who_sees_the_signal_sees_all_pieces(sizes, group):
    window = group.alloc(SIZE, SIGNAL + 1)
    there, words = peers_memory(group)
    word, places = words[SIGNAL * WORDS_PER_SIGNAL], [(256 + 30_000 * i, n) for i, n in enumerate(sizes)]
    for use in (1, 2):
        window.bytes[:] = pattern(SIZE, use)
        expected = there.clone()
        for start, size in places:
            expected[start : start + size] = window.bytes[start : start + size]
        group.put_pieces(window, places, SIGNAL, 1)
        until(word, use * PUT_BLOCKS * len(sizes))
        assert torch.equal(there, expected), "and nothing else"
    assert group.network.num_overtaken > 0
    assert torch.equal(window.bytes, pattern(SIZE, 2)), "a put writes its peer's copy only"


def test_client_and_server_of_one_process_exchange_what_they_put(tmp_path):
    """As `bench.gpu` times on two streams: here one after the other."""
    symmetric_memory.install()
    alone = symmetric_memory.StandInGroup(tmp_path, 0, 1, longest_s=0.001)
    window = alone.alloc(2 * 4096, 2)
    state = torch.zeros(1, dtype=torch.int64)
    send, receive = send_and_receive(alone, window, 4096, state)
    for use in (1, 2):
        for number in (0, 1):
            send(number)
            receive(number)
        assert [window.read_signal(number) for number in (0, 1)] == [use * PUT_BLOCKS] * 2
    assert not state.any()
    symmetric_memory._groups.remove(alone)


def answer(window, ids, token_slots: list[int], generations: list[int], **fields) -> AnswerRows:
    num_tokens = len(generations)
    top_k = 1 if ids is None else ids.shape[1]
    values = torch.arange(len(token_slots) * top_k * 40, dtype=torch.float32).view(-1, 40) + 1
    rows = window.bytes[512 : 512 + values.nbytes].view(torch.float32).view(-1, 40).copy_(values)
    frame = torch.tensor([num_tokens, *token_slots[:num_tokens], *generations])
    given = {
        "first_expert": 0,
        "end_expert": 0,
        "generation": torch.tensor([5, 6]),
        "missing": torch.zeros(1, dtype=torch.int64),
        "state": torch.zeros(1, dtype=torch.int64),
        "over": ENDED,
    }
    slots = torch.tensor(token_slots, dtype=torch.int32)
    return AnswerRows(rows=rows, token_slots=slots, ids=ids, top_k=top_k, frame=frame, **(given | fields))


def put(group, window, given: AnswerRows) -> tuple[torch.Tensor, int]:
    """Rows at the peer once it was told, and how many it was told are missing."""
    there, words = peers_memory(group)
    status_at = 40_000
    group.put_rows(window, given, status_at, SIGNAL, 1)
    until(words[SIGNAL * WORDS_PER_SIGNAL], PUT_BLOCKS)
    status = there[status_at : status_at + PUT_BLOCKS * STATUS_BYTES].view(torch.int64)[::2]
    return there[512 : 512 + given.rows.nbytes].view(torch.float32).view(given.rows.shape), int(status.sum())


def test_rows_of_own_experts_and_admitted_tokens_arrive_before_the_signal(group):
    window = group.alloc(SIZE, SIGNAL + 1)
    group.network.holds_plain = True
    ids = torch.tensor([[0, 3], [2, -1], [3, 1], [0, 2]], dtype=torch.int32)
    given = answer(window, ids, [0, -1, 1, -1], [5, 5, 6], first_expert=2, end_expert=4)
    there, num_missing = put(group, window, given)
    wanted = [1, 4]
    assert torch.equal(there[wanted], given.rows[wanted])
    there[wanted] = 0
    assert not there.any()
    assert not num_missing


def test_rows_that_left_meanwhile_are_told_of_beside_those_that_were_missing_before(group):
    window = group.alloc(SIZE, SIGNAL + 1)
    missing = torch.tensor([2])
    given = answer(window, None, [0, 1, 1, -1], [5, 5, 6, 0], missing=missing)
    assert put(group, window, given)[1] == 3


def test_nothing_is_put_once_the_session_is_over(group):
    window = group.alloc(SIZE, SIGNAL + 1)
    given = answer(window, None, [0, 1], [5, 6], state=torch.tensor([ENDED]))
    group.put_rows(window, given, 40_000, SIGNAL, 1)
    time.sleep(0.05)
    assert not any(memory.any() for memory in peers_memory(group))


def test_without_quiet_the_signal_would_come_first(group):
    """What this file relies on shows when it is missing."""
    window = group.alloc(SIZE, SIGNAL + 1)
    group.network.quiet_works, group.network.holds_plain = False, True
    given = answer(window, None, [0, 1] * 30, [5, 6] * 30)
    there, _ = put(group, window, given)
    assert not torch.equal(there, given.rows)
