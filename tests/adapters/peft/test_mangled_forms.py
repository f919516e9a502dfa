# SPDX-License-Identifier: Apache-2.0
"""Each served form of adapter file, mangled: refused by name, or with the weights of the original.

No reader can see some changes: the transpose of a square matrix (the rank is its width), an exchange of two
modules of equal shapes, another alpha.  They make another valid adapter.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.core.errors import AdapterError
from tests.adapter_forms import FORMS

pytestmark = pytest.mark.filterwarnings("ignore")
Tensors = dict[str, torch.Tensor]
_FRONT = "base_model.model."
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_TAIL = re.compile(r"\.(?:base_layer\.)*(?:lora_|token_adapter|modules_to_save|weight$).*")
_SPELLINGS = {
    **{"q_proj": ("wq", "query", "q_a_proj"), "k_proj": ("wk", "key"), "o_proj": ("wo", "out_proj", "dense")},
    **{"v_proj": ("wv", "value", "v1"), "gate_proj": ("w1", "w2", "w3"), "up_proj": ("w3", "w2", "v1")},
    **{"down_proj": ("w2", "w1"), "w1": ("gate_proj", "down_proj"), "w2": ("down_proj", "up_proj", "w5")},
    **{"w3": ("up_proj", "v1"), "gate": ("router", "router.layer"), "embed_tokens": ("wte", "embed_in")},
    **{"lm_head": ("output", "embed_out"), "experts": ("expert", "local_experts")},
}


@dataclass
class File:
    """The content of an adapter's folder."""

    tensors: Tensors
    config: dict[str, Any]
    reverses: bool = False

    def write(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / CONFIG_FILE).write_text(json.dumps(self.config))
        content = save({key: tensor.contiguous() for key, tensor in self.tensors.items()})
        (folder / WEIGHTS_FILE).write_bytes(_reversed(content) if self.reverses else content)
        return folder


def _reversed(content: bytes) -> bytes:
    """A safetensors file with names and data in the opposite order."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    parts, entries, end = [], {}, 0
    for key, entry in sorted(header.items(), key=lambda one: one[1]["data_offsets"], reverse=True):
        first, last = entry["data_offsets"]
        parts.append(data[first:last])
        entries[key] = entry | {"data_offsets": [end, end + last - first]}
        end += last - first
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def _put(number: int, value: float) -> Callable[[File, str], None]:
    def change(file: File, key: str) -> None:
        file.tensors[key] = file.tensors[key].clone()
        file.tensors[key].view(-1)[number] = value

    return change


def _as(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[File, str], None]:
    def apply(file: File, key: str) -> None:
        file.tensors[key] = change(file.tensors[key]).contiguous()

    return apply


def _also(name: Callable[[str], str]) -> Callable[[File, str], None]:
    def change(file: File, key: str) -> None:
        if name(key) not in file.tensors:
            file.tensors[name(key)] = file.tensors[key] + 1

    return change


def _moved(name: Callable[[str], str]) -> Callable[[File, str], None]:
    def change(file: File, key: str) -> None:
        if name(key) not in file.tensors:
            file.tensors[name(key)] = file.tensors.pop(key)

    return change


def _without_module(file: File, key: str) -> None:
    for other in [one for one in file.tensors if _module(one) == _module(key)]:
        del file.tensors[other]


def _module(key: str) -> str:
    return _TAIL.sub("", key)


def _next_number(key: str) -> str:
    """The key of the next expert or layer, or of a layer beyond the last."""
    *_, last = [None, *_NUMBER.finditer(key)]
    return key if last is None else f"{key[: last.start()]}{int(last[0]) + 1}{key[last.end() :]}"


OF_A_KEY: dict[str, Callable[[File, str], None]] = {
    "transposed": _as(
        lambda v: v if v.dim() > 1 and v.shape[-1] == v.shape[-2] else v.mT if v.dim() > 1 else v[None]
    ),
    "reversed dims": _as(lambda v: v.permute(*reversed(range(v.dim()))) if v.dim() > 2 else v[None]),
    "flat": _as(lambda v: v.flatten() if v.dim() > 1 else v[:, None]),
    "a row less": _as(lambda v: v[:-1]),
    "a row more": _as(lambda v: torch.cat([v, v[:1]])),
    "half of the columns": _as(lambda v: v[..., : max(1, v.shape[-1] // 2)]),
    "empty": _as(lambda v: v[:0]),
    "integers": _as(lambda v: v.to(torch.int64)),
    "fp8": _as(lambda v: v.to(torch.float8_e4m3fn)),
    "bools": _as(lambda v: v > 0),
    "NaN": _put(0, float("nan")),
    "infinity at the end": _put(-1, float("inf")),
    "missing": lambda file, key: file.tensors.__delitem__(key),
    "a module missing": _without_module,
    "twice, by a doubled prefix": _also(lambda key: _FRONT + key),
    "twice, without a prefix": _also(lambda key: key.removeprefix(_FRONT)),
    "twice, by a wrapper": _also(lambda key: key.replace(_FRONT, f"{_FRONT}_orig_mod.")),
    "twice, by DDP": _also(lambda key: f"module.{key}"),
    "twice, in a language model": _also(
        lambda key: key.replace("model.model.", "model.model.language_model.")
    ),
    "twice, by an adapter's name": _also(lambda key: key.replace(".weight", ".default.weight")),
    "one under another prefix": _moved(
        lambda key: key.replace("model.model.", "model.model.language_model.")
    ),
    "one with an adapter's name": _moved(lambda key: key.replace(".weight", ".default.weight")),
    "one level deeper": _moved(lambda key: re.sub(r"\.(lora_|modules_to_save)", r".base_layer.\1", key)),
    "of a layer beyond": _also(lambda key: re.sub(r"(?<=layers\.)\d+", "77", key)),
    "of an expert beyond": _also(lambda key: re.sub(r"(?<=experts\.)\d+", "77", key)),
    "moved to the next number": _moved(_next_number),
    "a bias": _also(lambda key: re.sub(r"\.weight$", ".bias", key)),
    "unknown": _also(lambda key: f"{key}.scale"),
    "of no module": _also(lambda key: key.replace("proj", "projection")),
}


def _config(**fields: Any) -> Callable[[File], None]:
    return lambda file: file.config.update(fields)


def _prefixed(file: File) -> None:
    file.tensors = {_FRONT + key: tensor for key, tensor in file.tensors.items()}


def _doubles(file: File) -> None:
    file.tensors = {key: tensor.double() for key, tensor in file.tensors.items()}


def _order(file: File) -> None:
    file.config = dict(reversed(file.config.items()))
    file.reverses = True


def _ranks(change: int) -> Callable[[File], None]:
    return lambda file: file.config.update(r=file.config["r"] + change)


OF_A_FILE: dict[str, Callable[[File], None]] = {
    "another order": _order,
    "a doubled prefix": _prefixed,
    "fp64": _doubles,
    "a larger rank": _ranks(1),
    "a smaller rank": _ranks(-1),
    "a doubled rank": lambda file: _ranks(file.config["r"])(file),
    "a rank_pattern": _config(rank_pattern={"o_proj": 5, "out_proj": 5}),
    "a rank_pattern by regex": _config(rank_pattern={r".*\.1\..*": 1}),
    "a rank_pattern of no module": _config(rank_pattern={"nothing": 9}),
    "an alpha_pattern of no module": _config(alpha_pattern={"nothing": 9}),
    "one layer": _config(layers_to_transform=[1]),
    "excluded modules": _config(exclude_modules=["q_proj", "Wqkv"]),
    "fewer targets": _config(target_modules=["k_proj"], target_parameters=None),
    "no tensors": lambda file: file.tensors.clear(),
}
EQUAL = {
    "another order",
    "a doubled prefix",
    "fp64",
    *(f"{one}_pattern of no module" for one in ("a rank", "an alpha")),
}
"""Variants of every form with the weights of the original."""
QUICK = {
    "peft": "mixtral",
    "per_expert": "qwen3_moe",
    "tinker": "olmoe",
    "bridge": "mixtral",
    "dora": "glm4_moe",
}
QUICK |= {"unsloth_grouped": "gpt_oss", "tokens": "dbrx", "head_saved": "llama", "embedding": "afmoe"}
QUICK |= {"lora_bias": "qwen3_next", "mica": "deepseek_v3"}
NOT_SERVED = re.compile(
    "pissa|olora|corda|loftq|lora-ga|qalora|loha|bias$|unsloth_unmarked|(dora|alora|lora_bias)_experts"
)
CELLS = [
    pytest.param(name, family, marks=() if QUICK.get(name) == family else pytest.mark.slow)
    for name, form in FORMS.items()
    if name == "lora_bias" or not NOT_SERVED.fullmatch(name)
    for family in form.families
]


@pytest.fixture
def original(checkpoint, shape_of, tmp_path):
    """(form, family) -> its file, and a reader of files: content hash or refusal."""

    def make(name: str, family: str) -> tuple[File, Callable[[File], tuple[str | None, str]]]:
        base = checkpoint(family)
        folder, _ = FORMS[name].make(family, base, tmp_path / "good")
        contents = AdapterContents(shape_of(family), torch.float32, base_dir=base)

        def read(file: File) -> tuple[str | None, str]:
            try:
                return contents.read("a", str(file.write(tmp_path / "variant"))).content_hash, ""
            except AdapterError as error:
                return None, str(error)

        config = json.loads((folder / CONFIG_FILE).read_text())
        return File(load_file(folder / WEIGHTS_FILE), config), read

    return make


def _kinds(file: File) -> list[str]:
    """A key of each kind: of the same name but for numbers; of the last layer and expert."""
    return list({_NUMBER.sub("N", key): key for key in sorted(file.tensors)}.values())


def _copy(file: File) -> File:
    return File(dict(file.tensors), dict(file.config))


def _names(message: str, key: str, variant: File) -> bool:
    """True if the message has a key of the file, or the path of the changed module."""
    named = bool(key) and _module(key).removeprefix(_FRONT) in message
    saved = variant.config.get("modules_to_save") or ()
    return named or any(one in message for one in (*variant.tensors, *saved))


@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "family"), CELLS)
def test_a_mangled_file_is_refused_by_name_or_equal(name, family, step, original):
    """The default run mangles each kind of key in a twelfth of the ways."""
    place = list(FORMS).index(name)
    good, read = original(name, family)
    expected, problem = read(good)
    if expected is None and name in ("head", "head_saved"):
        pytest.skip(problem)  # a head with a bias
    assert expected is not None, problem
    for number, (case, mangle) in enumerate(OF_A_KEY.items()):
        for key in _kinds(good)[(number + place) % step :: step]:
            variant = _copy(good)
            mangle(variant, key)
            found, message = read(variant)
            assert found in (None, expected), f"{case}: {key} is read differently"
            assert found or _names(message, key, variant), f"{case}: {key}: {message}"
    for case, change in OF_A_FILE.items():
        variant = _copy(good)
        change(variant)
        found, message = read(variant)
        assert found in (None, expected), f"{case}: is read differently"
        assert found or any(one in message for one in (*variant.tensors, CONFIG_FILE, WEIGHTS_FILE)), message
        assert found == expected or case not in EQUAL, f"{case}: {message}"


@pytest.mark.parametrize(("name", "family"), CELLS)
def test_another_familys_spelling_is_refused_by_name_or_equal(name, family, original):
    good, read = original(name, family)
    expected, problem = read(good)
    if expected is None and name in ("head", "head_saved"):
        pytest.skip(problem)
    for leaf, spellings in _SPELLINGS.items():
        for spelling in spellings:
            variant = _copy(good)
            variant.tensors = {
                re.sub(rf"(?<=\.){leaf}(?=\.)", spelling, key): tensor for key, tensor in good.tensors.items()
            }
            if variant.tensors.keys() == good.tensors.keys():
                continue
            found, message = read(variant)
            assert found in (None, expected), f"{leaf} as {spelling} is read differently"
            assert found or _names(message, "", variant), f"{leaf} as {spelling}: {message}"


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 200, -1, -1000])
def test_a_truncated_file_is_refused_by_name(num_bytes, original, tmp_path, checkpoint, shape_of):
    good, _ = original("peft", "mixtral")
    folder = good.write(tmp_path / "cut")
    content = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(content[:num_bytes])
    with pytest.raises(AdapterError, match=WEIGHTS_FILE):
        AdapterContents(shape_of("mixtral"), torch.float32).read("a", str(folder))
