# SPDX-License-Identifier: Apache-2.0
"""lora_B of expert parameters grouped by expert: served where the file says so, refused where it may be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.adapters.peft.reader import pack_state_dict, read_adapter
from moe_lora.api import Registry, register_adapter
from moe_lora.cli.adapters import adapters
from moe_lora.core.errors import AdapterError
from tests.adapters.dense import assert_same_deltas, packed_deltas
from tests.families import NUM_EXPERTS, NUM_LAYERS, make_adapter

FUSED_FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")
RANK = 3
UNSLOTH = {"base_model_class": "X", "parent_library": "x", "unsloth_fixed": True}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory):
    """family → (tensors, config) of an adapter that PEFT saved: rank-major."""
    made = {}

    def read(family: str = "mixtral"):
        if family not in made:
            folder = tmp_path_factory.mktemp(f"saved-{family}") / "a"
            made[family] = _parts(make_adapter(family, checkpoint(family), folder, lora_rank=RANK))
        tensors, config = made[family]
        return dict(tensors), dict(config)

    return read


def _parts(folder: Path):
    return load_file(folder / WEIGHTS_FILE), json.loads((folder / CONFIG_FILE).read_text())


def _grouped(tensors: dict[str, torch.Tensor], only: str = "lora_B") -> dict[str, torch.Tensor]:
    """The same adapter with the experts' columns grouped by expert, moved one by one."""
    result = dict(tensors)
    for key, b in tensors.items():
        if ".experts" in key and only in key and "lora_B" in key:
            result[key] = torch.empty_like(b)
            for expert in range(NUM_EXPERTS):
                for r in range(RANK):
                    result[key][:, expert * RANK + r] = b[:, r * NUM_EXPERTS + expert]
    return result


def _detail(**layouts: str) -> dict:
    parameters = {name: {"lora_B_layout": value, "num_experts": 4} for name, value in layouts.items()}
    return {"lora_A_layout": "grouped_by_expert", "parameters": parameters}


def _refusal(tensors, config, shape) -> str:
    with pytest.raises(AdapterError) as caught:
        pack_state_dict(tensors, config, shape, torch.float32, "a")
    return str(caught.value)


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_unsloth_experts_without_a_stated_layout_are_refused_with_the_way_out(family, saved, shape_of):
    tensors, config = saved(family)
    message = _refusal(tensors, config | {"auto_mapping": UNSLOTH}, shape_of(family))
    for part in (
        "auto_mapping.unsloth_fixed",
        "experts.",
        "lora_B.",
        "2026.9.6",
        "UNSLOTH_MOE_LORA_MERGED=1",
    ):
        assert part in message
    for stated in ('"lora_B_layout": "grouped_by_expert"', '"rank_major"'):
        assert stated in message


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_columns_stated_as_grouped_compute_what_rank_major_ones_do(family, saved, shape_of):
    tensors, config = saved(family)
    shape = shape_of(family)
    expected = packed_deltas(pack_state_dict(tensors, config, shape, torch.float32, "a"), shape)
    stated = config | {"auto_mapping": UNSLOTH, "lora_B_layout": "grouped_by_expert"}
    packed = pack_state_dict(_grouped(tensors), stated, shape, torch.float32, "a")
    assert_same_deltas(packed_deltas(packed, shape), expected)
    wrongly = pack_state_dict(_grouped(tensors), config, shape, torch.float32, "a")
    with pytest.raises(AssertionError):
        assert_same_deltas(packed_deltas(wrongly, shape), expected)


def test_grouped_columns_with_a_and_b_exchanged_compute_the_same(saved, shape_of):
    tensors, config = saved()
    shape = shape_of("mixtral")
    expected = packed_deltas(pack_state_dict(tensors, config, shape, torch.float32, "a"), shape)
    exchanged = dict(tensors)
    for key in [key for key in tensors if ".experts" in key and "lora_A" in key]:
        key_b = key.replace("lora_A", "lora_B")
        a, b = tensors[key], tensors[key_b]
        by_expert = b.view(b.shape[0], RANK, NUM_EXPERTS).permute(2, 1, 0)
        exchanged[key] = by_expert.reshape(NUM_EXPERTS * RANK, b.shape[0]).contiguous()
        exchanged[key_b] = a.t().contiguous()
    stated = config | {"lora_B_layout": "grouped_by_expert"}
    packed = pack_state_dict(exchanged, stated, shape, torch.float32, "a")
    assert_same_deltas(packed_deltas(packed, shape), expected)


@pytest.mark.parametrize(
    "stated",
    [
        {"lora_B_layout": "rank_major"},
        {"unsloth_fused_expert_lora": _detail(gate_up_proj="rank_major", down_proj="rank_major")},
        {"auto_mapping": UNSLOTH | {"lora_B_layout": "rank_major"}},
    ],
)
def test_a_stated_rank_major_layout_is_served_as_pefts(stated, saved, shape_of):
    tensors, config = saved()
    shape = shape_of("mixtral")
    plain = pack_state_dict(tensors, config, shape, torch.float32, "a")
    marked = pack_state_dict(tensors, config | {"auto_mapping": UNSLOTH} | stated, shape, torch.float32, "a")
    assert marked.content_hash == plain.content_hash


def test_each_parameter_is_read_in_its_own_stated_layout(saved, shape_of):
    tensors, config = saved()
    shape = shape_of("mixtral")
    plain = pack_state_dict(tensors, config, shape, torch.float32, "a")
    # The bare key is that of down_proj, the one defined last.
    mixed = _grouped(tensors, only=".experts.lora_B")
    detail = _detail(gate_up_proj="rank_major", down_proj="grouped_by_expert")
    packed = pack_state_dict(mixed, config | {"unsloth_fused_expert_lora": detail}, shape, torch.float32, "a")
    assert packed.content_hash == plain.content_hash


@pytest.mark.parametrize(
    ("marks", "told"),
    [
        ({"lora_B_layout": "expert_major"}, "'expert_major'"),
        ({"lora_B_layout": 3}, "lora_B_layout=3"),
        ({"unsloth_fused_expert_lora": _detail(gate_up_proj="mixed", down_proj="rank_major")}, "'mixed'"),
        ({"unsloth_fused_expert_lora": _detail(gate_up_proj="rank_major")}, "without lora_B_layout"),
        ({"unsloth_fused_expert_lora": []}, "must be an object"),
        (
            {"unsloth_fused_expert_lora": _detail() | {"lora_A_layout": "rank_major"}},
            "lora_A_layout='rank_major'",
        ),
        (
            {
                "lora_B_layout": "rank_major",
                "unsloth_fused_expert_lora": _detail(gate_up_proj="grouped_by_expert"),
            },
            "two layouts",
        ),
    ],
)
def test_layouts_that_are_unknown_or_in_conflict_are_refused(marks, told, saved, shape_of):
    tensors, config = saved()
    assert told in _refusal(tensors, config | {"auto_mapping": UNSLOTH} | marks, shape_of("mixtral"))


@pytest.mark.parametrize("family", ["llama", *FUSED_FAMILIES, "dbrx"])
def test_unsloth_adapters_of_attention_only_are_served(family, checkpoint, shape_of, tmp_path):
    folder = make_adapter(family, checkpoint(family), tmp_path / "a", targets=("qkv", "o"))
    tensors, config = _parts(folder)
    plain = pack_state_dict(tensors, config, shape_of(family), torch.float32, "a")
    marks = {"auto_mapping": UNSLOTH, "lora_B_layout": None, "unsloth_fused_expert_lora": None}
    marked = pack_state_dict(tensors, config | marks, shape_of(family), torch.float32, "a")
    assert marked.content_hash == plain.content_hash


def test_unsloth_experts_with_one_column_each_are_served(checkpoint, shape_of, tmp_path):
    folder = make_adapter("mixtral", checkpoint("mixtral"), tmp_path / "a", lora_rank=1)
    tensors, config = _parts(folder)
    packed = pack_state_dict(
        tensors, config | {"auto_mapping": UNSLOTH}, shape_of("mixtral"), torch.float32, "a"
    )
    assert len(packed.layers) == NUM_LAYERS


@pytest.mark.parametrize("family", ["mixtral", "dbrx"])
def test_unsloth_experts_in_forms_of_one_order_are_served(family, checkpoint, shape_of, tmp_path):
    """Mixtral's with one module per expert, DBRX's with the experts stacked in rows."""
    form = "per_expert" if family == "mixtral" else "fused"
    tensors, config = _parts(make_adapter(family, checkpoint(family), tmp_path / "a", form=form))
    marked = config | {"auto_mapping": UNSLOTH}
    assert pack_state_dict(tensors, marked, shape_of(family), torch.float32, "a").max_lora_rank == 4


def test_the_folder_is_refused_by_the_check_the_registry_and_the_reader(
    saved, checkpoint, shape_of, tmp_path
):
    tensors, config = saved()
    folder = tmp_path / "adapters" / "helper"
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(config | {"auto_mapping": UNSLOTH}))
    with pytest.raises(AdapterError, match=rf"{folder}.*unsloth_fixed"):
        read_adapter(folder, shape_of("mixtral"), torch.float32)
    model = checkpoint("mixtral")
    with Registry(tmp_path / "registry", create=True) as registry:
        with pytest.raises(AdapterError, match=r"unsloth_fixed"):
            register_adapter(registry, "helper", folder, model_dir=model)
        assert registry.adapters() == []
    checked = CliRunner().invoke(adapters, ["check", str(folder.parent), "--model", str(model)])
    assert checked.exit_code == 1
    assert "helper: error:" in checked.output
    assert "unsloth_fixed" in checked.output
