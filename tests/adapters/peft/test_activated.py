# SPDX-License-Identifier: Apache-2.0
"""Files of activated LoRAs: what is read, and refusals by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import SafetensorError

from moe_lora.adapters.host_store import HostStore, is_intact
from moe_lora.adapters.peft import plain
from moe_lora.adapters.peft.file_check import bad_adapters
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.cli.main import main
from moe_lora.core.errors import AdapterError
from tests.adapters.peft.test_outer_sites import change, outer_adapter
from tests.families import make_adapter

pytestmark = pytest.mark.filterwarnings("ignore")
FIELDS = {"alora_invocation_tokens": [7, 11], "task_type": "CAUSAL_LM"}


def test_invocation_tokens_are_part_of_the_content_and_stay_in_the_store(checkpoint, shape_of, tmp_path):
    shape = shape_of("qwen3_moe")
    adapter = outer_adapter("qwen3_moe", checkpoint("qwen3_moe"), tmp_path / "a", **FIELDS)
    packed = read_adapter(adapter, shape, torch.float32)
    assert packed.invocation == (7, 11)
    change(adapter, config={"alora_invocation_tokens": [7]})
    other = read_adapter(adapter, shape, torch.float32)
    change(adapter, config={"alora_invocation_tokens": None})
    plain = read_adapter(adapter, shape, torch.float32)
    assert len({one.content_hash for one in (packed, other, plain)}) == 3
    assert plain.invocation == ()
    for one in (packed, plain):
        HostStore(tmp_path / "store").put(one)
        kept = HostStore(tmp_path / "store").get(one.content_hash, "a")
        assert kept.invocation == one.invocation
        assert is_intact(kept)


def convert(source, target, base, *options):
    command = ["adapters", "convert", str(source), str(target), "--model", str(base), *options]
    return CliRunner().invoke(main, command)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_a_converted_adapter_stays_activated(family, checkpoint, shape_of, tmp_path):
    from peft import PeftConfig

    base, shape, target = checkpoint(family), shape_of(family), tmp_path / "b"
    source = make_adapter(
        family, base, tmp_path / "a", target_modules=["o_proj"], target_parameters=None, **FIELDS
    )
    assert convert(source, target, base).exit_code == 0
    packed, expected = (read_adapter(one, shape, torch.float32) for one in (target, source))
    assert packed.content_hash == expected.content_hash
    assert packed.invocation == (7, 11)
    assert PeftConfig.from_pretrained(str(target)).alora_invocation_tokens == [7, 11]
    plain = change(source, config={"alora_invocation_tokens": None})
    assert convert(plain, tmp_path / "c", base).exit_code == 0
    assert PeftConfig.from_pretrained(str(tmp_path / "c")).alora_invocation_tokens is None


@pytest.mark.parametrize("is_there", [True, False])
def test_a_full_disk_leaves_nothing_of_a_converted_adapter(is_there, checkpoint, tmp_path, monkeypatch):
    def full(_: object, path: Path, **_more: object) -> None:
        path.write_bytes(b"begun")
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    base, target = checkpoint("llama"), tmp_path / "b"
    source = outer_adapter("llama", base, tmp_path / "a")
    if is_there:
        target.mkdir()
    monkeypatch.setattr(plain, "save_file", full)
    found = convert(source, target, base)
    assert (found.exit_code, found.output.count("\n")) == (1, 1)
    assert f"{target} can't be written: Error" in found.output
    assert "No space left on device; nothing is left of it" in found.output
    assert not target.exists()


def test_an_activated_adapter_of_a_changed_base_is_not_converted(checkpoint, tmp_path):
    base = checkpoint("llama")
    initial = outer_adapter("llama", base, tmp_path / "initial")
    source = outer_adapter("llama", base, tmp_path / "a", **FIELDS)
    change(source, config={"init_lora_weights": "pissa"})
    found = convert(source, tmp_path / "b", base, "--initial", str(initial))
    assert (found.exit_code, "alora_invocation_tokens=[7, 11] with --initial" in found.output) == (1, True)
    assert not (tmp_path / "b").exists()


REFUSED = {
    "experts": ("qwen3_moe", {"target_parameters": ["experts.down_proj"]}, "experts.*dense MLPs alone"),
    "shared experts": ("qwen2_moe", {"target_modules": ["shared_expert.up_proj"]}, "shared_expert"),
    "kv_b_proj": ("deepseek_v3", {"target_modules": ["o_proj", "kv_b_proj"]}, "without kv_b_proj"),
    "the head": ("llama", {"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    "a saved head": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "lm_head"),
    "trained tokens": (
        "llama",
        {"target_modules": ["q_proj"], "trainable_token_indices": [3]},
        "embed_tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_targets_are_refused_by_name(case, checkpoint, shape_of, tmp_path):
    family, config, reason = REFUSED[case]
    fields = {"target_modules": ["q_proj"], "target_parameters": None, **config}
    adapter = make_adapter(family, checkpoint(family), tmp_path / "a", **fields)
    change(adapter, config=FIELDS)
    with pytest.raises(AdapterError, match=reason):
        read_adapter(adapter, shape_of(family), torch.float32, base_dir=checkpoint(family))


def test_more_than_1024_tokens_are_refused(checkpoint, shape_of, tmp_path):
    adapter = outer_adapter("llama", checkpoint("llama"), tmp_path / "a", **FIELDS)
    change(adapter, config={"alora_invocation_tokens": [7] * 1024})
    assert read_adapter(adapter, shape_of("llama"), torch.float32).invocation == (7,) * 1024
    change(adapter, config={"alora_invocation_tokens": [7] * 1025})
    reason = "alora_invocation_tokens has 1025 tokens, at most 1024 are read; train with a shorter invocation"
    with pytest.raises(AdapterError, match=reason):
        read_adapter(adapter, shape_of("llama"), torch.float32)
    bad = bad_adapters([("a", str(adapter))], shape_of("llama"))
    assert reason in bad["a"]


@pytest.mark.parametrize("tokens", [[7, 96], [-1], ["7"], "7", [[7]], {"a": 7}, 7, True])
def test_tokens_of_no_vocabulary_are_refused(tokens, checkpoint, shape_of, tmp_path):
    adapter = outer_adapter("llama", checkpoint("llama"), tmp_path / "a", **FIELDS)
    change(adapter, config={"alora_invocation_tokens": tokens})
    with pytest.raises(AdapterError, match="alora_invocation_tokens"):
        read_adapter(adapter, shape_of("llama"), torch.float32)
