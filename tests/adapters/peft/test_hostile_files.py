# SPDX-License-Identifier: Apache-2.0
"""Adapter files of somebody who means harm: refused by config and header, before anything is allocated."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.peft import base, file_check, reader
from moe_lora.adapters.peft.file_check import check_adapter
from moe_lora.adapters.peft.files import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE
from moe_lora.adapters.peft.patterns import MAX_PATTERN_CHARS
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape
from moe_lora.core.wrong_files import read_header
from tests.families import make_adapter

Q_A = "model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = "model.layers.0.self_attn.q_proj.lora_B.weight"
LLAMA = ModelShape(
    family="llama",
    num_layers=1,
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
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}


def entry(first: int, last: int, shape: list[Any], dtype: Any = "F32", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last], **more}


GOOD = {Q_A: entry(0, 512, [4, 32]), Q_B: entry(512, 1536, [64, 4])}


def write(folder: Path, header: Any, num_bytes: int = 1536, config: Any = None) -> Path:
    """An adapter's folder; the header is an object or JSON."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(CONFIG | (config or {})))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS_FILE).write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(folder / WEIGHTS_FILE, 8 + len(text) + num_bytes)  # sparse, where it is large
    return folder


@pytest.fixture
def nothing_is_read(monkeypatch):
    """Fails the test if a tensor is read, or allocated."""

    def fail(*_: Any) -> None:
        pytest.fail("values were read of a file that its header had to refuse")

    monkeypatch.setattr(reader, "_read_tensors", fail)


def twins(*pairs: tuple[str, Any]) -> bytes:
    return ("{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in pairs) + "}").encode()


HEADERS: dict[str, tuple[Any, str]] = {
    "a tensor twice": (twins(*GOOD.items(), (Q_A, GOOD[Q_A])), "given twice"),
    "a tensor twice, once with escapes": (
        twins(*GOOD.items()).replace(b"}}", b'},"' + Q_A.replace("m", "\\u006d", 1).encode() + b'":{}}', 1),
        "not a readable",
    ),
    "offsets twice": (
        json.dumps(GOOD).replace('"dtype"', '"data_offsets": [0, 512], "dtype"').encode(),
        "twice",
    ),
    "overlap": (GOOD | {Q_B: entry(256, 1280, [64, 4])}, "overlaps"),
    "one span for two": (GOOD | {Q_B: entry(0, 1024, [64, 4])}, "overlaps"),
    "a gap": (GOOD | {Q_B: entry(516, 1540, [64, 4])}, "gap"),
    "offsets turned": (GOOD | {Q_A: entry(512, 0, [4, 32])}, "gap"),
    "offsets below zero": (GOOD | {Q_A: entry(-512, 0, [4, 32])}, ">= 0"),
    "offsets beyond the file": (GOOD | {Q_B: entry(512, 1 << 40, [64, 4])}, "needs 1024 bytes"),
    "offsets of 30 digits": (GOOD | {Q_B: entry(512, 10**30, [64, 4])}, "not a readable"),
    "offsets as floats": (GOOD | {Q_B: entry(512, 1536.5, [64, 4])}, "not a readable"),  # type: ignore[arg-type]
    "shape that lies": (GOOD | {Q_B: entry(512, 1536, [64, 5])}, "needs 1280 bytes"),
    "shape that overflows": (GOOD | {Q_B: entry(512, 1536, [2**32, 2**32, 2**32])}, "needs"),
    "shape below zero": (GOOD | {Q_B: entry(512, 1536, [-64, -4])}, ">= 0"),
    "shape of truths": (GOOD | {Q_B: entry(512, 1536, [True, 256])}, "not a readable"),
    "shape of a thousand sizes": (GOOD | {Q_B: entry(512, 1536, [1] * 1000)}, "length <= 8"),
    "unknown dtype": (GOOD | {Q_B: entry(512, 1536, [64, 4], "F4_E2M1X")}, "unknown dtype"),
    "dtype no text": (GOOD | {Q_B: entry(512, 1536, [64, 4], ["F32"])}, "not a readable"),
    "integers": (GOOD | {Q_B: entry(512, 1536, [64, 4], "I32")}, "torch.int32"),
    "more fields": (GOOD | {Q_B: entry(512, 1536, [64, 4], strides=[1, 1])}, "strides"),
    "fields absent": (GOOD | {Q_B: {"dtype": "F32"}}, "not a readable"),
    "a list": (b"[1, 2]", "not a readable"),
    "nested without end": (b"[" * 100_000, "not a readable"),
    "no JSON": (b"\xff\xfe", "not a readable"),
    "a name of a million characters": (GOOD | {"x" * 10**6: entry(1536, 1536, [0])}, "the name of no tensor"),
    "a name of two lines": (
        GOOD | {"x\nA.lora_A.weight": entry(1536, 1536, [0])},
        r"'x\nA.lora_A.weight' is",
    ),
    "a field of a million characters": (GOOD | {Q_B: {"x" * 10**6: 1}}, "not a readable"),
    "metadata no texts": (GOOD | {"__metadata__": {"a": [1]}}, "not a readable"),
    "a rank that no file has": (GOOD, "expected shape"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_lie_are_refused_before_a_value_is_read(case, tmp_path, nothing_is_read):
    header, words = HEADERS[case]
    rank = 1_000_000 if "rank" in case else 4
    path = write(tmp_path / "bad", header, config={"r": rank})
    for read in (lambda: read_adapter(path, LLAMA, torch.float32), lambda: check_adapter(path, LLAMA)):
        with pytest.raises(AdapterError) as caught:
            read()
        assert words in str(caught.value)
        assert str(path / WEIGHTS_FILE) in str(caught.value)
        assert len(str(caught.value)) < 1000


def test_a_file_larger_than_the_memory_that_is_free_is_refused_before_it_is_read(tmp_path, monkeypatch):
    rank = 1 << 17
    header = {Q_A: entry(0, rank * 128, [rank, 32]), Q_B: entry(rank * 128, rank * 384, [64, rank])}
    path = write(tmp_path / "sparse", header, rank * 384, {"r": rank})
    assert (path / WEIGHTS_FILE).stat().st_blocks < 100
    monkeypatch.setattr(reader, "free_memory_bytes", lambda: 100_000_000)
    with pytest.raises(AdapterError, match=r"50331648 bytes of tensors, and 50331648 packed"):
        read_adapter(path, LLAMA, torch.float32)


CONFIGS: dict[str, tuple[bytes, str]] = {
    "a key twice": (b'{"r": 4, "r": 8}', "'r' is given twice"),
    "half a character": (
        json.dumps(CONFIG | {"target_modules": ["\ud800"]}).encode(),
        "surrogates not allowed",
    ),
    "too large": (b" " * (MAX_CONFIG_BYTES + 1), "larger than"),
    "alpha of no sense": (json.dumps(CONFIG | {"lora_alpha": 1e7}).encode(), "lora_alpha=10000000.0"),
    "repeats in repeats": (json.dumps(CONFIG | {"target_modules": "(.|..)+(?<![a-z])"}).encode(), "to match"),
    "repeats in rank_pattern": (
        json.dumps(CONFIG | {"rank_pattern": {"(.|..)*(?<![a-z])": 4}}).encode(),
        "to match",
    ),
    "repeats in layers_pattern": (
        json.dumps(CONFIG | {"layers_to_transform": [0], "layers_pattern": ["(.|..)*(?<![a-z])"]}).encode(),
        "to match",
    ),
    "a million repeats": (
        json.dumps(CONFIG | {"target_modules": "(a{1000}){1000}"}).encode(),
        "target_modules",
    ),
    "a long expression": (
        json.dumps(CONFIG | {"exclude_modules": "a" * (MAX_PATTERN_CHARS + 1)}).encode(),
        "exclude_modules",
    ),
    "long expressions together": (
        json.dumps(CONFIG | {"alpha_pattern": {f"{n}{'a' * 9000}": 1 for n in range(20)}}).encode(),
        "100000 characters",
    ),
    "repeats that are too many together": (
        json.dumps(CONFIG | {"rank_pattern": {f"(?:a{{80}}){{80}}{n}": 4 for n in range(1000)}}).encode(),
        "rank_pattern: regular expressions of more than 100000 characters together, counted repeats written",
    ),
    "a repeat of 5000 digits": (
        json.dumps(CONFIG | {"target_modules": f"a{{{'9' * 5000}}}"}).encode(),
        "target_modules",
    ),
    "layers, 10^5": (
        json.dumps(CONFIG | {"layers_to_transform": list(range(10**5))}).encode(),
        "layers_to_transform has 100000 layers, at most 10000",
    ),
    "a layer of 30 digits": (
        json.dumps(CONFIG | {"layers_to_transform": [10**30]}).encode(),
        "layers_to_transform",
    ),
    **{
        f"names in {key}, 10^5": (
            json.dumps(CONFIG | {key: [f"x{n}" for n in range(10**5)]}).encode(),
            f"{key} has 100000 names, at most 50000",
        )
        for key in ("target_modules", "target_parameters", "exclude_modules")
    },
    "patterns of layers, 3000": (
        json.dumps(CONFIG | {"layers_to_transform": [0], "layers_pattern": ["x"] * 3000}).encode(),
        "layers_pattern has 3000 patterns, at most 1000",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_would_cost_too_much_are_refused(case, tmp_path, nothing_is_read, monkeypatch):
    text, words = CONFIGS[case]
    monkeypatch.setattr("moe_lora.adapters.peft.patterns.MAX_MATCH_S", 0.05)
    path = write(tmp_path / "bad", GOOD)
    (path / CONFIG_FILE).write_bytes(text)
    with pytest.raises(AdapterError) as caught:
        read_adapter(path, LLAMA, torch.float32)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_names_that_match_nothing_are_ten_and_a_number_in_the_warning(tmp_path):
    names = [f"x{n:04}{'y' * 500}" for n in range(5000)]
    path = write(tmp_path / "a", GOOD, config={"target_modules": ["q_proj", *names]})
    [warning] = read_adapter(path, LLAMA, torch.float32).warnings
    assert "'x0009" in warning
    assert "'x0010" not in warning
    assert "and 4990 more match nothing in the base model" in warning
    assert len(warning) < 2000


def test_patterns_of_layers_are_compiled_once_for_all_modules(tmp_path, monkeypatch):
    compiled: list[str] = []
    compile_ = regex.compile
    monkeypatch.setattr(regex, "compile", lambda text: compiled.append(text) or compile_(text))
    seven = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    fields = {"layers_to_transform": [0], "layers_pattern": [f"x{n}" for n in range(200)]}
    path = write(tmp_path / "a", GOOD, config={"target_modules": seven, **fields})
    with pytest.raises(AdapterError, match="no target_modules"):
        read_adapter(path, LLAMA, torch.float32)
    assert len(compiled) <= 3 * 200


def test_groups_in_a_pattern_of_layers_are_not_taken_for_the_layers_number(tmp_path):
    fields = {"layers_to_transform": [0], "layers_pattern": ["(la)?(z)?yers"]}
    assert read_adapter(write(tmp_path / "a", GOOD, config=fields), LLAMA, torch.float32).nbytes


def test_tensors_that_begin_anywhere_are_read_as_safetensors_reads_them(tmp_path):
    """An odd number of bytes of another tensor before them is no reason to refuse a file."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        Q_A: torch.randn(1, 32, generator=generator).half(),
        Q_B: torch.randn(64, 1, generator=generator),
    }
    header = {Q_B: entry(64, 320, [64, 1]), Q_A: entry(0, 64, [1, 32], "F16")}
    for pad in range(8):
        text = json.dumps(header).encode() + b" " * pad
        path = write(tmp_path / str(pad), text, 0, {"r": 1, "lora_alpha": 1})
        with (path / WEIGHTS_FILE).open("ab") as file:
            file.write(tensors[Q_A].numpy().tobytes() + tensors[Q_B].numpy().tobytes())
        plain = tmp_path / f"{pad}-plain"
        plain.mkdir()
        shutil.copy(path / CONFIG_FILE, plain)
        save_file(tensors, plain / WEIGHTS_FILE)
        found = [read_adapter(folder, LLAMA, torch.float32).content_hash for folder in (path, plain)]
        assert found[0] == found[1]


NAMES = st.sampled_from([Q_A, Q_B, "x", "__metadata__", Q_A.replace("A", "C")])
NUMBERS = st.sampled_from([0, 1, 4, 32, 64, 512, 1024, 1536, -1, 2**63, 10**30, 0.5, True, None, "4"])
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "I8", "BOOL", "X", "", 3, None]),
        "shape": st.lists(NUMBERS, max_size=3) | NUMBERS,
        "data_offsets": st.lists(NUMBERS, max_size=3) | NUMBERS,
        "more": NUMBERS,
    },
)


@settings(max_examples=120, deadline=None)
@given(
    changes=st.lists(
        st.tuples(NAMES, ENTRY | st.sampled_from([*GOOD.values()]) | NUMBERS), min_size=0, max_size=3
    ),
    cut=st.integers(0, 60) | st.just(0),
    num_bytes=st.sampled_from([0, 512, 1535, 1536, 1537]),
)
def test_any_header_is_read_as_safetensors_reads_it_or_refused(changes, cut, num_bytes, tmp_path_factory):
    """What is accepted here the library accepts too, with the same tensors; nothing fails otherwise."""
    text = twins(*GOOD.items(), *changes)
    path = write(tmp_path_factory.mktemp("fuzzed"), text[: len(text) - cut], num_bytes)
    try:
        entries = read_header(path / WEIGHTS_FILE)
    except AdapterError:
        return
    theirs = load((path / WEIGHTS_FILE).read_bytes())
    assert {key: (tuple(t.shape), str(t.dtype)) for key, t in theirs.items()} == {
        key: (one.shape, one.dtype) for key, one in entries.items()
    }


@settings(max_examples=80, deadline=None)
@given(data=st.binary(max_size=200), length=st.integers(0, 2**64 - 1) | st.integers(0, 200))
def test_any_bytes_are_refused_by_both(data, length, tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / WEIGHTS_FILE
    path.write_bytes(length.to_bytes(8, "little") + data)
    try:
        read_header(path)
    except AdapterError:
        return
    try:
        load(path.read_bytes())
    except SafetensorError as error:  # pragma: no cover
        pytest.fail(f"accepted here, refused by safetensors: {error}")


# The folder outside of which nothing is read.


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory) -> Path:
    return make_adapter("mixtral", checkpoint("mixtral"), tmp_path_factory.mktemp("good") / "good")


def test_nothing_outside_the_root_is_read_whatever_leads_there(adapter, shape_of, tmp_path, caplog):
    shape, root, secret = shape_of("mixtral"), tmp_path / "top", tmp_path / "secret"
    root.mkdir()
    shutil.copytree(adapter, secret)
    shutil.copytree(adapter, root / "own")
    (root / "linked").symlink_to(secret)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        half = shutil.copytree(adapter, root / f"half-{name}")
        (half / name).unlink()
        (half / name).symlink_to(secret / name)
    (root / "inner").symlink_to(root / "own")
    contents = AdapterContents(shape, torch.float32, root=str(root))
    expected = read_adapter(adapter, shape, torch.float32).content_hash
    for allowed in ("own", "inner", "../top/own"):
        assert contents.read("x", f"{root}/{allowed}").content_hash == expected
    outside = ("linked", "../secret", f"half-{CONFIG_FILE}", f"half-{WEIGHTS_FILE}", "own/../../secret")
    for path in (*(f"{root}/{one}" for one in outside), str(secret), f"{root}-other", "/", "\0"):
        with pytest.raises(AdapterError, match="adapter 'x'") as caught:
            contents.read("x", path)
        assert str(tmp_path) not in str(caught.value)
        assert str(tmp_path) in caplog.text or path in ("/", "\0")


def test_a_link_set_between_check_and_opening_leads_nowhere(adapter, shape_of, tmp_path, monkeypatch):
    root, secret = tmp_path / "top", tmp_path / "secret"
    shutil.copytree(adapter, root / "own")
    shutil.copytree(adapter, secret)
    weights_file = file_check.weights_file

    def switch(folder: Path, *args: Any) -> Path:
        found = weights_file(folder, *args)
        found.unlink()
        found.symlink_to(secret / WEIGHTS_FILE)
        return found

    monkeypatch.setattr(file_check, "weights_file", switch)
    with pytest.raises(AdapterError, match="no regular file in the folder"):
        read_adapter(root / "own", shape_of("mixtral"), torch.float32, root=str(root))


def test_a_base_outside_the_root_is_not_looked_at(adapter, checkpoint, shape_of, tmp_path):
    root = tmp_path / "top"
    path = shutil.copytree(adapter, root / "own")
    fields = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(
        json.dumps(fields | {"base_model_name_or_path": str(checkpoint("llama"))})
    )
    assert read_adapter(path, shape_of("mixtral"), torch.float32, root=str(root)).nbytes
    with pytest.raises(AdapterError, match="base_model_name_or_path"):
        read_adapter(path, shape_of("mixtral"), torch.float32)


@pytest.fixture
def with_base(adapter, tmp_path):
    """A function: the adapter in a root, its base model being a folder, or a name, of the root."""

    def made(name: str) -> Path:
        path = shutil.copytree(adapter, tmp_path / "top" / "own")
        fields = json.loads((path / CONFIG_FILE).read_text())
        fields["base_model_name_or_path"] = str(tmp_path / "top" / name)
        (path / CONFIG_FILE).write_text(json.dumps(fields))
        (tmp_path / "top" / "base").mkdir()
        return path

    return made


def test_a_base_whose_config_is_a_link_out_of_the_root_is_not_looked_at(
    with_base, checkpoint, shape_of, tmp_path
):
    path, root = with_base("base"), tmp_path / "top"
    other = json.loads((checkpoint("llama") / "config.json").read_text())
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps(other | {"quantization_config": {"quant_method": "secret"}}))
    (root / "base" / "config.json").symlink_to(secret)
    assert read_adapter(path, shape_of("mixtral"), torch.float32, root=str(root)).warnings == ()
    with pytest.raises(AdapterError, match="has family=llama"):
        read_adapter(path, shape_of("mixtral"), torch.float32)


@pytest.mark.parametrize("rooted", [False, True])
def test_a_base_whose_config_is_a_pipe_is_not_waited_for(with_base, shape_of, tmp_path, monkeypatch, rooted):
    path, root = with_base("base"), tmp_path / "top"
    os.mkfifo(root / "base" / "config.json")

    def read() -> Any:
        return read_adapter(path, shape_of("mixtral"), torch.float32, root=str(root) if rooted else None)

    assert read().warnings == ()
    monkeypatch.setattr("os.path.isfile", lambda path: True)  # it was a file when it was looked at
    with pytest.raises(AdapterError, match="not a model that can be compared"):
        read()


def test_a_base_whose_config_is_too_large_or_no_object_is_refused(with_base, shape_of, tmp_path):
    path, config = with_base("base"), tmp_path / "top" / "base" / "config.json"
    for text, words in (("", f"larger than {MAX_CONFIG_BYTES} bytes"), ("[1]", "must be a JSON object")):
        config.write_text(text)
        if not text:
            os.truncate(config, MAX_CONFIG_BYTES + 1)
        with pytest.raises(AdapterError, match=words):
            read_adapter(path, shape_of("mixtral"), torch.float32)
    config.write_text(json.dumps({"model_type": "x" * 10**6}))
    with pytest.raises(AdapterError, match="model_type='xxx") as caught:
        read_adapter(path, shape_of("mixtral"), torch.float32)
    assert len(str(caught.value)) < 1000


def test_a_bases_config_is_read_once(with_base, checkpoint, shape_of, tmp_path, monkeypatch):
    path, opened = with_base("base"), []
    shutil.copy(checkpoint("mixtral") / "config.json", tmp_path / "top" / "base")
    open_file = base.open_file
    monkeypatch.setattr(base, "open_file", lambda *args: opened.append(args) or open_file(*args))
    assert read_adapter(path, shape_of("mixtral"), torch.float32, root=str(tmp_path / "top")).nbytes
    assert len(opened) == 1


def test_links_of_a_base_that_no_path_can_name_are_not_followed(with_base, shape_of, tmp_path, monkeypatch):
    path, followed = with_base("a/" * 10**6), []
    realpath = os.path.realpath

    def follow(path: Any, **how: Any) -> Any:
        followed.append(len(str(path)))
        return realpath(path, **how)

    monkeypatch.setattr("os.path.realpath", follow)
    assert read_adapter(path, shape_of("mixtral"), torch.float32, root=str(tmp_path / "top")).warnings == ()
    assert max(followed) < 5000


def test_a_base_outside_the_root_with_a_quantised_name_is_said_to_be(with_base, shape_of, tmp_path):
    path = with_base("../mixtral-bnb-4bit")
    [warning] = read_adapter(path, shape_of("mixtral"), torch.float32, root=str(tmp_path / "top")).warnings
    assert "quantised as bnb-4bit" in warning


def test_a_pipe_is_refused_and_nobody_waits_for_it(adapter, shape_of, tmp_path, monkeypatch):
    path = shutil.copytree(adapter, tmp_path / "pipe")
    (path / WEIGHTS_FILE).unlink()
    os.mkfifo(path / WEIGHTS_FILE)
    monkeypatch.setattr(Path, "is_file", lambda self: True)  # it was a file when it was looked at
    with pytest.raises(AdapterError, match="no regular file"):
        read_adapter(path, shape_of("mixtral"), torch.float32)
