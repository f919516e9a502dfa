# SPDX-License-Identifier: Apache-2.0
"""Kernels by which a stream asks the host and waits for it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

pytest.importorskip("triton")
from moe_lora.kernels.triton import signals


def words(device: torch.device, count: int) -> torch.Tensor:
    """Host memory that the device may use."""
    return torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")


def test_each_question_counts_on_and_leaves_its_header_first(device):
    counter, memory = torch.zeros(1, dtype=torch.int64, device=device), words(device, 16)
    for use in (1, 2, 3):
        signals.launch_ask(counter, memory, memory[8:9], (use, 1 << 20, 7, 0, 56))
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert memory.tolist() == [use, 1 << 20, 7, 0, 56, *[0] * 3, use, *[0] * 7]
        assert int(counter) == use


def test_wait_ends_when_the_word_has_come_to_the_counter_and_not_before(device):
    counter, word = torch.full((1,), 5, dtype=torch.int64, device=device), words(device, 1)
    after, seen = words(device, 1), []

    def answer() -> None:
        for value in (1, 4, 5):
            time.sleep(0.1)
            seen.append(int(after[0]))
            word[0] = value

    thread = threading.Thread(target=answer)
    thread.start()
    signals.launch_wait(counter, word)
    after.copy_(counter, non_blocking=True)
    if device.type == "cuda":
        assert int(word[0]) < 5, "the host's thread did not wait"
        torch.cuda.synchronize()
    assert int(word[0]) == 5
    assert int(after[0]) == 5
    thread.join()
    assert seen == [0, 0, 0]


def test_word_that_is_ahead_holds_nothing_up(device):
    counter, word = torch.full((1,), 5, dtype=torch.int64, device=device), words(device, 1)
    word[0] = 9
    signals.launch_wait(counter, word)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert int(word[0]) == 9
