# SPDX-License-Identifier: Apache-2.0
"""`max_lora_rank`: each reader refuses an adapter above the limit, with rank and limit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.peft.file_check import bad_adapters, check_adapter
from moe_lora.adapters.peft.reader import bare_layers, pack_state_dict, read_adapter
from moe_lora.core.errors import AdapterError
from tests.families import make_adapter


@pytest.fixture(scope="module", params=["mixtral", "llama"])
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family, checkpoint, tmp_path_factory) -> Path:
    return make_adapter(family, checkpoint(family), tmp_path_factory.mktemp("ranks") / "a")


@pytest.fixture(scope="module")
def rank(folder, family, shape_of) -> int:
    return read_adapter(folder, shape_of(family), torch.float32).max_lora_rank


@pytest.fixture
def ways(folder, family, shape_of) -> list[Callable[[int | None], object]]:
    """The readers of an adapter, each called with a limit."""
    shape = shape_of(family)
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    return [
        lambda limit: read_adapter(folder, shape, torch.float32, max_lora_rank=limit),
        lambda limit: check_adapter(folder, shape, max_lora_rank=limit),
        lambda limit: bare_layers(folder, shape, torch.float32, max_lora_rank=limit),
        lambda limit: pack_state_dict(tensors, config, shape, torch.float32, "a", limit),
        lambda limit: AdapterContents(shape, torch.float32, max_lora_rank=limit).read("a", str(folder)),
    ]


def test_a_larger_rank_is_refused_and_the_limit_itself_is_not(ways, rank):
    for read in ways:
        for limit in (None, rank, rank + 1):
            read(limit)
        for limit in (1, rank - 1):
            told = f"the LoRA rank {rank} is above max_lora_rank={limit}"
            with pytest.raises(AdapterError, match=re.escape(told)) as caught:
                read(limit)
            assert f"--max-lora-rank {rank} or more" in str(caught.value)


def test_only_the_adapters_above_the_limit_are_bad(folder, family, shape_of, rank):
    pairs = [("a", str(folder)), ("b", str(folder))]
    assert bad_adapters(pairs, shape_of(family), max_lora_rank=rank) == {}
    assert set(bad_adapters(pairs, shape_of(family), max_lora_rank=rank - 1)) == {"a", "b"}


def test_the_largest_rank_of_a_pattern_counts(checkpoint, shape_of, tmp_path):
    place = make_adapter("llama", checkpoint("llama"), tmp_path / "a", rank_pattern={"q_proj": 16}, r=2)
    check_adapter(place, shape_of("llama"), max_lora_rank=16)
    with pytest.raises(AdapterError, match="rank 16 is above max_lora_rank=15"):
        check_adapter(place, shape_of("llama"), max_lora_rank=15)


def test_nothing_of_a_refused_adapter_is_kept(folder, family, shape_of, rank, tmp_path):
    store = HostStore(tmp_path / "store")
    contents = AdapterContents(shape_of(family), torch.float32, store, max_lora_rank=rank - 1)
    with pytest.raises(AdapterError, match="max_lora_rank"):
        contents.read("a", str(folder))
    assert contents.read_all([("a", str(folder))], leave_out_bad=True) == []
    assert not [one for one in store.directory.rglob("*") if one.is_file()]
