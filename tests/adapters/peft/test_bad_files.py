# SPDX-License-Identifier: Apache-2.0
"""Whatever cannot be served exactly is refused, with the file, the key and a way out."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moe_lora.adapters.peft.file_check import check_adapter
from moe_lora.adapters.peft.reader import pack_state_dict, read_adapter
from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape
from tests.families import make_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
EXPERT_A = "base_model.model.model.layers.1.block_sparse_moe.experts.2.w1.lora_A.weight"
EXPERTS = "base_model.model.model.layers.0.mlp.experts"

LLAMA = ModelShape(
    family="llama",
    num_layers=2,
    hidden_size=32,
    intermediate_size=24,
    num_experts=0,
    num_experts_per_token=0,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=96,
    max_position=256,
    dtype_bytes=4,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def per_expert(checkpoint, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("per_expert") / "good"
    return make_adapter("mixtral", checkpoint("mixtral"), path, form="per_expert")


@pytest.fixture(scope="module")
def fused(checkpoint, tmp_path_factory) -> Path:
    return make_adapter("mixtral", checkpoint("mixtral"), tmp_path_factory.mktemp("fused") / "good")


def damaged_copy(
    source: Path,
    target: Path,
    config: dict[str, Any] | None = None,
    tensors: Callable[[dict[str, torch.Tensor]], object] | None = None,
) -> Path:
    """Copy of an adapter with config fields replaced and a function applied to its tensors."""
    target.mkdir()
    fields = json.loads((source / CONFIG).read_text()) | (config or {})
    (target / CONFIG).write_text(json.dumps(fields))
    loaded = load_file(source / WEIGHTS)
    if tensors:
        tensors(loaded)
    save_file({key: tensor.contiguous() for key, tensor in loaded.items()}, target / WEIGHTS)
    return target


def refusal(path: Path, shape) -> str:
    """Why the adapter is refused, when it is loaded and when only its files are looked at."""
    with pytest.raises(AdapterError) as caught:
        read_adapter(path, shape, torch.float32)
    message = str(caught.value)
    with pytest.raises(AdapterError) as without_torch:
        check_adapter(path, shape, values=True)
    if not any(word in message for word in ("readable safetensors", "NaN", "infinite", "int64")):
        assert str(without_torch.value) == message
    return message


BAD_CONFIG = {
    "another PEFT type": ({"peft_type": "IA3"}, "peft_type='IA3'"),
    "DoRA": ({"use_dora": True}, "use_dora"),
    "trained biases": ({"bias": "all"}, "bias='all'"),
    "bias in LoRA": ({"lora_bias": True}, "lora_bias"),
    "replaced modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "transposed weights": ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    "replicated layers": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    "Megatron": ({"megatron_config": {"a": 1}}, "megatron_config"),
    "token embeddings": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "activated LoRA": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    "Arrow": ({"arrow_config": {"top_k": 1}}, "arrow_config"),
    "QALoRA": ({"use_qalora": True}, "use_qalora"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    "unknown key": ({"lora_gamma": 0.5}, "'lora_gamma'"),
    "unknown keys": ({"lora_gamma": 0, "lora_beta": [], "lora_delta": None}, "'lora_beta', 'lora_gamma':"),
    "rank zero": ({"r": 0}, "r=0"),
    "rank as text": ({"r": "8"}, "r='8'"),
    "rank true": ({"r": True}, "r=True"),
    "rank negative": ({"r": -8}, "r=-8"),
    "rank of 400 digits": ({"r": 10**400}, "r=1000"),
    "rank above any layer": ({"r": 1_000_001}, "from 1 to 1000000"),
    "rank as a float": ({"r": 8.0}, "r=8.0"),
    "rank NaN": ({"r": math.nan}, "r=nan"),
    "rank absent": ({"r": None}, "r=None"),
    "alpha infinite": ({"lora_alpha": math.inf}, "lora_alpha=inf"),
    "alpha true": ({"lora_alpha": True}, "lora_alpha=True"),
    "rank_pattern of 400 digits": ({"rank_pattern": {"q_proj": 10**400}}, "rank_pattern"),
    "rank_pattern true": ({"rank_pattern": {"q_proj": True}}, "rank_pattern"),
    "rank_pattern huge": ({"rank_pattern": {f"layers.{n}.q_proj": 4 for n in range(3000)}}, "3000 patterns"),
    "alpha_pattern NaN": ({"alpha_pattern": {"q_proj": math.nan}}, "alpha_pattern"),
    "alpha_pattern of 400 digits": ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern"),
    "layer infinite": ({"layers_to_transform": [math.inf]}, "layers_to_transform"),
    "alpha NaN": ({"lora_alpha": math.nan}, "lora_alpha"),
    "alpha too large": ({"lora_alpha": 10**400}, "lora_alpha"),
    "rank_pattern zero": ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
    "rank_pattern invalid": ({"rank_pattern": {"(": 4}}, "rank_pattern"),
    "alpha_pattern text": ({"alpha_pattern": {"q_proj": "4"}}, "alpha_pattern"),
    "target_modules number": ({"target_modules": 3}, "target_modules"),
    "target_modules invalid": ({"target_modules": "*q"}, "target_modules"),
    "target_parameters text": ({"target_parameters": "experts.down_proj"}, "target_parameters"),
    "use_rslora text": ({"use_rslora": "yes"}, "use_rslora"),
    "layer as text": ({"layers_to_transform": ["0"]}, "layers_to_transform"),
    "layers with a regex": (
        {"target_modules": ".*q_proj", "layers_to_transform": [0]},
        "layers_to_transform",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_config_that_is_not_plain_lora_is_refused(case, per_expert, shape_of, tmp_path):
    changes, key = BAD_CONFIG[case]
    path = damaged_copy(per_expert, tmp_path / "bad", config=changes)
    message = refusal(path, shape_of("mixtral"))
    assert str(path / CONFIG) in message
    assert key in message
    assert len(message) < 1000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_files_that_are_served_pass_the_check_without_torch(dtype, per_expert, fused, shape_of, tmp_path):
    shape = shape_of("mixtral")

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({key: tensor.to(dtype) for key, tensor in tensors.items()})

    for number, source in enumerate((per_expert, fused)):
        path = damaged_copy(source, tmp_path / str(number), tensors=convert)
        read_adapter(path, shape, torch.float32)
        check_adapter(path, shape, values=True)
        wrong = damaged_copy(
            path, tmp_path / f"{number}-nan", tensors=lambda t: t[min(t)].view(-1)[:1].fill_(math.nan)
        )
        assert "NaN" in refusal(wrong, shape)
        check_adapter(wrong, shape)


def test_check_of_files_imports_no_torch():
    code = "import moe_lora.adapters.peft.file_check, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_numbers_that_the_kernels_can_hold_are_served(per_expert, shape_of, tmp_path):
    for n, alpha in enumerate((0, -8, 1e-300, 1e5)):
        path = damaged_copy(per_expert, tmp_path / f"alpha{n}", config={"lora_alpha": alpha})
        assert read_adapter(path, shape_of("mixtral"), torch.float32).targets
    path = damaged_copy(per_expert, tmp_path / "big")
    (path / CONFIG).write_text((path / CONFIG).read_text().replace('"lora_alpha": 8', '"lora_alpha": 1e400'))
    assert "lora_alpha=inf" in refusal(path, shape_of("mixtral"))


def test_integers_of_thousands_of_digits_in_memory_are_refused_too():
    with pytest.raises(AdapterError, match="too many digits"):
        pack_state_dict({}, {"peft_type": "LORA", "r": 10**5000}, LLAMA, torch.float32, "x")


def test_unknown_keys_without_a_value_and_those_at_their_default_are_accepted(per_expert, shape_of, tmp_path):
    from peft import LoraConfig

    defaults = LoraConfig().to_dict()
    known = json.loads((per_expert / CONFIG).read_text())
    unset = {key: value for key, value in defaults.items() if key not in known}
    older = {"enable_lora": None, "merge_weights": False, "lora_dtype": None, "of_the_future": None}
    path = damaged_copy(per_expert, tmp_path / "defaults", config=unset | older | {"lora_beta": False})
    shape = shape_of("mixtral")
    read = read_adapter(path, shape, torch.float32)
    assert read.content_hash == read_adapter(per_expert, shape, torch.float32).content_hash
    path = damaged_copy(per_expert, tmp_path / "merged", config={"merge_weights": True})
    assert "merge_weights=True" in refusal(path, shape)


def _replace(key: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.__setitem__(key, tensor)


def _poison(key: str, value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[key].view(-1)[-1:].fill_(value)


def _add_layer_2(tensors: dict[str, torch.Tensor]) -> None:
    for key in (Q_A, Q_B):
        tensors[key.replace("layers.0", "layers.2")] = tensors[key].clone()


def _rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.__setitem__(new, tensors.pop(old))


BAD_TENSORS = {
    "B without A": (lambda t: t.pop(Q_A), (Q_B, "lora_A")),
    "A without B": (lambda t: t.pop(EXPERT_A.replace("lora_A", "lora_B")), (EXPERT_A, "lora_B")),
    "A turned": (_replace(Q_A, torch.zeros(32, 4)), (Q_A, "[4, 32]", "[32, 4]")),
    "A of another rank": (_replace(Q_A, torch.zeros(5, 32)), (Q_A, "[4, 32]", "[5, 32]")),
    "B of another base": (_replace(Q_B, torch.zeros(128, 4)), (Q_B, "[64, 4]", "[128, 4]")),
    "a scalar": (_replace(Q_A, torch.tensor(1.0)), (Q_A, "[]")),
    "integers": (_replace(Q_A, torch.zeros(4, 32, dtype=torch.int64)), (Q_A, "int64")),
    "NaN": (_poison(EXPERT_A, math.nan), (EXPERT_A, "NaN")),
    "infinity": (_poison(Q_B, -math.inf), (Q_A, "infinite", "lora_B")),
    "unknown tensor": (_replace("extra.weight", torch.zeros(1)), ("extra.weight",)),
    "DoRA tensor": (
        _replace(Q_A.replace("lora_A.weight", "lora_magnitude_vector"), torch.zeros(1)),
        ("lora_magnitude_vector", "DoRA"),
    ),
    "bias tensor": (
        _replace(Q_B.replace("weight", "bias"), torch.zeros(64)),
        ("lora_B.bias", "lora_bias=true"),
    ),
    "output head": (
        _replace("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 32)),
        ("lm_head.lora_A.weight", "no target_modules"),
    ),
    "resized output head": (
        _replace("base_model.model.lm_head.weight", torch.zeros(100, 32)),
        ("lm_head.weight", "[100, 32]", "96 tokens", "resized"),
    ),
    "copy of the embeddings": (
        _replace("base_model.model.model.embed_tokens.weight", torch.zeros(96, 32)),
        ("embed_tokens.weight", "save_embedding_layers=False"),
    ),
    "embedding": (
        _replace("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 96)),
        ("embed_tokens.lora_embedding_A", "no target_modules"),
    ),
    "embedding's names at the head": (
        _replace("base_model.model.lm_head.lora_embedding_B", torch.zeros(96, 4)),
        ("lm_head.lora_embedding_B", "lora_A.weight"),
    ),
    "linear layer's names at the embedding": (
        _replace("base_model.model.model.embed_tokens.lora_A.weight", torch.zeros(4, 96)),
        ("embed_tokens.lora_A.weight", "lora_embedding_A"),
    ),
    "layer out of range": (_add_layer_2, ("layers.2.", "out of range", "2 layers")),
    "module of another family": (_rename(Q_A, "transformer.h.0.attn.c_attn.lora_A.weight"), ("c_attn",)),
    "expert out of range": (
        _rename(EXPERT_A, EXPERT_A.replace("experts.2", "experts.4")),
        ("experts.4", "matches no module"),
    ),
    "one expert missing": (
        lambda t: [t.pop(EXPERT_A.replace("_A", part)) for part in ("_A", "_B")],
        ("layers.1.block_sparse_moe.experts.2.w1", "no tensors"),
    ),
    "no tensors": (lambda t: t.clear(), ("no tensors",)),
    "tensor not targeted": (
        _replace(Q_A.replace("self_attn.q_proj", "block_sparse_moe.gate"), torch.zeros(4, 32)),
        ("block_sparse_moe.gate", "target_modules"),
    ),
    "two adapters in one": (
        lambda t: t.__setitem__(Q_A.replace(".weight", ".other.weight"), t[Q_A].clone()),
        (Q_A, "two adapters"),
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_exactly_are_refused(case, per_expert, shape_of, tmp_path):
    damage, named = BAD_TENSORS[case]
    path = damaged_copy(per_expert, tmp_path / "bad", tensors=damage)
    message = refusal(path, shape_of("mixtral"))
    assert str(path / WEIGHTS) in message
    for key in named:
        assert key in message


@pytest.mark.parametrize("num_tensors", [2_000, 100_000])
def test_a_file_with_far_too_many_tensors_is_refused_by_its_header(
    num_tensors, per_expert, shape_of, tmp_path
):
    path = damaged_copy(per_expert, tmp_path / "many")
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps(
        {f"model.layers.{n}.self_attn.q_proj.lora_A.weight": entry for n in range(num_tensors)}
    )
    (path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header.encode())
    message = refusal(path, shape_of("mixtral"))
    assert str(path / WEIGHTS) in message
    assert "an adapter" in message
    assert "at most 104" in message
    lora = {f"model.layers.{n}.self_attn.q_proj.lora_A.weight": torch.zeros(0) for n in range(2_000)}
    config = json.loads((per_expert / CONFIG).read_text())
    with pytest.raises(AdapterError, match="2000 tensors"):
        pack_state_dict(lora, config, shape_of("mixtral"), torch.float32, "x")


def test_fused_expert_tensors_are_checked_as_well(fused, shape_of, tmp_path):
    shape, key = shape_of("mixtral"), f"{EXPERTS}.base_layer.lora_B.weight"
    half = damaged_copy(fused, tmp_path / "half", tensors=_replace(key, torch.zeros(24, 16)))
    assert "expected shape [48, 16]" in refusal(half, shape)
    assert key in refusal(half, shape)
    gone = damaged_copy(
        fused,
        tmp_path / "gone",
        tensors=lambda t: [t.pop(f"{EXPERTS}.base_layer.lora_{p}.weight") for p in "AB"],
    )
    assert "model.layers.0.mlp.experts.gate_up_proj" in refusal(gone, shape)
    untold = damaged_copy(fused, tmp_path / "untold", config={"target_parameters": ["experts.down_proj"]})
    assert f"{EXPERTS}.base_layer.lora_A.weight" in refusal(untold, shape)


def test_experts_in_both_forms_at_once_are_refused(per_expert, fused, shape_of, tmp_path):
    modules = {k.replace("block_sparse_moe", "mlp"): v for k, v in load_file(per_expert / WEIGHTS).items()}
    both = damaged_copy(
        fused,
        tmp_path / "both",
        config={"target_modules": json.loads((per_expert / CONFIG).read_text())["target_modules"]},
        tensors=lambda t: t.update(modules),
    )
    assert "twice" in refusal(both, shape_of("mixtral"))


def test_values_too_large_for_the_dtype_are_refused(per_expert, shape_of, tmp_path):
    path = damaged_copy(per_expert, tmp_path / "big", tensors=_poison(Q_A, 3.4e38))
    with pytest.raises(AdapterError, match="too large for torch"):
        read_adapter(path, shape_of("mixtral"), torch.bfloat16)


def test_files_that_are_missing_or_unreadable_are_named(per_expert, shape_of, tmp_path):
    shape = shape_of("mixtral")
    assert "no such folder" in refusal(tmp_path / "nowhere", shape)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty / CONFIG) in refusal(empty, shape)
    for text in ("{", "[1]", "[" * 100_000, "\udcff", '{"r": ' + "9" * 5000 + "}"):
        (empty / CONFIG).write_bytes(text.encode("utf-8", "surrogateescape"))
        assert str(empty / CONFIG) in refusal(empty, shape)
    (empty / CONFIG).write_text((per_expert / CONFIG).read_text())
    assert str(empty / WEIGHTS) in refusal(empty, shape)
    (empty / "adapter_model.bin").write_bytes(b"pickle")
    message = refusal(empty, shape)
    assert "adapter_model.bin" in message
    assert "safetensors" in message
    for content in (b"", b"\x10" * 30, (per_expert / WEIGHTS).read_bytes()[:-10]):
        (empty / WEIGHTS).write_bytes(content)
        assert str(empty / WEIGHTS) in refusal(empty, shape)


@pytest.mark.parametrize("other", ["llama", "qwen3_moe", "gpt_oss", "dbrx"])
def test_base_of_another_family_is_refused_by_config_and_by_tensors(
    other, per_expert, checkpoint, shape_of, tmp_path
):
    named = damaged_copy(
        per_expert, tmp_path / "named", config={"base_model_name_or_path": str(checkpoint(other))}
    )
    message = refusal(named, shape_of("mixtral"))
    assert "base_model_name_or_path" in message
    assert other in message
    unnamed = damaged_copy(
        per_expert, tmp_path / "unnamed", config={"base_model_name_or_path": "org/moved-away"}
    )
    refusal(unnamed, shape_of(other))


def test_base_known_only_by_another_name_is_accepted(per_expert, shape_of, tmp_path):
    for name in ("org/moved-away", "", None, "x" * 5000):
        path = damaged_copy(
            per_expert,
            tmp_path / f"moved{len(name or '-')}{name is None}",
            config={"base_model_name_or_path": name},
        )
        assert read_adapter(path, shape_of("mixtral"), torch.float32).nbytes


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("q_proj"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
READ_KEYS = (
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules", "bias"),
    *("target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"),
    *("peft_type", "base_model_name_or_path", "modules_to_save"),
)


@settings(max_examples=100, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(READ_KEYS), JSON, min_size=1, max_size=3))
def test_any_json_in_the_config_is_read_or_refused_but_never_fails_otherwise(changes):
    tensors = {f"model.layers.{i}.self_attn.q_proj.lora_A.weight": torch.ones(4, 32) for i in (0, 1)}
    tensors |= {key.replace("_A", "_B"): torch.ones(64, 4) for key in tensors}
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    try:
        packed = pack_state_dict(tensors, config | changes, LLAMA, torch.float32, "fuzzed")
    except AdapterError as error:
        message = str(error)
    else:
        message = f"fuzzed adapter has {packed.targets}"
    assert message.startswith(("adapter 'fuzzed'", "fuzzed adapter has ('q',)"))
