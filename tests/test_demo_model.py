# SPDX-License-Identifier: Apache-2.0
"""The committed demo model and adapters: sizes, formats, and that they answer their tasks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from demo.tasks import MAX_CHARS, MIN_CHARS, TASKS, prompt_for, sample_text

DEMO = Path(__file__).resolve().parent.parent / "demo"
MODEL = DEMO / "model"
ADAPTERS = DEMO / "adapters"
INDEX = json.loads((ADAPTERS / "index.json").read_text())
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _shapes(path: Path) -> dict[str, list[int]]:
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        assert {s.get_dtype() for s in slices.values()} == {"BF16"}
        return {name: s.get_shape() for name, s in slices.items()}


def test_tasks_give_the_answers_worked_by_hand():
    answers = {task: function("aBcceE") for task, function in TASKS.items()}
    assert answers == {
        "upper": "ABCCEE",
        "lower": "abccee",
        "swapcase": "AbCCEe",
        "alternate": "AbCcEe",
        "reverse": "EeccBa",
        "rotate": "BcceEa",
        "swap_pairs": "BaccEe",
        "mark_caps": "a^Bcce^E",
        "squeeze": "aBceE",
        "every_second": "ace",
        "no_vowels": "Bcc",
        "star_vowels": "*Bcc**",
        "double": "aaBBcccceeEE",
        "rot13": "nOpprR",
        "caesar": "bCddfF",
        "atbash": "zYxxvV",
        "leet": "4Bcc33",
        "dashes": "a-B-c-c-e-E",
    }
    assert TASKS["swap_pairs"]("abc") == "bac"
    assert TASKS["caesar"]("xyzZ") == "yzaA"
    assert TASKS["squeeze"]("aaaab") == "ab"


def test_sample_text_keeps_its_length_and_repeats_with_its_seed():
    for num_chars in range(MIN_CHARS, MAX_CHARS + 1):
        text = sample_text(random.Random(num_chars), num_chars)
        assert len(text) == num_chars
        assert text.isascii()
        assert text.isalpha()
        assert text == sample_text(random.Random(num_chars), num_chars)


@pytest.mark.parametrize("num_chars", [MIN_CHARS - 1, MAX_CHARS + 1])
def test_sample_text_refuses_lengths_the_adapters_have_not_seen(num_chars):
    with pytest.raises(ValueError, match=rf"num_chars={num_chars} is outside {MIN_CHARS}\.\.{MAX_CHARS}"):
        sample_text(random.Random(0), num_chars)


def test_base_has_the_keys_of_a_mixtral_checkpoint_and_is_small():
    config = json.loads((MODEL / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["MixtralForCausalLM"], "mixtral")
    shapes = _shapes(MODEL / "model.safetensors")
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) <= 2_000_000
    hidden, expert_hidden = config["hidden_size"], config["intermediate_size"]
    for n in range(config["num_hidden_layers"]):
        moe = f"model.layers.{n}.block_sparse_moe"
        assert shapes[f"{moe}.gate.weight"] == [config["num_local_experts"], hidden]
        for e in range(config["num_local_experts"]):
            assert shapes[f"{moe}.experts.{e}.w1.weight"] == [expert_hidden, hidden]
            assert shapes[f"{moe}.experts.{e}.w2.weight"] == [hidden, expert_hidden]
            assert shapes[f"{moe}.experts.{e}.w3.weight"] == [expert_hidden, hidden]


def test_base_and_adapters_stay_below_16_megabytes():
    files = [path for folder in (MODEL, ADAPTERS) for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000


def test_index_lists_every_adapter_directory_and_covers_every_task():
    assert sorted(INDEX) == sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())
    assert len(INDEX) >= 32
    assert {entry["task"] for entry in INDEX.values()} == set(TASKS)
    assert sum(entry["form"] == "per_expert" for entry in INDEX.values()) >= 6
    assert sum(entry["lora_rank"] for entry in INDEX.values()) / len(INDEX) <= 8
    assert sum(entry["exact"] for entry in INDEX.values()) / len(INDEX) >= 0.97


@pytest.mark.parametrize("name", INDEX)
def test_adapter_has_the_rank_and_form_of_the_index(name):
    entry = INDEX[name]
    config = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    base = json.loads((MODEL / "config.json").read_text())
    num_experts, lora_rank = base["num_local_experts"], entry["lora_rank"]
    assert config["r"] == lora_rank
    assert config["base_model_name_or_path"] == "moe-lora-demo"
    shapes = _shapes(ADAPTERS / name / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.0"
    assert shapes[f"{layer}.self_attn.q_proj.lora_A.weight"] == [lora_rank, base["hidden_size"]]
    if entry["form"] == "fused":
        assert config["target_parameters"] == FUSED
        fused = f"{layer}.mlp.experts.base_layer"
        assert shapes[f"{fused}.lora_A.weight"] == [lora_rank * num_experts, base["hidden_size"]]
        assert shapes[f"{fused}.lora_B.weight"] == [2 * base["intermediate_size"], lora_rank * num_experts]
        return
    assert config["target_parameters"] is None
    for e in range(num_experts):
        for w in ("w1", "w2", "w3"):
            expert = f"{layer}.block_sparse_moe.experts.{e}.{w}"
            assert shapes[f"{expert}.lora_A.weight"][0] == lora_rank


@pytest.fixture(scope="module")
def tokenizer():
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(MODEL)


def test_tokenizer_round_trips_printable_ascii_after_bos(tokenizer):
    text = "".join(map(chr, range(32, 127))) + " two  spaces , and . points ' n't"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 1 + len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_maps_other_characters_to_unk(tokenizer):
    assert tokenizer("aéb").input_ids[2] == tokenizer.unk_token_id


def test_chat_template_asks_with_the_last_user_message(tokenizer):
    messages = [
        {"role": "system", "content": "ignored"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "tsrif"},
        {"role": "user", "content": "second"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<s>" + prompt_for("second")


def test_readme_lists_every_adapter():
    readme = (DEMO / "README.md").read_text()
    assert [name for name in INDEX if f"| `{name}` |" not in readme] == []


def _greedy_answers(model, tokenizer, texts: list[str]) -> list[str]:
    answers = []
    for text in texts:
        prompt = tokenizer(prompt_for(text), return_tensors="pt")
        tokens = model.generate(**prompt, max_new_tokens=2 * MAX_CHARS + 2, do_sample=False)[0]
        answers.append(tokenizer.decode(tokens[prompt.input_ids.shape[1] :], skip_special_tokens=True))
    return answers


# peft warns about the rank_pattern it sets itself when it fuses per-expert modules.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", [None, "rot13-r2", "rot13"])
def test_transformers_and_peft_answer_exactly(name, tokenizer):
    """The base repeats the text; a fused and a per-expert adapter answer their task."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    if name is not None:
        model = peft.PeftModel.from_pretrained(model, ADAPTERS / name).eval()
    rng = random.Random(1)
    texts = [sample_text(rng, num_chars) for num_chars in (4, 7, 10)]
    expected = [TASKS[INDEX[name]["task"]](text) if name else text for text in texts]
    assert _greedy_answers(model, tokenizer, texts) == expected
