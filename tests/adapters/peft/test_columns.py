# SPDX-License-Identifier: Apache-2.0
"""Files of DoRA and lora_bias: factors and shifts by the formula, and refusals by name."""

from __future__ import annotations

import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from cli.main import main
from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import num_table_entries, shard_layer
from moe_lora.adapters.peft.base_weights import norms
from moe_lora.adapters.peft.config import AdapterConfig
from moe_lora.adapters.peft.file_check import bad_adapters
from moe_lora.adapters.peft.files import WEIGHTS_FILE
from moe_lora.adapters.peft.reader import bare_layers, pack_state_dict, read_adapter
from moe_lora.core.errors import AdapterError, StorageError
from moe_lora.core.shard import ModelShard
from moe_lora.core.wrong_files import read_header
from tests.adapters.peft.test_outer_sites import change
from tests.adapters.peft.test_replaced import SHORTER, TRANSPOSED, also, only, without
from tests.families import load_model, make_adapter

pytestmark = pytest.mark.filterwarnings("ignore")
Q = "base_model.model.model.layers.1.self_attn.q_proj."
MAGNITUDE, BIAS = f"{Q}lora_magnitude_vector", f"{Q}lora_B.bias"
FORMS = {"dora": {"use_dora": True, "use_rslora": True}, "bias": {"lora_bias": True}}


def column_adapter(family, base, path, **config):
    """An adapter on attention."""
    attention = ["Wqkv"] if family == "dbrx" else ["q_proj", "v_proj", "o_proj"]
    config = {"target_modules": attention, "target_parameters": None, "scale": 0.5, **config}
    return make_adapter(family, base, path, **config)


def columns_of(packed, shape):
    """(layer, module) -> (factor - 1, shift) [2, O]."""
    found = {}
    for number, layer in enumerate(packed.layers):
        for site in shape.column_sites:
            for module, (name, width) in enumerate(zip(site.modules, site.out_features, strict=True)):
                _, first, lora_rank = layer.table[site.entry(module)].tolist()
                if lora_rank:
                    found[number, name] = layer.data[first : first + 2 * width].view(2, width)
    return found


@pytest.fixture
def read(checkpoint, shape_of):
    def read(adapter, family="llama", dtype=torch.float32):
        return read_adapter(adapter, shape_of(family), dtype, "a", base_dir=checkpoint(family))

    return read


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])  # without and with biases of the base
def test_columns_are_those_of_the_formula(family, form, read, checkpoint, shape_of, tmp_path):
    adapter, shape = (
        column_adapter(family, checkpoint(family), tmp_path / "a", **FORMS[form]),
        shape_of(family),
    )
    base = {key: value.double() for key, value in load_model(checkpoint(family)).state_dict().items()}
    file = {key: value.double() for key, value in load_file(adapter / WEIGHTS_FILE).items()}
    packed = read(adapter, family)
    found, plain = columns_of(packed, shape), 8 / 4**0.5 if form == "dora" else 2.0
    assert sorted(found) == [(layer, name) for layer in range(shape.num_layers) for name in "oqv"]
    for (layer, name), (gain, shift) in found.items():
        path = f"model.layers.{layer}.self_attn.{name}_proj."
        of_pair = f"base_model.model.{path}lora_"
        bias = base.get(f"{path}bias", torch.zeros(len(gain)).double())
        factor, expected = torch.ones_like(bias), None
        if form == "dora":
            delta = plain * file[f"{of_pair}B.weight"] @ file[f"{of_pair}A.weight"]
            norm = torch.linalg.norm(base[f"{path}weight"] + delta, dim=1)
            factor = file[f"{of_pair}magnitude_vector"] / norm
            expected = bias * (1 - factor)
        else:
            expected = plain * file[f"{of_pair}B.bias"]
        torch.testing.assert_close(gain.double(), factor - 1, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(shift.double(), expected, rtol=1e-4, atol=1e-5)
    assert packed.targets == ("q", "v", "o")
    assert packed.max_lora_rank == 4
    bare = bare_layers(adapter, shape, torch.float32, base_dir=checkpoint(family))
    assert [layer.nbytes for layer in bare] == [layer.nbytes for layer in packed.layers]


def test_a_plain_adapter_has_no_entry_of_columns(read, checkpoint, shape_of, tmp_path):
    shape, packed = shape_of("llama"), read(column_adapter("llama", checkpoint("llama"), tmp_path / "a"))
    assert {len(layer.table) for layer in packed.layers} == {num_table_entries(shape, shape.num_layers)}
    assert columns_of(
        read(column_adapter("llama", checkpoint("llama"), tmp_path / "d", use_dora=True)), shape
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_training_state_packs_as_the_saved_file(form, read, checkpoint, shape_of, tmp_path):
    from peft import PeftModel

    adapter = column_adapter("llama", checkpoint("llama"), tmp_path / "a", **FORMS[form])
    model = PeftModel.from_pretrained(load_model(checkpoint("llama")), str(adapter))
    args = model.state_dict(), model.peft_config, shape_of("llama"), torch.float32, "a"
    found = pack_state_dict(*args, base_dir=checkpoint("llama"))
    assert found.content_hash == read(adapter).content_hash


def test_columns_stay_in_the_store_and_are_divided_by_heads(read, checkpoint, shape_of, tmp_path):
    shape = shape_of("llama")
    packed = read(column_adapter("llama", checkpoint("llama"), tmp_path / "a", use_dora=True))
    store = HostStore(tmp_path / "store")
    store.put(packed)
    assert torch.equal(store.get(packed.content_hash, "a").layers[0].table, packed.layers[0].table)
    whole = columns_of(packed, shape)
    for dist_rank in range(2):
        shard = ModelShard(shape, tensor_parallel=2, dist_rank=dist_rank)
        entries = shape.num_entries
        part = shard_layer(packed.layers[1], shape, torch.ones(entries, dtype=torch.bool).numpy(), shard)
        data = torch.zeros(part.num_elements)
        part.copy(packed.layers[1].data, data)
        for site, held in zip(shape.column_sites[:2], shard.shape.column_sites, strict=False):
            for module, parts in enumerate(shard.outputs(site)):
                _, first, lora_rank = part.table[held.entry(module)].tolist()
                if lora_rank:
                    width = held.out_features[module]
                    expected = whole[1, site.modules[module]][:, parts[0].start : parts[0].stop]
                    assert torch.equal(data[first : first + 2 * width].view(2, width), expected)


NAN = lambda v: v * float("nan")  # noqa: E731
MANGLED = {
    "no magnitude": ("dora", without(MAGNITUDE), {}, f"{Q}lora_A.weight has no lora_magnitude_vector"),
    "a shorter magnitude": ("dora", only(MAGNITUDE, SHORTER), {}, "expected shape"),
    "a magnitude of two dims": ("dora", only(MAGNITUDE, lambda v: v[None]), {}, "expected shape"),
    "integers": ("dora", only(MAGNITUDE, lambda v: v.int()), {}, "dtype"),
    "two magnitudes": ("dora", also(f"{MAGNITUDE}.weight", 32), {}, "one place"),
    "a magnitude without a pair": (
        "dora",
        also(MAGNITUDE.replace("q_proj", "k_proj"), 16),
        {},
        "k_proj.lora_magnitude_vector has no lora_A",
    ),
    "a magnitude of another wrapper": (
        "dora",
        lambda tensors: {k.replace(MAGNITUDE, f"module.{MAGNITUDE}"): v for k, v in tensors.items()},
        {},
        "has no lora_magnitude_vector",
    ),
    "no use_dora": ("dora", None, {"use_dora": False}, "no use_dora=true"),
    "use_dora as text": ("dora", None, {"use_dora": "x" * 1000}, "use_dora"),
    "no magnitudes": (
        "dora",
        lambda tensors: {k: v for k, v in tensors.items() if "magnitude" not in k},
        {},
        "has no lora_magnitude_vector",
    ),
    "both": ("dora", None, {"lora_bias": True}, "train with one of them"),
    "a transposed A": ("dora", only(f"{Q}lora_A.weight", TRANSPOSED), {}, "expected shape"),
    "activated": ("dora", None, {"alora_invocation_tokens": [5]}, "without it"),
    "a bias beside a magnitude": ("dora", also(BIAS, 32), {}, "no lora_bias=true"),
    "no bias": ("bias", without(BIAS), {}, f"{Q}lora_A.weight has no lora_B.bias"),
    "a shorter bias": ("bias", only(BIAS, SHORTER), {}, "expected shape"),
    "no lora_bias": ("bias", None, {"lora_bias": False}, "no lora_bias=true"),
    "a bias of the base": ("bias", also(f"{Q}base_layer.bias", 32), {}, "trained biases"),
}


@pytest.mark.parametrize("case", MANGLED)
def test_mangled_columns_are_refused_by_name(case, read, checkpoint, shape_of, tmp_path):
    form, tensors, config, reason = MANGLED[case]
    adapter = column_adapter("llama", checkpoint("llama"), tmp_path / "a", **FORMS[form])
    read(adapter)
    change(adapter, tensors, config)
    with pytest.raises(AdapterError, match=reason) as refusal:
        read(adapter)
    bad = bad_adapters([("a", str(adapter))], shape_of("llama"), base_dir=checkpoint("llama"))
    assert bad == {"a": str(refusal.value)}


@pytest.mark.parametrize(("form", "key"), [("dora", MAGNITUDE), ("bias", BIAS)])
def test_values_that_are_not_finite_are_refused_by_name(form, key, read, checkpoint, shape_of, tmp_path):
    adapter = column_adapter("llama", checkpoint("llama"), tmp_path / "a", **FORMS[form])
    change(adapter, only(key, NAN))
    with pytest.raises(AdapterError, match=f"{key}.*(NaN|not finite)"):
        read(adapter)
    bad = bad_adapters([("a", str(adapter))], shape_of("llama"), values=True, base_dir=checkpoint("llama"))
    assert key in bad["a"]


def test_a_row_of_zeros_is_refused_by_name(checkpoint, shape_of, tmp_path):
    adapter = column_adapter("llama", checkpoint("llama"), tmp_path / "a", use_dora=True)
    change(adapter, only(f"{Q}lora_B.weight", torch.zeros_like))
    base = tmp_path / "base"
    base.mkdir()
    for file in checkpoint("llama").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    weights = load_file(base / WEIGHTS_FILE.replace("adapter_", ""))
    weights["model.layers.1.self_attn.q_proj.weight"][3] = 0
    save_file(weights, base / WEIGHTS_FILE.replace("adapter_", ""))
    with pytest.raises(AdapterError, match=f"{MAGNITUDE}.*are 0"):
        read_adapter(adapter, shape_of("llama"), torch.float32, base_dir=base)


REFUSED = {
    "experts": ("mixtral", {}, "experts"),
    "the head": ("llama", {"target_modules": ["q_proj", "lm_head"], "target_parameters": None}, "lm_head"),
    "kv_b_proj": ("deepseek_v3", {"target_modules": ["kv_b_proj"], "target_parameters": None}, "kv_b_proj"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_targets_are_refused_by_name(case, read, checkpoint, tmp_path):
    family, targets, named = REFUSED[case]
    adapter = make_adapter(family, checkpoint(family), tmp_path / "a", **targets)
    change(adapter, config={"use_dora": True})
    with pytest.raises(AdapterError, match=f"use_dora=True with .*{named}.*dense layers alone"):
        read(adapter, family)


def test_without_weights_of_the_base_dora_is_refused(checkpoint, shape_of, tmp_path):
    adapter = column_adapter("llama", checkpoint("llama"), tmp_path / "a", use_dora=True)
    with pytest.raises(AdapterError, match="no checkpoint"):
        read_adapter(adapter, shape_of("llama"), torch.float32)
    bias = column_adapter("llama", checkpoint("llama"), tmp_path / "b", lora_bias=True)
    assert read_adapter(bias, shape_of("llama"), torch.float32).targets == ("q", "v", "o")


@pytest.mark.parametrize(
    ("place", "said"),
    [("lora_server", "LoRA Server"), ("cuda", "--device cpu"), ("quantised", "without --quantize")],
)
@pytest.mark.parametrize("form", FORMS)
def test_elsewhere_columns_are_refused_by_name(form, place, said, checkpoint, shape_of, tmp_path):
    adapter = column_adapter("llama", checkpoint("llama"), tmp_path / "a", **FORMS[form])
    contents = AdapterContents(
        shape_of("llama"), torch.float32, base_dir=checkpoint("llama"), computed_by=place
    )
    with pytest.raises(AdapterError, match=f"use_dora and lora_bias.*{said}"):
        contents.read("a", str(adapter))


@pytest.mark.parametrize(("form", "said"), [("dora", "DoRA"), ("bias", "a bias of each lora_B")])
def test_the_commands_name_the_form(form, said, checkpoint, tmp_path):
    base = str(checkpoint("llama"))
    adapter = str(column_adapter("llama", base, tmp_path / "a", **FORMS[form]))
    found = CliRunner().invoke(main, ["adapters", "check", adapter, "--model", base])
    assert found.exit_code == 0, found.output
    assert said in found.output
    assert "cuda: no DoRA or lora_bias (refuses this adapter)" in found.output
    found = CliRunner().invoke(main, ["adapters", "convert", adapter, str(tmp_path / "b"), "--model", base])
    assert found.exit_code == 1
    assert "serve the adapter as it is" in found.output


@pytest.mark.parametrize("field", ["use_dora", "lora_bias"])
@pytest.mark.parametrize("subtracts", [False, True])
def test_pissa_with_columns_names_a_way_out_that_works(field, subtracts):
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": "pissa", field: True}
    with pytest.raises(AdapterError, match=f"{field}=true no plain pair.*merge the adapter into") as refusal:
        AdapterConfig.parse(fields, "a", subtracts)
    assert "convert" not in str(refusal.value)


def test_norms_have_the_same_bits_in_any_order_of_sums(tmp_path):
    generator = torch.Generator().manual_seed(0)
    w, a, b = (torch.randn(*size, generator=generator) for size in ((64, 4096), (16, 4096), (64, 16)))
    order = torch.randperm(4096, generator=generator)
    ranks = torch.randperm(16, generator=generator)
    found = []
    for name, weight, a_RI, b_OR in (("w", w, a, b), ("p", w[:, order], a[ranks][:, order], b[:, ranks])):
        path = tmp_path / f"{name}.safetensors"
        save_file({"w": weight.contiguous()}, path)
        found.append(norms((path, read_header(path)["w"]), a_RI, b_OR))
    assert torch.equal(*found)
    exact = torch.linalg.vector_norm(w.double() + b.double() @ a.double(), dim=1)
    torch.testing.assert_close(found[0], exact, rtol=1e-7, atol=0)


def test_a_broken_file_of_the_base_is_no_fault_of_the_adapter(checkpoint, shape_of, tmp_path):
    adapter = column_adapter("llama", checkpoint("llama"), tmp_path / "a", use_dora=True)
    base = shutil.copytree(checkpoint("llama"), tmp_path / "base")
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(
        StorageError, match=r"the base model's model.safetensors .*no fault of the"
    ) as refusal:
        read_adapter(adapter, shape_of("llama"), torch.float32, called="adapter 'a': ", base_dir=base)
    assert str(tmp_path) not in str(refusal.value)
