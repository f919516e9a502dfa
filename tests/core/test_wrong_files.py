# SPDX-License-Identifier: Apache-2.0
"""Files that hold something else than their names promise, and folders of other tools: the cause is named."""

from __future__ import annotations

import struct

import pytest
import torch
from safetensors.torch import save

from moe_lora.core import wrong_files
from moe_lora.core.wrong_files import content_of, missing_shards, other_content, pickle_problem

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 198712\n"
KINDS = {
    "a pointer": (POINTER, "Git LFS pointer"),
    "a pointer with a byte order mark": (b"\xef\xbb\xbf" + POINTER, "Git LFS pointer"),
    "an old pointer": (b"version https://hawser.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    "an XET pointer": (b"# xet version 0\nfilesize = 4\n", "XET pointer"),
    "a git-annex pointer": (b"/annex/objects/SHA256E-s4--0.safetensors\n", "git-annex pointer"),
    "a web page": (b"\n <!DOCTYPE html>\n<html><body>Sign in</body></html>", "web page"),
    "an error of a store": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "web page"),
    "nothing": (b"", "empty file"),
    "zeros": (bytes(512), "zero bytes"),
    "a zip": (b"PK\x03\x04" + bytes(range(100)), "ZIP archive"),
    "a pickle": (b"\x80\x04\x95\x00", "pickle"),
    "a gzip": (b"\x1f\x8b\x08\x00", "gzip"),
    "a GGUF": (b"GGUF\x03\x00\x00\x00", "GGUF"),
    "a text": (b"Entry not found", "a text: 'Entry not found'"),
    "JSON": (b'{"error": "Repository not found"}', 'a text: \'{"error"'),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_told_by_their_first_bytes(kind):
    head, said = KINDS[kind]
    assert said in str(content_of(head))


@pytest.mark.parametrize("kind", ["a text", "JSON"])
def test_a_text_is_no_finding_where_one_is_expected(kind):
    assert content_of(KINDS[kind][0], is_text=True) is None


def test_what_is_no_text_has_no_kind():
    assert content_of(struct.pack("<Q", 3) + b"\x00\xff") is None


SHARDS = {
    "whole": (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], []),
    "the second": (["model-00001-of-00002.safetensors"], ["model-00002-of-00002.safetensors"]),
    "the first": (["model-00002-of-00002.safetensors"], ["model-00001-of-00002.safetensors"]),
    "counted from 0": (["consolidated-00-of-02.pth", "consolidated-01-of-02.pth"], []),
    "two sets": (
        ["a-1-of-2.bin", "a-2-of-2.bin", "model-00002-of-00002.safetensors"],
        ["model-00001-of-00002.safetensors"],
    ),
    "other names": (["model.safetensors", "of-1.bin"], []),
}


@pytest.mark.parametrize("case", SHARDS)
def test_missing_shards_are_named(case):
    names, missing = SHARDS[case]
    assert missing_shards(names) == missing


FOLDERS = {
    "a Hugging Face cache": (["snapshots/abc/config.json", "refs/main"], "snapshots/abc"),
    "GGUF": (["model-Q4_K_M.gguf"], "model-Q4_K_M.gguf"),
    "DeepSpeed": (["global_step100/mp_rank_00_model_states.pt", "latest"], "global_step100"),
    "FSDP": (["pytorch_model_fsdp_0/__0_0.distcp", "optimizer.pt"], "pytorch_model_fsdp_0"),
    "a trainer's checkpoints": (["checkpoint-9/adapter_config.json", "trainer_state.json"], "checkpoint-9"),
    "a trainer's state": (["optimizer.pt", "scheduler.pt", "rng_state.pth"], "only the state of a trainer"),
    "other weights": (["lora.safetensors"], "lora.safetensors"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_of_other_tools_are_told(case, tmp_path):
    names, said = FOLDERS[case]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert said in (other_content(tmp_path) or "")


def test_a_trainers_state_is_no_weights(tmp_path):
    for name in ("adapter_model.bin", "optimizer.pt", "training_args.bin", "rng_state_0.pth", "scheduler.pt"):
        (tmp_path / name).write_bytes(b"x")
    assert (pickle_problem(tmp_path) or "").startswith("adapter_model.bin: a pickle")
    assert other_content(tmp_path / "none") is None


def test_a_pickle_that_may_not_be_read_is_named_all_the_same(tmp_path, monkeypatch):
    def refuse(path, **words):
        raise PermissionError(path)

    (tmp_path / "adapter_model.bin").write_bytes(POINTER)
    monkeypatch.setattr(wrong_files, "file_content", refuse)
    assert (pickle_problem(tmp_path) or "").startswith("adapter_model.bin: a pickle")


@pytest.mark.parametrize("size", [1, 13, 64])
def test_the_end_of_a_file_is_found_across_slices_of_its_header(monkeypatch, size):
    monkeypatch.setattr(wrong_files, "_SLICE", size)
    file = save({f"a{number}": torch.zeros(number) for number in range(20)})
    end = 8 + int.from_bytes(file[:8], "little")
    assert wrong_files.announced_bytes(file[:end]) == len(file)
    assert wrong_files.announced_bytes(file[: end - 1]) is None
