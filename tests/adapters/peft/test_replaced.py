# SPDX-License-Identifier: Apache-2.0
"""Replaced rows of the embedding and the head, against the weights that peft merges."""

from __future__ import annotations

import re
import shutil
import weakref

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.peft import base_weights, reader
from moe_lora.adapters.peft.base_weights import check_copies_in
from moe_lora.adapters.peft.file_check import bad_adapters
from moe_lora.adapters.peft.files import WEIGHTS_FILE
from moe_lora.adapters.peft.reader import bare_layers, pack_state_dict, read_adapter
from moe_lora.cli.main import main
from moe_lora.core.errors import AdapterError
from moe_lora.core.wrong_files import SINGLE_NAME, read_config
from moe_lora.families import shape_of as shape_in
from tests.adapters.dense import assert_same_deltas, packed_deltas, peft_deltas
from tests.adapters.peft.test_outer_sites import change, outer_adapter
from tests.families import ALL_FAMILIES, load_model, make_checkpoint
from tests.grids import with_quick

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
SAVED = "base_model.model.lm_head.weight"
MANY = list(range(90, 0, -2))
"""More tokens than the hidden size, 32."""
FORMS = {
    "tokens": {"trainable_token_indices": [5, 0, 71]},
    "many_tokens": {"trainable_token_indices": MANY},
    "by_name": {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [3, 9, 1]}},
    "same_by_name": {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [7, 3]}},
    "head_tokens": {"trainable_token_indices": {"lm_head": [3, 9]}},
    "head": {"modules_to_save": ["lm_head"]},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "both": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "head_as_target": {"modules_to_save": ["lm_head"], "modules": ["lm_head"]},
}
PER_MODULE = ("by_name", "head_tokens")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """tied -> a tiny Llama."""
    return {
        tied: make_checkpoint("llama", tmp_path_factory.mktemp("base"), tie_word_embeddings=tied)
        for tied in (False, True)
    }


def shape_at(base):
    return shape_in(read_config(base))


def read(base, adapter):
    return read_adapter(adapter, shape_at(base), torch.float32, base_dir=base)


@pytest.mark.parametrize(
    ("form", "tied"),
    # peft merges rows of a tied head alone into both: the forward pass is the oracle (tests/engine)
    [(form, tied) for form in FORMS for tied in (False, True) if not (tied and form in PER_MODULE)],
)
def test_replaced_rows_pack_as_peft_merges(form, tied, bases, tmp_path):
    base, shape = bases[tied], shape_at(bases[tied])
    config = dict(FORMS[form])
    adapter = outer_adapter("llama", base, tmp_path / "a", *config.pop("modules", ()), **config)
    packed = read(base, adapter)
    expected = peft_deltas("llama", base, adapter)
    assert_same_deltas(packed_deltas(packed, shape), expected)
    bare = bare_layers(adapter, shape, torch.float32, base_dir=base)
    assert [layer.nbytes for layer in bare] == [layer.nbytes for layer in packed.layers]
    target = tmp_path / "converted"
    command = ["adapters", "convert", str(adapter), str(target), "--model", str(base)]
    assert CliRunner().invoke(main, command).exit_code == 0
    assert_same_deltas(packed_deltas(read(base, target), shape), expected)


QUICK = ("llama", "gpt_oss", "dbrx", "glm4_moe", "qwen3_5_moe", "deepseek_v3", "gemma4")


@pytest.mark.parametrize("family", with_quick(ALL_FAMILIES, QUICK))
def test_trained_tokens_of_each_family_pack_as_peft_merges(family, checkpoint, shape_of, tmp_path):
    base, shape = checkpoint(family), shape_of(family)
    adapter = outer_adapter(family, base, tmp_path / "a", trainable_token_indices=[5, 0, 71])
    packed = read_adapter(adapter, shape, torch.float32, base_dir=base)
    assert_same_deltas(packed_deltas(packed, shape), peft_deltas(family, base, adapter))


def test_rows_of_a_head_with_a_bias_are_refused(checkpoint, shape_of, tmp_path):
    """PEFT computes the head without its bias."""
    base = checkpoint("phimoe")
    adapter = outer_adapter("phimoe", base, tmp_path / "a", trainable_token_indices={"lm_head": [3, 9]})
    with pytest.raises(AdapterError, match=r"names lm_head, which has a bias.*embed_tokens alone"):
        read_adapter(adapter, shape_of("phimoe"), torch.float32, base_dir=base)


@pytest.mark.parametrize("form", ["tokens", "both"])
def test_a_training_state_packs_as_the_saved_file(form, bases, tmp_path):
    from peft import PeftModel, get_peft_model_state_dict

    base, shape = bases[True], shape_at(bases[True])
    adapter = outer_adapter("llama", base, tmp_path / "a", **FORMS[form])
    model = PeftModel.from_pretrained(load_model(base), str(adapter))
    for state in (model.state_dict(), get_peft_model_state_dict(model)):
        packed = pack_state_dict(state, model.peft_config, shape, torch.float32, "a", base_dir=base)
        assert packed.content_hash == read(base, adapter).content_hash


def only(key, changed):
    return lambda tensors: {k: changed(v) if k == key else v for k, v in tensors.items()}


def without(key):
    return lambda tensors: {k: v for k, v in tensors.items() if k != key}


def also(key, *shape):
    return lambda tensors: tensors | {key: torch.zeros(*shape)}


TRANSPOSED, SHORTER = lambda v: v.T.contiguous(), lambda v: v[:-1].clone()
MANGLED = {
    "transposed tokens": ("tokens", only(TOKENS, TRANSPOSED), {}, "expected shape"),
    "a row less": ("tokens", only(TOKENS, SHORTER), {}, "expected shape"),
    "a column less": ("tokens", only(TOKENS, lambda v: v[:, :-1].clone()), {}, "expected shape"),
    "no rows": ("tokens", without(TOKENS), {}, "no tensor"),
    "integers": ("tokens", only(TOKENS, lambda v: v.int()), {}, "dtype"),
    "two tensors of one place": ("tokens", also(TOKENS + ".other", 3, 32), {}, "one place"),
    "rows of the head too": (
        "tokens",
        also(TOKENS.replace("model.embed_tokens", "lm_head"), 3, 32),
        {},
        "lm",
    ),
    "rows by another name": ("tokens", also(TOKENS.replace("embed_tokens", "wte"), 3, 32), {}, r"wte\.token"),
    "rows by another name alone": (
        "tokens",
        lambda tensors: {key.replace("embed_tokens", "wte"): one for key, one in tensors.items()},
        {},
        r"wte\.token_adapter\.trainable_tokens_delta: trained rows",
    ),
    "a token twice": ("tokens", None, {"trainable_token_indices": [5, 5, 71]}, "different tokens"),
    "a token beyond": ("tokens", None, {"trainable_token_indices": [5, 0, 96]}, "different tokens"),
    "a negative token": ("tokens", None, {"trainable_token_indices": [5, 0, -1]}, "trainable_token_indices"),
    "a token of text": ("tokens", None, {"trainable_token_indices": ["5"]}, "trainable_token_indices"),
    "two names of one module": (
        "tokens",
        None,
        {"trainable_token_indices": {"embed_tokens": [5, 0, 71], "language_model.embed_tokens": [4, 6, 8]}},
        "two lists of the embedding's tokens",
    ),
    "rows of another module": (
        "tokens",
        lambda tensors: {key.replace("embed_tokens", "wte"): one for key, one in tensors.items()},
        {"trainable_token_indices": {"wte": [5, 0, 71]}},
        "'wte' is not supported",
    ),
    "another module": ("tokens", None, {"trainable_token_indices": {"q_proj": [5, 0, 71]}}, "'q_proj'"),
    "no config of tokens": ("tokens", None, {"trainable_token_indices": None}, "token_adapter"),
    "a transposed head": ("head", only(SAVED, TRANSPOSED), {}, r"expected shape \[96, 32\]"),
    "a larger vocabulary": ("head", only(SAVED, lambda v: torch.cat([v, v[:2]])), {}, "was resized"),
    "no head": ("head", without(SAVED), {}, "no tensor"),
    "no config of the head": ("head", None, {"modules_to_save": None}, "lm_head.weight"),
    "a saved norm": ("head", None, {"modules_to_save": ["lm_head", "norm"]}, "'norm'"),
    "saved as text": ("head", None, {"modules_to_save": "lm_head"}, "modules_to_save"),
    "a bias": ("head", also("base_model.model.lm_head.bias", 96), {}, "biases"),
    "a pair of the head too": (
        "head",
        also("base_model.model.lm_head.lora_A.weight", 4, 32),
        {"target_modules": ["q_proj", "o_proj", "lm_head"]},
        "lm_head.lora_A",
    ),
    "both forms": (
        "both",
        also(TOKENS, 1, 32),
        {"trainable_token_indices": [5]},
        "both change the embedding",
    ),
}


@pytest.mark.parametrize("case", MANGLED)
def test_mangled_rows_are_refused_by_name(case, bases, tmp_path):
    form, tensors, config, reason = MANGLED[case]
    adapter = outer_adapter("llama", bases[False], tmp_path / "a", **FORMS[form])
    read(bases[False], adapter)
    change(adapter, tensors, config)
    with pytest.raises(AdapterError, match=reason) as refusal:
        read(bases[False], adapter)
    bad = bad_adapters([("a", str(adapter))], shape_at(bases[False]), base_dir=bases[False])
    assert bad == {"a": str(refusal.value)}


def test_a_pair_on_a_replaced_head_is_refused(bases, tmp_path):
    """PEFT wraps no module of modules_to_save."""
    adapter = outer_adapter("llama", bases[False], tmp_path / "a", "lm_head")
    change(adapter, also(SAVED, 96, 32), {"modules_to_save": ["lm_head"]})
    with pytest.raises(AdapterError, match=r"lm_head.lora_A.weight: no target_modules .* names it"):
        read(bases[False], adapter)


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that operations make, and their peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in (made,) if isinstance(made, torch.Tensor) else ():
            storage = one.untyped_storage()
            if one.device.type == "cpu" and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        return made

    def freed(self, key, num_bytes):
        self.known.discard(key)
        self.now -= num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["tokens", "many_tokens", "head", "both"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_memory_check_covers_the_peak_of_a_load(form, dtype, tied, bases, tmp_path, monkeypatch):
    adapter = outer_adapter("llama", bases[tied], tmp_path / "a", **FORMS[form])
    change(adapter, lambda tensors: {key: tensor.to(dtype) for key, tensor in tensors.items()})
    monkeypatch.setattr(base_weights, "_CHUNK", 64)
    monkeypatch.setattr(reader, "free_memory_bytes", lambda: 0)
    arguments = adapter, shape_at(bases[tied]), dtype
    with pytest.raises(AdapterError, match="memory free") as refusal:
        read_adapter(*arguments, base_dir=bases[tied])
    checked = sum(map(int, re.findall(r"\b\d{3,}\b", str(refusal.value).partition("safetensors: ")[2])))
    monkeypatch.setattr(reader, "free_memory_bytes", lambda: checked)
    with Allocated() as allocated:
        read_adapter(*arguments, base_dir=bases[tied])
    tables = 2_000
    assert allocated.peak < checked + tables


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
STORED = {
    "fp8": lambda key, v: {key: v.to(torch.float8_e4m3fn), f"{key}_scale": torch.ones(1)},
    "int8": lambda key, v: {f"{key}_packed": v.int(), f"{key}_scale": torch.ones(1)},
    "a row less": lambda key, v: {key: v[:-1].clone()},
    "a row more": lambda key, v: {key: torch.cat([v, v[:1]])},
    "a column less": lambda key, v: {key: v[:, :-1].clone()},
    "absent": lambda key, v: {},
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("form", "key", "tied"),
    [
        ("head_tokens", HEAD, False),
        ("head", HEAD, False),
        ("tokens", EMBEDDING, False),
        ("tokens", EMBEDDING, True),
        ("embedding", EMBEDDING, False),
    ],
)
def test_rows_of_a_base_without_these_as_floats_are_refused_by_name(form, key, tied, stored, bases, tmp_path):
    adapter = outer_adapter("llama", bases[tied], tmp_path / "a", **FORMS[form])
    base = stored_as(STORED[stored], key, bases[tied], tmp_path / "base")
    [file_key] = [one for one in load_file(adapter / WEIGHTS_FILE) if "lora" not in one]
    with pytest.raises(AdapterError, match=f"{file_key} replaces rows of .*{key}") as refusal:
        read(base, adapter)
    assert bad_adapters([("a", str(adapter))], shape_at(base), base_dir=base) == {"a": str(refusal.value)}


def stored_as(stored, key, base, target):
    """A copy of the checkpoint with another form of this tensor."""
    shutil.copytree(base, target)
    tensors = load_file(base / SINGLE_NAME)
    changed = stored(key, tensors.pop(key))
    save_file(tensors | changed, target / SINGLE_NAME)
    return target


@pytest.mark.parametrize("stored", ["fp8", "int8", "a row less"])
def test_copies_are_not_compared_with_a_head_of_another_form(stored, bases, tmp_path):
    adapter = outer_adapter("llama", bases[False], tmp_path / "a", "lm_head")
    base = stored_as(STORED[stored], HEAD, bases[False], tmp_path / "base")
    with pytest.raises(AdapterError, match=r"can't be compared .*lm_head\.weight"):
        check_copies_in(adapter, ["base_model.model.lm_head.base_layer.weight"], base, None)


@pytest.mark.parametrize("config", [{"use_dora": True}, FORMS["head"], FORMS["tokens"]])
def test_the_base_may_be_shards_without_an_index(config, bases, tmp_path):
    adapter = outer_adapter("llama", bases[False], tmp_path / "a", **config)
    shutil.copytree(bases[False], tmp_path / "base")
    whole = tmp_path / "base" / SINGLE_NAME
    tensors = load_file(whole)
    for number in (1, 2):
        part = dict(list(tensors.items())[number - 1 :: 2])
        save_file(part, whole.with_name(f"model-0000{number}-of-00002.safetensors"))
    whole.unlink()
    assert read(tmp_path / "base", adapter).content_hash == read(bases[False], adapter).content_hash
    (tmp_path / "base" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"model-00002-of-00002\.safetensors of its shards do not exist"):
        read(tmp_path / "base", adapter)


def test_a_tied_head_is_the_embedding_beside_a_stored_head(bases, tmp_path):
    adapter = outer_adapter("llama", bases[True], tmp_path / "a", **FORMS["head"])
    base = stored_as(lambda key, v: {key: v, HEAD: v + 1}, EMBEDDING, bases[True], tmp_path / "base")
    assert read(base, adapter).content_hash == read(bases[True], adapter).content_hash


def test_without_a_checkpoint_rows_are_refused(bases, tmp_path):
    adapter = outer_adapter("llama", bases[False], tmp_path / "a", **FORMS["tokens"])
    with pytest.raises(AdapterError, match="no checkpoint"):
        read_adapter(adapter, shape_at(bases[False]), torch.float32)


def test_rows_count_towards_the_rank_limit(bases, tmp_path):
    shape = shape_at(bases[False])
    for form, rank in (("tokens", 4), ("many_tokens", 32), ("head", 32)):
        adapter = outer_adapter("llama", bases[False], tmp_path / form, **FORMS[form])
        limits = {"base_dir": bases[False], "max_lora_rank": rank - 1}
        with pytest.raises(AdapterError, match=f"rank {rank} is above"):
            read_adapter(adapter, shape, torch.float32, **limits)
        assert read(bases[False], adapter).max_lora_rank == rank


def test_beside_a_lora_server_the_refusal_names_the_rows(bases, tmp_path):
    adapter = outer_adapter("llama", bases[False], tmp_path / "a", **FORMS["tokens"])
    where = {"base_dir": bases[False], "computed_by": "lora_server"}
    contents = AdapterContents(shape_at(bases[False]), torch.float32, **where)
    with pytest.raises(AdapterError, match="a change of lm_head or embed_tokens"):
        contents.read("a", str(adapter))


@pytest.mark.parametrize(("form", "said"), [("tokens", "3 rows of the"), ("head", "all rows of the")])
def test_the_check_names_the_rows(form, said, bases, tmp_path):
    adapter = outer_adapter("llama", bases[False], tmp_path / "a", **FORMS[form])
    found = CliRunner().invoke(main, ["adapters", "check", str(adapter), "--model", str(bases[False])])
    assert found.exit_code == 0, found.output
    assert said in found.output
    assert "bytes" in found.output
