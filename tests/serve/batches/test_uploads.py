# SPDX-License-Identifier: Apache-2.0
"""Forms of uploads: parts in any place of the body, and too many parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_lora.serve.batches import store
from moe_lora.serve.batches.store import copy_part, read_form
from moe_lora.serve.http_errors import ApiError

FIELD = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n%s\r\n'


def form(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts) + b"--b--\r\n")
    return path


def test_parts_of_one_name_count(tmp_path):
    assert read_form(form(tmp_path / "a", *[FIELD] * 16, FILE % b"x"), b"b").fields == {"purpose": "batch"}
    with pytest.raises(ApiError, match="more than 17 parts"):
        read_form(form(tmp_path / "b", *[FIELD] * 50_000, FILE % b"x"), b"b")
    with pytest.raises(ApiError, match="more than 17 parts"):
        read_form(form(tmp_path / "c", *[FILE % b"x"] * 50_000), b"b")


@pytest.mark.parametrize("size", range(24))
def test_a_part_ends_in_any_window(tmp_path, monkeypatch, size):
    monkeypatch.setattr(store, "_WINDOW_BYTES", 8)
    content = (b"\r\n--" * size)[:size]
    path = form(tmp_path / "a", FIELD, FILE % content)
    found = read_form(path, b"b")
    assert copy_part(path, found, tmp_path / "out") == size
    assert (tmp_path / "out").read_bytes() == content


def test_a_form_without_its_end_is_cut_short(tmp_path):
    (tmp_path / "a").write_bytes(FIELD + FILE % b"x")
    with pytest.raises(ApiError, match="cut short"):
        read_form(tmp_path / "a", b"b")
