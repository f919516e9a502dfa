# SPDX-License-Identifier: Apache-2.0
"""Kernels around one-sided puts: waits, admission of rows, addition of answers."""

from __future__ import annotations

import threading
import time

import pytest
import torch

pytest.importorskip("triton")
from moe_lora.kernels.triton import exchange
from moe_lora.kernels.triton.exchange import ENDED, LOST, STALE, WORDS, Signals

I64 = torch.int64


def zeros(device, *shape, dtype=I64):
    return torch.zeros(*shape, dtype=dtype, device=device)


def test_waits_count_on_from_each_signal_of_a_row(device):
    words, expected, state = zeros(device, 9 * WORDS), zeros(device, 9), zeros(device, 1)
    for turn in (1, 2):
        words[2 * WORDS], words[5 * WORDS] = 8 * turn, 8 * turn + 3
        exchange.launch_wait(Signals(words, expected, range(2, 8, 3)), 8, state, 1000)
        assert expected.tolist() == [0, 0, 8 * turn, 0, 0, 8 * turn, 0, 0, 0]
    assert not int(state)


def test_a_wait_ends_when_the_signal_comes(device):
    words, expected, state = torch.zeros(WORDS, dtype=I64), zeros(device, 1), zeros(device, 1)
    words = words.pin_memory() if device.type == "cuda" else words

    def come() -> None:
        for value in (3, 8):
            time.sleep(0.05)
            words[0] = value

    thread = threading.Thread(target=come)
    thread.start()
    exchange.launch_wait(Signals(words, expected, range(1)), 8, state, exchange.NO_BOUND)
    assert not int(state)
    assert int(words[0]) == 8
    thread.join()


def test_a_wait_is_given_up_after_its_bound_and_none_holds_up_what_follows(device):
    words, expected, state = zeros(device, 2 * WORDS), zeros(device, 2), zeros(device, 1)
    exchange.launch_wait(Signals(words, expected, range(1)), 8, state, 20)
    assert int(state) == LOST
    exchange.launch_wait(Signals(words, expected, range(1, 2)), 8, state, exchange.NO_BOUND)
    state.fill_(ENDED)
    exchange.launch_wait(Signals(words, expected, range(1, 2)), 8, state, exchange.NO_BOUND)
    assert int(state) == ENDED | LOST


def test_missing_rows_of_any_block_make_the_state_stale_and_later_waits_go_on(device):
    words, expected, state = zeros(device, 4 * WORDS), zeros(device, 4), zeros(device, 1)
    words[::WORDS] = 2
    status = zeros(device, 2, 2, 2)
    numbers = range(2, 4)
    exchange.launch_wait(Signals(words, expected, numbers), 2, state, 10, (status, 2))
    assert not int(state)
    status[1, 1, 0] = 3
    words[::WORDS] = 4
    exchange.launch_wait(Signals(words, expected, numbers), 2, state, 10, (status, 2))
    assert int(state) == STALE
    assert expected.tolist() == [0, 0, 4, 4]


def frame_of(device, rows: list[tuple[int, int]]) -> torch.Tensor:
    slots, generations = zip(*rows, strict=True)
    # What lies behind a frame is of an earlier, longer step.
    return torch.tensor([len(rows), *slots, *generations, 1, 1, 1], dtype=I64, device=device)


def test_rows_are_admitted_to_slots_whose_layer_is_there(device):
    generation = torch.tensor([7, 9, 4], dtype=I64, device=device)
    loaded = torch.tensor([[7, 7], [9, 2], [4, 0]], dtype=I64, device=device)
    frame = frame_of(device, [(0, 7), (-1, 0), (1, 9), (0, 6), (5, 1)])
    token_slots, missing = torch.full((8,), 3, dtype=torch.int32, device=device), zeros(device, 1)
    for layer, slots, total in ((0, [0, -1, 1, -1, -1], 2), (1, [0, -1, -1, -1, -1], 5)):
        exchange.launch_admit(
            *(frame, generation, loaded, layer, token_slots, missing, zeros(device, 1), 5, not layer)
        )
        assert token_slots.tolist() == [*slots, -1, -1, -1]
        assert int(missing) == total, "slot 0 had 6 before, there is no slot 5; slot 1 lacks layer 1"


def test_admission_waits_for_a_layer_on_its_way_and_not_for_one_that_left(device):
    if device.type == "cuda":
        pytest.skip("the host's thread writes tables of the host")
    generation, loaded = torch.tensor([7, 9]), torch.zeros(2, 1, dtype=I64)
    frame = frame_of(device, [(0, 7), (1, 9)])
    token_slots, missing = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=I64)

    def come() -> None:
        time.sleep(0.05)
        generation[1] = 10
        time.sleep(0.05)
        loaded[0, 0] = 7

    thread = threading.Thread(target=come)
    thread.start()
    state = torch.zeros(1, dtype=I64)
    places = (frame, generation, loaded, 0, token_slots, missing, state)
    exchange.launch_admit(*places, exchange.NO_BOUND, True)
    thread.join()
    assert token_slots.tolist() == [0, -1, -1, -1]
    assert int(missing) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [None, 2])
def test_answers_are_added_to_the_rows_that_asked(top_k, dtype, device):
    generator = torch.Generator().manual_seed(0)
    num_rows, width = 5 * (top_k or 1), 700
    y = torch.randn(num_rows, width + 9, generator=generator).to(device, dtype)[:, 3:-6]
    delta = torch.randn(num_rows, width, generator=generator).to(device, dtype)
    frame = frame_of(device, [(0, 1), (-1, 0), (2, 1), (1, 1), (-1, 0)])
    wanted = torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool).repeat_interleave(top_k or 1)
    ids = None
    if top_k:
        ids = torch.tensor([[3, 0], [1, 2], [-1, -1], [5, -1], [0, 1]], dtype=torch.int32, device=device)
        wanted &= (ids >= 0).cpu().view(-1)
    expected = torch.where(wanted[:, None].to(device), y + delta, y)
    exchange.launch_add_rows(y, delta, frame, ids)
    # The interpreter cuts bf16 off instead of rounding it.
    within = 2**-7 if dtype == torch.bfloat16 and device.type == "cpu" else 0.0
    torch.testing.assert_close(y, expected, rtol=within, atol=0.0)
    assert torch.equal(y[~wanted], expected[~wanted])
