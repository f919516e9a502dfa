# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS as Unsloth splits it for training, a linear layer for each expert: served as peft computes it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_lora import LLM, SamplingParams
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape
from moe_lora.core.wrong_files import read_config
from moe_lora.families import shape_of
from tests.families import NUM_EXPERTS, VOCAB_SIZE, load_model, make_checkpoint
from tests.grids import with_quick
from tests.oracle import MIN_MARGIN

NUM_TOKENS = 24
PROMPTS = [[random.Random(n).randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (3, 11, 40)]
SPLIT = [f"{name}.{expert}" for name in ("gate_up_projs", "down_projs") for expert in range(NUM_EXPERTS)]

pytestmark = pytest.mark.filterwarnings("ignore")


class SplitExperts(nn.Module):
    """The experts of a transformers module, each a pair of linear layers; gate and up rows alternate."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self._whole = [whole]  # in a list: no submodule
        self.gate_up_projs = self._layers(whole.gate_up_proj, whole.gate_up_proj_bias)
        self.down_projs = self._layers(whole.down_proj, whole.down_proj_bias)

    @staticmethod
    def _layers(weights: torch.Tensor, biases: torch.Tensor) -> nn.ModuleList:
        layers = nn.ModuleList(nn.Linear(*weight.shape) for weight in weights)
        with torch.no_grad():
            for layer, weight, bias in zip(layers, weights, biases, strict=True):
                layer.weight.copy_(weight.T)
                layer.bias.copy_(bias)
        return layers

    def forward(self, hidden: torch.Tensor, indices: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = []
        for x, experts, weights in zip(hidden, indices.tolist(), scores, strict=True):
            outs = [
                self.down_projs[expert](self._whole[0]._apply_gate(self.gate_up_projs[expert](x)))
                for expert in experts
            ]
            rows.append(sum(weight * out for weight, out in zip(weights, outs, strict=True)))
        return torch.stack(rows)


class SplitRouter(nn.Module):
    """A transformers router with a linear layer."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.top_k = whole.top_k
        self.linear = nn.Linear(whole.hidden_dim, whole.num_experts)
        with torch.no_grad():
            self.linear.weight.copy_(whole.weight)
            self.linear.bias.copy_(whole.bias)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.linear(hidden)
        top, indices = logits.topk(self.top_k, dim=-1)
        return logits, top.softmax(dim=1), indices


def split_model(model_dir: Path) -> Any:
    model = load_model(model_dir)
    for layer in model.model.layers:
        layer.mlp.experts = SplitExperts(layer.mlp.experts)
        layer.mlp.router = SplitRouter(layer.mlp.router)
    return model.eval()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_checkpoint("gpt_oss", tmp_path_factory.mktemp("gpt_oss") / "base", seed=3)


def trained(model_dir: Path, path: Path, seed: int = 0, **config: Any) -> Any:
    """A PEFT model of the split base with random LoRA weights, saved to `path`."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(split_model(model_dir), LoraConfig(r=3, lora_alpha=6, **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if ".lora_" in name:
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise / math.sqrt(32) if "lora_A" in name else noise * 0.3)
    model.save_pretrained(str(path))
    return model.eval()


@torch.inference_mode()
def assert_greedy(model: Any, prompt: list[int], found: tuple[int, ...]) -> None:
    """Each found token is the best after those before; one pass says so, since attention looks back only."""
    assert len(found) == NUM_TOKENS
    tokens = torch.tensor([[*prompt, *found[:-1]]])
    best = model(tokens).logits[0, len(prompt) - 1 :].topk(2)
    assert best.indices[:, 0].tolist() == list(found)
    assert float((best.values[:, 0] - best.values[:, 1]).min()) > MIN_MARGIN, "choose another seed"


WAYS = {
    "experts": {"target_modules": SPLIT},
    "gate_up": {"target_modules": r".*gate_up_projs\.\d+"},
    "down": {"target_modules": r".*down_projs\.\d+"},
    "experts and attention, by a regular expression": {
        "target_modules": r".*\.(?:[qkvo]_proj|gate_up_projs\.\d+|down_projs\.\d+)"
    },
    "all-linear": {"target_modules": "all-linear"},
    "router": {"target_modules": ["router.linear", *SPLIT]},
    "router alone": {"target_modules": ["router.linear", "q_proj"]},
    "some experts": {"target_modules": ["gate_up_projs.1", "down_projs.3", "v_proj"]},
    "ranks of their own": {
        "target_modules": SPLIT,
        "rank_pattern": {"down_projs.2": 5, r"0\.mlp\.experts\.gate_up_projs\.1": 2},
        "alpha_pattern": {"gate_up_projs.0": 1},
        "use_rslora": True,
    },
}


QUICK = ("experts and attention, by a regular expression", "router")


@pytest.mark.parametrize("way", with_quick(WAYS, QUICK))
def test_tokens_are_those_of_peft_on_the_split_model(way, model_dir, tmp_path):
    model = trained(model_dir, tmp_path / "a", **WAYS[way])
    with LLM(model_dir, adapters={"a": str(tmp_path / "a")}, dtype="float32", eager=True) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        found = llm.generate(PROMPTS * 2, [*["a"] * 3, *[None] * 3], sampling)
    base = split_model(model_dir)
    for prompt, with_adapter, alone in zip(PROMPTS, found[:3], found[3:], strict=True):
        assert_greedy(model, prompt, with_adapter.token_ids)
        assert_greedy(base, prompt, alone.token_ids)
    assert any(one.token_ids != other.token_ids for one, other in zip(found[:3], found[3:], strict=True))


def shape_in(model_dir: Path) -> ModelShape:
    return shape_of(read_config(model_dir))


def test_a_split_file_without_one_expert_is_refused_by_its_name(model_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    trained(model_dir, tmp_path, target_modules=SPLIT)
    weights = tmp_path / "adapter_model.safetensors"
    left = {key: one for key, one in load_file(weights).items() if ".1.mlp.experts.down_projs.2." not in key}
    save_file(left, weights)
    with pytest.raises(AdapterError, match=r"no tensors for model\.layers\.1\.mlp\.experts\.down_projs\.2"):
        read_adapter(tmp_path, shape_in(model_dir), torch.float32)


def test_split_and_whole_experts_in_one_file_are_refused(model_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    from tests.families import make_adapter

    trained(model_dir, tmp_path / "split", target_modules=SPLIT)
    make_adapter("gpt_oss", model_dir, tmp_path / "whole", lora_rank=3, targets=("gate_up", "down"))
    weights = tmp_path / "split" / "adapter_model.safetensors"
    save_file(load_file(weights) | load_file(tmp_path / "whole" / "adapter_model.safetensors"), weights)
    with pytest.raises(AdapterError, match=r"mlp\.experts\..*lora_A"):
        read_adapter(tmp_path / "split", shape_in(model_dir), torch.float32)
