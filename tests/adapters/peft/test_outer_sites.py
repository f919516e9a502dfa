# SPDX-License-Identifier: Apache-2.0
"""LoRA on the vocabulary head and on the embedding, against the weights that peft merges."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.peft.file_check import bad_adapters
from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.adapters.peft.reader import bare_layers, pack_state_dict, read_adapter
from moe_lora.core.errors import AdapterError
from tests.adapters.dense import assert_same_deltas, packed_deltas, peft_deltas
from tests.families import ALL_FAMILIES, load_model, make_adapter

pytestmark = pytest.mark.filterwarnings("ignore")
HEAD = "base_model.model.lm_head."
EMBEDDINGS = {"dbrx": "wte"}


def outer_adapter(family, base, path, *modules, **config):
    """An adapter on attention, with these modules outside the layers."""
    names = [EMBEDDINGS.get(family, one) if one == "embed_tokens" else one for one in modules]
    attention = ["Wqkv"] if family == "dbrx" else ["q_proj", "o_proj"]
    return make_adapter(
        family, base, path, target_modules=[*attention, *names], target_parameters=None, **config
    )


def change(path, tensors=None, config=None):
    """Rewrite the folder's files in place."""
    if tensors is not None:
        save_file(tensors(load_file(path / WEIGHTS_FILE)), path / WEIGHTS_FILE)
    if config is not None:
        fields = json.loads((path / CONFIG_FILE).read_text())
        (path / CONFIG_FILE).write_text(json.dumps(fields | config))
    return path


# gemma4's head is the embedding, so a merge changes both at once.
@pytest.mark.parametrize(
    ("modules", "family"),
    [
        pytest.param(
            modules, family, marks=() if len(modules) == 2 or family == "llama" else pytest.mark.slow
        )
        for modules in (("lm_head",), ("embed_tokens",), ("lm_head", "embed_tokens"))
        for family in ALL_FAMILIES
        if family != "gemma4"
    ],
)
def test_pairs_outside_the_layers_pack_as_peft_merges(family, modules, checkpoint, shape_of, tmp_path):
    patterns = {"rank_pattern": {"lm_head": 3}, "alpha_pattern": {"lm_head": 5}, "use_rslora": True}
    adapter = outer_adapter(family, checkpoint(family), tmp_path / "a", *modules, **patterns)
    shape = shape_of(family)
    packed = read_adapter(adapter, shape, torch.float32)
    assert_same_deltas(packed_deltas(packed, shape), peft_deltas(family, checkpoint(family), adapter))
    assert set(modules) <= set(packed.targets)
    bare = bare_layers(adapter, shape, torch.float32)
    assert [layer.nbytes for layer in bare] == [layer.nbytes for layer in packed.layers]
    assert all(torch.equal(one.table, layer.table) for one, layer in zip(bare, packed.layers, strict=True))


def test_all_linear_leaves_both_out_and_a_pair_beyond_it_is_refused(checkpoint, shape_of, tmp_path):
    adapter = outer_adapter("llama", checkpoint("llama"), tmp_path / "a", "lm_head")
    change(adapter, config={"target_modules": "all-linear"})
    with pytest.raises(AdapterError, match="no target_modules"):
        read_adapter(adapter, shape_of("llama"), torch.float32)


def test_the_head_by_tinkers_name_is_the_same_head(checkpoint, shape_of, tmp_path):
    shape = shape_of("llama")
    base = checkpoint("llama")
    plain = make_adapter("llama", base, tmp_path / "plain", target_modules=[*SEVEN, "lm_head"])
    expected = read_adapter(plain, shape, torch.float32)
    tinker = make_adapter("llama", base, tmp_path / "tinker", target_modules=[*SEVEN, "lm_head"])
    change(tinker, renamed_head, {"target_modules": "all-linear"})
    found = read_adapter(tinker, shape, torch.float32)
    assert found.content_hash == expected.content_hash
    assert not found.base_copies


SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def renamed_head(tensors):
    """As Tinker names the head, without the base's weights."""
    return {
        key.replace(HEAD, "base_model.model.model.unembed_tokens."): tensor
        for key, tensor in tensors.items()
        if "base_layer" not in key
    }


def test_a_training_state_packs_as_the_saved_file(checkpoint, shape_of, tmp_path):
    from peft import PeftModel

    adapter = outer_adapter("mixtral", checkpoint("mixtral"), tmp_path / "a", "lm_head", "embed_tokens")
    model = PeftModel.from_pretrained(load_model(checkpoint("mixtral")), str(adapter))
    shape = shape_of("mixtral")
    packed = pack_state_dict(model.state_dict(), model.peft_config, shape, torch.float32, "a")
    assert packed.content_hash == read_adapter(adapter, shape, torch.float32).content_hash


def contents(shape, base_dir):
    return AdapterContents(shape, torch.float32, base_dir=base_dir)


@pytest.mark.parametrize("tied", [False, True])
def test_the_base_weights_that_peft_saves_beside_a_pair_must_be_the_bases(tied, tmp_path):
    from moe_lora.core.wrong_files import read_config
    from moe_lora.families import shape_of
    from tests.families import make_checkpoint

    base = make_checkpoint("llama", tmp_path / "base", tie_word_embeddings=tied)
    shape = shape_of(read_config(base))
    adapter = outer_adapter("llama", base, tmp_path / "a", "lm_head", "embed_tokens")
    keys = [key for key in load_file(adapter / WEIGHTS_FILE) if "base_layer" in key]
    assert len(keys) == 2, "peft saves both"
    assert contents(shape, base).read("a", str(adapter)).targets[-2:] == ("lm_head", "embed_tokens")
    change(adapter, lambda tensors: {k: v.bfloat16() if k in keys else v for k, v in tensors.items()})
    contents(shape, base).read("a", str(adapter))
    with pytest.raises(AdapterError, match="can't be compared"):
        contents(shape, None).read("a", str(adapter))
    for key in keys:
        damaged = outer_adapter("llama", base, tmp_path / key, "lm_head", "embed_tokens")

        def alter(tensors, key=key):
            tensors[key][5, 5] += 1
            return tensors

        change(damaged, alter)
        with pytest.raises(AdapterError, match=rf"{key}: values other than the base model's"):
            contents(shape, base).read("a", str(damaged))


def test_the_bias_that_peft_saves_beside_a_pair_must_be_the_bases(checkpoint, shape_of, tmp_path):
    base, key = checkpoint("phimoe"), f"{HEAD}base_layer.bias"
    adapter = outer_adapter("phimoe", base, tmp_path / "a", "lm_head")
    reader = contents(shape_of("phimoe"), base)
    assert key in load_file(adapter / WEIGHTS_FILE)
    assert "lm_head" in reader.read("a", str(adapter)).targets
    change(adapter, lambda tensors: {**tensors, key: tensors[key] + 1})
    with pytest.raises(AdapterError, match=rf"{key}: values other than the base model's"):
        reader.read("a", str(adapter))
    change(adapter, lambda tensors: {**tensors, key: tensors[key][:, None]})
    with pytest.raises(AdapterError, match=rf"{key}: expected shape"):
        reader.read("a", str(adapter))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_a_copy_of_no_floats_is_refused_by_name(dtype, checkpoint, shape_of, tmp_path):
    adapter = outer_adapter("llama", checkpoint("llama"), tmp_path / "a", "lm_head")
    key, shape = f"{HEAD}base_layer.weight", shape_of("llama")
    change(adapter, lambda tensors: {**tensors, key: torch.zeros(96, 32).to(dtype)})
    bad = bad_adapters([("a", str(adapter))], shape, values=True)
    assert f"{key}: dtype {dtype} is not supported" in bad["a"]
    with pytest.raises(AdapterError, match=re.escape(f"{key}: dtype {dtype} is not supported")):
        read_adapter(adapter, shape, torch.float32)


def test_a_file_cut_while_its_copies_are_compared_is_the_adapters_fault(tmp_path, monkeypatch):
    from moe_lora.adapters.peft import base_weights
    from moe_lora.core.wrong_files import read_config
    from moe_lora.families import shape_of
    from tests.families import make_checkpoint

    base = make_checkpoint("llama", tmp_path / "base")
    adapter = outer_adapter("llama", base, tmp_path / "a", "lm_head", "embed_tokens")
    header_entries = base_weights.header_entries

    def cut(file, where):
        found = header_entries(file, where)
        os.truncate(adapter / WEIGHTS_FILE, (adapter / WEIGHTS_FILE).stat().st_size // 8)
        return found

    monkeypatch.setattr(base_weights, "header_entries", cut)
    with pytest.raises(AdapterError, match=r"adapter 'a': .*cut while it was read.*once its files are whole"):
        contents(shape_of(read_config(base)), base).read("a", str(adapter))


MANGLED = {
    "transposed A": lambda t: {
        k: v.T.contiguous() if k == HEAD + "lora_A.weight" else v for k, v in t.items()
    },
    "transposed embedding": lambda t: {
        k: v.T.contiguous() if k.endswith("lora_embedding_B") else v for k, v in t.items()
    },
    "no B": lambda t: {k: v for k, v in t.items() if k != HEAD + "lora_B.weight"},
    "no pair": lambda t: {k: v for k, v in t.items() if "lora_embedding" not in k},
    "a second head": lambda t: t | {k: v + 0 for k, v in renamed_head(t).items() if "unembed" in k},
    "one row less": lambda t: {k: v[:-1].clone() if k == HEAD + "lora_B.weight" else v for k, v in t.items()},
    "a narrow copy": lambda t: t | {f"{HEAD}base_layer.weight": torch.zeros(96, 16)},
    "a bias": lambda t: t | {HEAD + "lora_B.bias": torch.zeros(96)},
    "a magnitude": lambda t: t | {HEAD + "lora_magnitude_vector": torch.ones(96)},
}


@pytest.mark.parametrize("case", MANGLED)
def test_mangled_pairs_are_refused_by_name(case, checkpoint, shape_of, tmp_path):
    adapter = outer_adapter("mixtral", checkpoint("mixtral"), tmp_path / "a", "lm_head", "embed_tokens")
    change(adapter, MANGLED[case])
    with pytest.raises(AdapterError, match=r"lm_head|embed_tokens"):
        read_adapter(adapter, shape_of("mixtral"), torch.float32)


def test_an_embedding_as_a_parameter_is_refused_with_the_way_out(checkpoint, shape_of, tmp_path):
    embedding = {"target_modules": [], "target_parameters": ["embed_tokens.weight"]}
    adapter = make_adapter("llama", checkpoint("llama"), tmp_path / "a", **embedding)
    with pytest.raises(AdapterError, match=r"embed_tokens.lora_A.* not in target_parameters"):
        read_adapter(adapter, shape_of("llama"), torch.float32)


def test_a_pair_that_peft_ties_to_a_head_is_refused(checkpoint, shape_of, tmp_path):
    adapter = outer_adapter("llama", checkpoint("llama"), tmp_path / "a", "embed_tokens")
    change(adapter, config={"ensure_weight_tying": True})
    with pytest.raises(AdapterError, match="ensure_weight_tying=True"):
        read_adapter(adapter, shape_of("llama"), torch.float32)


@pytest.mark.parametrize("damaged", ["lora_A", "lora_B", "alone"])
def test_tied_pairs_that_peft_would_overwrite_are_refused(damaged, tmp_path):
    from moe_lora.core.wrong_files import read_config
    from moe_lora.families import shape_of
    from tests.families import make_checkpoint

    base = make_checkpoint("llama", tmp_path / "base", tie_word_embeddings=True)
    shape, key = shape_of(read_config(base)), f"{HEAD}{damaged}.weight"
    adapter = outer_adapter("llama", base, tmp_path / "a", "embed_tokens", ensure_weight_tying=True)
    read_adapter(adapter, shape, torch.float32, base_dir=base)
    if damaged == "alone":
        change(adapter, lambda tensors: {k: v for k, v in tensors.items() if "embed_tokens" not in k})
    else:
        change(adapter, lambda tensors: {**tensors, key: tensors[key] + 1})
    cause = "no pair of model.embed_tokens" if damaged == "alone" else f"{key} is not .* transposed"
    with pytest.raises(AdapterError, match=cause):
        read_adapter(adapter, shape, torch.float32, base_dir=base)
    fields = json.loads((adapter / CONFIG_FILE).read_text())
    tensors = load_file(adapter / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match=cause):
        pack_state_dict(tensors, fields, shape, torch.float32, "a", base_dir=base)


def test_on_an_untied_base_a_head_without_target_is_refused(checkpoint, shape_of, tmp_path):
    base, shape = checkpoint("llama"), shape_of("llama")
    adapter = outer_adapter("llama", base, tmp_path / "a", "lm_head", "embed_tokens")
    change(adapter, config={"ensure_weight_tying": True})
    assert "lm_head" in read_adapter(adapter, shape, torch.float32, base_dir=base).targets
    change(adapter, config={"target_modules": ["q_proj", "o_proj", "embed_tokens"]})
    with pytest.raises(AdapterError, match=r"lm_head.*no target_modules"):
        read_adapter(adapter, shape, torch.float32, base_dir=base)


def test_a_saved_head_with_a_bias_is_refused_with_its_way_out(checkpoint, shape_of, tmp_path):
    base = checkpoint("phimoe")
    adapter = outer_adapter("phimoe", base, tmp_path / "a", modules_to_save=["lm_head"])
    with pytest.raises(AdapterError, match="train without lm_head in modules_to_save"):
        read_adapter(adapter, shape_of("phimoe"), torch.float32, base_dir=base)


def test_beside_a_lora_server_the_adapter_is_refused_with_the_way_out(checkpoint, shape_of, tmp_path):
    base, shape = checkpoint("llama"), shape_of("llama")
    adapter = outer_adapter("llama", base, tmp_path / "a", "lm_head")
    beside = AdapterContents(shape, torch.float32, base_dir=base, computed_by="lora_server")
    with pytest.raises(AdapterError, match=r"adapter 'a'.*without a LoRA Server"):
        beside.read("a", str(adapter))
    plain = make_adapter("llama", base, tmp_path / "plain")
    assert beside.read("plain", str(plain)).targets == ("q", "k", "v", "o", "gate", "up", "down")
