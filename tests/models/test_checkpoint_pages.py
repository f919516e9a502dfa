# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from moe_lora.core.host import resident_bytes
from moe_lora.models.checkpoint import MappedFile

SIZE = 1 << 24


@pytest.fixture
def tensors():
    return {
        "a": torch.arange(SIZE, dtype=torch.float32),
        "b": torch.randn(3, 5).bfloat16(),
        "c": torch.empty(0, 4),
    }


@pytest.fixture
def file(tensors, tmp_path):
    save_file(tensors, tmp_path / "a.safetensors")
    return MappedFile(tmp_path / "a.safetensors")


def test_tensors_are_those_of_the_file_before_and_after_a_release(file, tensors):
    for _ in range(2):
        assert all(torch.equal(file.tensor(key), tensor) for key, tensor in tensors.items())
        file.will_read(tensors)
        file.release(tensors)


def test_a_release_gives_the_pages_back(file, tensors):
    mapped = file.tensor("a")
    before = resident_bytes()
    assert float(mapped.sum()) > 0
    assert resident_bytes() - before > 3 * SIZE
    file.release(["a"])
    assert resident_bytes() - before < SIZE


def test_a_whole_tensor_is_read_into_place_and_others_do_not_fit(file, tensors):
    for key in ("a", "b"):
        out = torch.zeros_like(tensors[key])
        assert file.fits(key, out)
        file.read_into(key, out)
        assert torch.equal(out, tensors[key])
    assert not file.fits("b", torch.empty(3, 5))
    assert not file.fits("b", torch.empty(5, 3, dtype=torch.bfloat16))
    assert not file.fits("b", torch.empty(5, 3, dtype=torch.bfloat16).T)
    assert not file.fits("c", torch.empty(0, 4))
