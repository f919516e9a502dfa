# SPDX-License-Identifier: Apache-2.0
"""Page-locked memory as a CUDA device would see it, with a stand-in for the calls of CUDA's runtime."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

from moe_lora.kernels.page_locked import Staging, page_locked

CUDA = torch.device("cuda", 0)


@pytest.fixture
def registered(monkeypatch):
    """Start -> bytes that are page-locked now."""
    found: dict[int, int] = {}

    def register(start: int, num_bytes: int, flags: int) -> int:
        found[start] = num_bytes
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda start: found.pop(start) * 0
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def check(code: int) -> None:
        if code:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "check_error", check)
    return found


def test_as_many_bytes_are_locked_as_are_asked_for_and_until_nobody_holds_them(registered):
    num_bytes = 5_000_000
    memory = page_locked(num_bytes, CUDA)
    assert list(registered.values()) == [num_bytes]
    assert memory.shape == (num_bytes,)
    assert memory.data_ptr() % 4096 == 0
    memory.fill_(7)
    pages = memory.view(-1, 1000)
    del memory
    gc.collect()
    assert registered
    assert pages[-1].tolist() == [7] * 1000
    del pages
    gc.collect()
    assert not registered


def test_memory_that_can_not_be_locked_is_an_error(registered, monkeypatch):
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        page_locked(1000, CUDA)


class FakeEvent:
    """Notes what a buffer's event is used for."""

    noted: list[tuple[str, int]] = []  # noqa: RUF012

    def synchronize(self) -> None:
        self.noted.append(("wait", id(self)))

    def record(self) -> None:
        self.noted.append(("record", id(self)))


@pytest.mark.parametrize("num_bytes", [0, 1, 64, 65, 1000])
def test_bytes_arrive_and_no_buffer_is_filled_before_it_was_read(num_bytes, monkeypatch):
    pinned = []
    empty = torch.empty

    def page_locked_by_torch(*size: int, pin_memory: bool = False, **more) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*size, **more)

    monkeypatch.setattr(torch, "empty", page_locked_by_torch)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.noted.clear()
    staging = Staging(64)
    assert pinned == [True, True]
    source = torch.arange(num_bytes).to(torch.uint8)
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    staging.copy(source, target)
    assert torch.equal(source, target)
    kinds, sides = [kind for kind, _ in FakeEvent.noted], [side for _, side in FakeEvent.noted]
    assert kinds == ["wait", "record"] * -(-num_bytes // 64)
    for step in range(0, len(sides) - 2, 2):
        assert sides[step] == sides[step + 1] != sides[step + 2]
