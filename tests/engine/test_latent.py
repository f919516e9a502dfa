# SPDX-License-Identifier: Apache-2.0
"""Engines of models with latent attention: what pages hold, what answers, what is refused."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from moe_lora import LLM
from moe_lora.config import EngineConfig
from moe_lora.core.attention_shapes import LATENT_SITES
from moe_lora.core.errors import ConfigError
from moe_lora.core.partition import Layout, Partition
from moe_lora.core.wrong_files import read_config
from moe_lora.engine.ranks.rank import check_layers
from moe_lora.families import shape_of
from moe_lora.models.loader import load_model
from moe_lora.models.quantised_weight import QuantisedWeight
from tests.families import make_checkpoint
from tests.grids import diagonal
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.models.generated_code import captured_graphs
from tests.stored_checkpoints import stored_pair

from .test_recurrent import answers_as_peft


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("latent") / "base")


@pytest.mark.parametrize(
    ("ways", "buckets"),
    [
        pytest.param(captured_graphs, (8,), id="graphs"),
        pytest.param(nullcontext, None, id="generated", marks=pytest.mark.slow),
    ],
)
def test_compiled_steps_answer_as_peft_does(ways, buckets, served):  # noqa: F811
    """ways: of running a graph."""
    with ways():
        answers_as_peft(served("deepseek_v3"), eager=False, decode_buckets=buckets)


def test_steps_ahead_answer_as_peft_does(served):  # noqa: F811
    answers_as_peft(served("deepseek_v3"), eager=True, async_scheduling="on")


def test_two_ranks_with_half_of_the_experts_each_answer_as_peft_does(served):  # noqa: F811
    answers_as_peft(served("deepseek_v2"), eager=True, expert_parallel=2, max_num_seqs=8)


def test_merged_weights_answer_as_peft_does(served):  # noqa: F811
    stats = answers_as_peft(served("glm4_moe_lite"), eager=True, batching="merged")
    assert stats.steps_merged > 0


def test_pages_hold_one_latent_per_token(base):
    shape = shape_of(read_config(base))
    assert shape.kv_bytes_per_token() == shape.num_layers * (14 + 6) * 4
    with LLM(base, dtype="float32", eager=True, block_size=16) as llm:
        assert llm.client.core.adapters.page_bytes == 16 * shape.kv_bytes_per_token()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_workers": 1}, "host_workers=1 compute no deltas of kv_b_proj"),
        ({"tensor_parallel": 2}, "tensor_parallel=2 and Multi-head Latent Attention do not go together"),
    ],
)
def test_parts_without_latent_attention_are_refused_at_the_start(settings, message, base):
    with pytest.raises(ConfigError, match=message):
        LLM(base, dtype="float32", eager=True, **settings)


def test_a_device_without_a_kernel_is_refused(base):
    with pytest.raises(ConfigError, match="device='cuda' has no kernel of Multi-head Latent Attention"):
        check_layers(EngineConfig(model_dir=str(base)), shape_of(read_config(base)), "cuda")


def test_a_lora_server_is_refused(base):
    with pytest.raises(ConfigError, match="only an instance computes the deltas of kv_b_proj"):
        Partition(shape_of(read_config(base)), Layout(ep=1, pp=1), 1)


@pytest.mark.parametrize(
    ("kind", "dtype"), diagonal(("fp8", "torchao-int8"), (torch.float32, torch.bfloat16))
)
def test_quantised_projections_of_heads_are_dequantised_at_load(kind, dtype, base, tmp_path):
    stored, plain = stored_pair(base, kind, tmp_path)
    expected = dict(load_model(plain, dtype, torch.device("cpu")).named_parameters())
    found = load_model(stored, dtype, torch.device("cpu"))
    for site in LATENT_SITES:
        name = f"layers.1.attention.{site}.weight"
        assert torch.equal(dict(found.named_parameters())[name], expected[name])
    assert isinstance(found.layers[1].attention.q_b.weight, QuantisedWeight)
