# SPDX-License-Identifier: Apache-2.0
"""Names of tensors under wrappers: read as the plain names are, or refused with the prefix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora.adapters.peft.file_check import check_adapter
from moe_lora.adapters.peft.reader import pack_state_dict, read_adapter
from moe_lora.core.errors import AdapterError
from tests.families import make_adapter
from tests.grids import with_quick

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT = "base_model.model."

pytestmark = pytest.mark.filterwarnings("ignore")


def below_layer(segment: str) -> Callable[[str], str]:
    """A wrapper around each layer, as FSDP and activation checkpointing add."""
    return lambda key: key.replace("layers.0.", f"layers.0.{segment}.").replace(
        "layers.1.", f"layers.1.{segment}."
    )


def in_front(prefix: str) -> Callable[[str], str]:
    return lambda key: prefix + key


def inside(prefix: str) -> Callable[[str], str]:
    return lambda key: key.replace(PEFT, PEFT + prefix, 1)


READ = {
    "torch.compile outside": in_front("_orig_mod."),
    "torch.compile inside": inside("_orig_mod."),
    "torch.compile of each layer": below_layer("_orig_mod"),
    "DataParallel": in_front("module."),
    "FSDP": lambda key: below_layer("_fsdp_wrapped_module")(inside("_fsdp_wrapped_module.")(key)),
    "activation checkpointing": below_layer("_checkpoint_wrapped_module"),
    "Lightning Fabric": in_front("_forward_module."),
    "three at once": lambda key: (
        "module._orig_mod." + below_layer("_fsdp_wrapped_module._checkpoint_wrapped_module")(key)
    ),
    "a wrapper in one layer only": lambda key: key.replace("layers.1.", "layers.1._orig_mod."),
    "a wrapper around lora_A": lambda key: key.replace("lora_A.", "lora_A._fsdp_wrapped_module."),
    "a PeftModel in a PeftModel": in_front(PEFT),
    "three PeftModels": in_front(2 * PEFT),
    "a PeftModel in a compiled PeftModel": in_front(PEFT + "_orig_mod."),
    "no prefix": lambda key: key.removeprefix(PEFT),
    "LoraModel's state dict": lambda key: key.removeprefix("base_model."),
    "the adapter's name": lambda key: key.replace(".weight", ".default.weight"),
    "the adapter's name below a wrapper": lambda key: "module." + key.replace(".weight", ".default.weight"),
}
LANGUAGE = {
    "a multimodal model": lambda key: key.replace("model.layers", "model.language_model.layers"),
    "an older multimodal model": lambda key: key.replace("model.layers", "language_model.model.layers"),
    "a compiled multimodal model": lambda key: (
        "_orig_mod." + key.replace("model.layers", "model.language_model.layers")
    ),
}


@pytest.fixture(scope="module", params=with_quick(["llama", "mixtral", "dbrx"], ("mixtral", "dbrx")))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def plain(family, checkpoint, tmp_path_factory) -> Path:
    return make_adapter(family, checkpoint(family), tmp_path_factory.mktemp("plain") / "a", lora_rank=3)


def renamed(source: Path, target: Path, name: Callable[[str], str], **config: Any) -> Path:
    target.mkdir()
    fields = json.loads((source / CONFIG).read_text()) | config
    (target / CONFIG).write_text(json.dumps(fields))
    tensors = load_file(source / WEIGHTS)
    save_file({name(key): tensor for key, tensor in tensors.items()}, target / WEIGHTS)
    return target


def refusal(path: Path, shape) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(path, shape, torch.float32)
    with pytest.raises(AdapterError) as without_torch:
        check_adapter(path, shape)
    assert str(without_torch.value) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", READ)
def test_known_wrappers_are_read_away(case, family, plain, shape_of, tmp_path):
    path = renamed(plain, tmp_path / "a", READ[case])
    wanted = read_adapter(plain, shape_of(family), torch.float32)
    found = read_adapter(path, shape_of(family), torch.float32)
    assert found.content_hash == wanted.content_hash
    state = {READ[case](key): tensor for key, tensor in load_file(plain / WEIGHTS).items()}
    config = json.loads((plain / CONFIG).read_text())
    packed = pack_state_dict(state, config, shape_of(family), torch.float32, "a")
    assert packed.content_hash == wanted.content_hash


@pytest.mark.parametrize("case", LANGUAGE)
@pytest.mark.parametrize("targets", ["q_proj", "regular expression", "full names"])
def test_the_language_model_of_a_multimodal_wrapper_is_served_with_a_warning(
    case, targets, checkpoint, shape_of, tmp_path
):
    plain = make_adapter("llama", checkpoint("llama"), tmp_path / "plain", targets=("qkv",))
    tensors = load_file(plain / WEIGHTS)
    full = sorted({LANGUAGE[case](key).partition(".lora_")[0].partition(PEFT)[2] for key in tensors})
    named = {
        "q_proj": ["q_proj", "k_proj", "v_proj"],
        "regular expression": r".*language_model.*\.(?:q|k|v)_proj",
        "full names": full,
    }
    path = renamed(plain, tmp_path / "a", LANGUAGE[case], target_modules=named[targets])
    found = read_adapter(path, shape_of("llama"), torch.float32)
    assert found.content_hash == read_adapter(plain, shape_of("llama"), torch.float32).content_hash
    assert any("multimodal wrapper" in warning for warning in found.warnings)
    assert not any("match nothing" in warning for warning in found.warnings)


def test_a_wrapper_is_told_and_a_plain_file_has_no_word_of_it(family, plain, shape_of, tmp_path):
    assert read_adapter(plain, shape_of(family), torch.float32).warnings == ()
    path = renamed(plain, tmp_path / "a", READ["torch.compile outside"])
    [warning] = read_adapter(path, shape_of(family), torch.float32).warnings
    assert "_orig_mod" in warning
    assert "torch.compile" in warning


def test_a_pattern_that_reads_two_ways_with_and_without_the_wrapper_is_refused(
    checkpoint, shape_of, tmp_path
):
    plain = make_adapter("llama", checkpoint("llama"), tmp_path / "plain", targets=("qkv",))
    fsdp, patterns = READ["FSDP"], {"layers.0.self_attn.q_proj": 1}
    path = renamed(plain, tmp_path / "a", fsdp, alpha_pattern=patterns)
    message = refusal(path, shape_of("llama"))
    assert "alpha_pattern" in message
    assert "_fsdp_wrapped_module" in message
    both = renamed(plain, tmp_path / "b", fsdp, alpha_pattern={"q_proj": 1})
    wanted = renamed(plain, tmp_path / "c", lambda key: key, alpha_pattern={"q_proj": 1})
    packed = [read_adapter(one, shape_of("llama"), torch.float32) for one in (both, wanted)]
    assert packed[0].content_hash == packed[1].content_hash


@pytest.mark.parametrize("case", ["a multimodal model", "an older multimodal model"])
def test_a_pattern_is_of_the_name_in_the_file_of_a_multimodal_model(case, checkpoint, shape_of, tmp_path):
    plain = make_adapter("llama", checkpoint("llama"), tmp_path / "plain", targets=("qkv",))
    name, q_proj = LANGUAGE[case], "model.layers.0.self_attn.q_proj"
    path = renamed(plain, tmp_path / "a", name, alpha_pattern={name(q_proj): 1, q_proj + "$": 7})
    wanted = renamed(plain, tmp_path / "b", lambda key: key, alpha_pattern={q_proj: 1})
    packed = [read_adapter(one, shape_of("llama"), torch.float32) for one in (path, wanted)]
    assert packed[0].content_hash == packed[1].content_hash


def test_a_pattern_that_reads_two_ways_below_a_wrapped_multimodal_model_is_refused(
    checkpoint, shape_of, tmp_path
):
    plain = make_adapter("llama", checkpoint("llama"), tmp_path / "plain", targets=("qkv",))
    patterns = {"language_model.layers.0.self_attn.q_proj": 1}
    path = renamed(
        *(plain, tmp_path / "a"),
        lambda key: READ["FSDP"](LANGUAGE["a multimodal model"](key)),
        alpha_pattern=patterns,
    )
    message = refusal(path, shape_of("llama"))
    assert "alpha_pattern" in message
    assert "_fsdp_wrapped_module" in message


def only_in_layer(layer: int, name: Callable[[str], str]) -> Callable[[str], str]:
    return lambda key: name(key) if f"layers.{layer}." in key else key


REFUSED = {
    "an unknown wrapper": (in_front("student."), "student.", False),
    "an unknown wrapper inside": (inside("policy."), "'policy.model.'", False),
    "a model without its head": (
        lambda key: key.replace("model.model.layers", "model.layers"),
        "AutoModel",
        False,
    ),
    "a vision tower": (
        lambda key: key.replace("model.layers.1.", "model.visual.blocks.1."),
        "multimodal wrapper",
        False,
    ),
    "two prefixes": (
        only_in_layer(1, LANGUAGE["a multimodal model"]),
        "two prefixes ('base_model.model.model.language_model.' and 'base_model.model.model.')",
        False,
    ),
    "half in a PeftModel": (only_in_layer(1, in_front(PEFT)), "two prefixes", False),
    "two adapters": (
        only_in_layer(1, lambda key: key.replace(".weight", ".other.weight")),
        "two adapters",
        False,
    ),
    "a layer beyond the base's, below a wrapper": (
        lambda key: "module." + key.replace("layers.1.", "layers.7."),
        "layer 7 is out of range",
        True,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_prefixes_are_refused_by_name(case, checkpoint, shape_of, tmp_path):
    plain = make_adapter("llama", checkpoint("llama"), tmp_path / "plain", targets=("qkv", "o"))
    name, said, other_base = REFUSED[case]
    message = refusal(renamed(plain, tmp_path / "a", name), shape_of("llama"))
    assert said in message
    assert ("the base it was trained for" in message) is other_base


def test_one_tensor_with_and_without_a_wrapper_is_refused_with_both_names(checkpoint, shape_of, tmp_path):
    plain = make_adapter("llama", checkpoint("llama"), tmp_path / "plain", targets=("qkv",))
    tensors = load_file(plain / WEIGHTS)
    key = min(tensors)
    save_file(tensors | {f"module.{key}": tensors[key] + 1}, plain / WEIGHTS)
    message = refusal(plain, shape_of("llama"))
    assert f"module.{key}" in message
    assert "have one place in the model" in message


STRANGERS = {
    "flattened by FSDP": ("_fsdp_wrapped_module._flat_param", "FSDP"),
    "mlx-lm": ("model.layers.0.self_attn.q_proj.lora_a", "mlx-lm"),
    "kohya": ("lora_unet_mid.lora_down.weight", "diffusers and kohya"),
    "a classifier": (f"{PEFT}score.weight", "a classifier or a value model"),
    "a value head": ("v_head.summary.weight", "a classifier or a value model"),
    "the whole model": (f"{PEFT}model.layers.0.self_attn.q_proj.base_layer.weight", "holds a whole model"),
    "the whole merged model": ("model.layers.0.self_attn.q_proj.weight", "holds a whole model"),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_strangers_are_named(case, checkpoint, shape_of, tmp_path):
    plain = make_adapter("llama", checkpoint("llama"), tmp_path / "plain", targets=("qkv",))
    key, said = STRANGERS[case]
    save_file(load_file(plain / WEIGHTS) | {key: torch.ones(2, 2)}, plain / WEIGHTS)
    message = refusal(plain, shape_of("llama"))
    assert said in message
    assert key in message


UNGATHERED = {
    "all empty": lambda tensors: {key: torch.zeros(0) for key in tensors},
    "one empty": lambda tensors: tensors | {min(tensors): torch.zeros(0)},
    "no rows": lambda tensors: {key: tensor[:0] for key, tensor in tensors.items()},
    "no columns": lambda tensors: {key: tensor[:, :0] for key, tensor in tensors.items()},
    "flat parts": lambda tensors: {key: tensor.flatten()[::2] for key, tensor in tensors.items()},
    "none": lambda tensors: {},
}


@pytest.mark.parametrize("case", UNGATHERED)
def test_tensors_saved_without_gathering_are_named_so(case, checkpoint, shape_of, tmp_path):
    plain = make_adapter("llama", checkpoint("llama"), tmp_path / "plain", targets=("qkv",))
    tensors = UNGATHERED[case](load_file(plain / WEIGHTS))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, plain / WEIGHTS)
    message = refusal(plain, shape_of("llama"))
    assert "without gathering" in message or "leave such a file" in message
    assert "DeepSpeed" in message
    assert "another base" not in message


def test_a_whole_compiled_model_out_of_a_training_loop_is_read(checkpoint, shape_of, tmp_path):
    from peft import PeftModel

    from tests.families import load_model

    plain = make_adapter("llama", checkpoint("llama"), tmp_path / "plain", targets=("qkv",))
    model = PeftModel.from_pretrained(load_model(checkpoint("llama")), plain)
    state = {f"_orig_mod.module.{key}": tensor for key, tensor in model.state_dict().items()}
    packed = pack_state_dict(state, model.peft_config, shape_of("llama"), torch.float32, "a")
    assert packed.content_hash == read_adapter(plain, shape_of("llama"), torch.float32).content_hash
