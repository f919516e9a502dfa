# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.core.errors import ConfigError
from moe_lora.dist.deltas.session import (
    DONE,
    HEADER_BYTES,
    FrameLayout,
    answer_rows,
    answer_size,
    check_ids,
    lay_out_request,
    read_answer_header,
    read_request,
    write_answer_header,
)
from tests.dist.lora_server.shapes import model_shape

SHAPE = model_shape()
GATE_UP = next(index for index, site in enumerate(SHAPE.sites) if site.num_experts)
LAYOUT = FrameLayout(SHAPE, torch.float32, 6)


def new_frame(layout: FrameLayout = LAYOUT) -> torch.Tensor:
    return torch.zeros(layout.request_bytes, dtype=torch.uint8)


@given(
    site=st.integers(0, len(SHAPE.sites) - 1),
    layer=st.integers(0, SHAPE.num_layers - 1),
    num_tokens=st.integers(0, 6),
    top_k=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_request_is_read_as_it_was_laid_out(site, layer, num_tokens, top_k, dtype, data):
    layout = FrameLayout(SHAPE, dtype, 6)
    frame = new_frame(layout)
    top_k = top_k if SHAPE.sites[site].num_experts else 0
    ids = data.draw(st.lists(st.integers(-1, 7), min_size=num_tokens * top_k, max_size=num_tokens * top_k))
    num_rows = sum(i >= 0 for i in ids) if top_k else num_tokens
    if num_rows > layout.max_rows:
        return
    laid = lay_out_request(frame, layout, layer, site, num_tokens, top_k, num_rows)
    laid.slot[:] = np.arange(num_tokens)
    laid.generation[:] = 2**60 + np.arange(num_tokens)
    if laid.ids is not None:
        laid.ids[:] = np.array(ids, dtype=np.int32).reshape(num_tokens, top_k)
    laid.x.copy_(torch.randn(laid.x.shape))
    assert laid.frame_bytes <= layout.request_bytes
    read = read_request(frame[: laid.frame_bytes].clone(), layout)
    check_ids(read, layout)
    assert (read.layer, read.site, read.num_rows) == (layer, site, num_rows)
    assert read.slot.tolist() == list(range(num_tokens))
    assert read.generation.tolist() == [2**60 + i for i in range(num_tokens)]
    assert (read.ids is None) == (top_k == 0)
    assert read.ids is None or read.ids.reshape(-1).tolist() == ids
    assert torch.equal(read.x, laid.x)


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, 4), (0, -1), (1, 99), (2, 7), (2, -1), (3, 3), (3, 0), (4, 7), (4, -1)],
    ids=lambda value: str(value),
)
def test_header_that_no_request_has_is_refused(place, value):
    frame = new_frame()
    lay_out_request(frame, LAYOUT, 1, GATE_UP, 2, 2, 3)
    frame.numpy()[:HEADER_BYTES].view(np.int64)[place] = value
    with pytest.raises(ValueError, match="a frame claims layer"):
        read_request(frame, LAYOUT)


@pytest.mark.parametrize("ids", [[[0, 1], [2, 3]], [[0, -1], [-1, -1]], [[0, 1], [8, -1]]])
def test_experts_that_do_not_make_up_the_answer_are_refused(ids):
    request = lay_out_request(new_frame(), LAYOUT, 1, GATE_UP, 2, 2, 3)
    request.ids[:] = np.array(ids)
    with pytest.raises(ValueError, match="3 rows of answer that its 2 tokens"):
        check_ids(request, LAYOUT)


def test_answer_is_read_as_it_was_written():
    frame = torch.zeros(LAYOUT.answer_bytes, dtype=torch.uint8)
    for site, its in enumerate(SHAPE.sites):
        assert answer_size(LAYOUT, site, 6) <= LAYOUT.answer_bytes
        delta = torch.randn(5, its.total_out_features)
        answer_rows(frame, LAYOUT, site, 5).copy_(delta)
        write_answer_header(frame, DONE, 2**60, 2**61, 7)
        assert read_answer_header(frame) == (DONE, 2**60, 2**61, 7)
        assert torch.equal(answer_rows(frame, LAYOUT, site, 5), delta)


def test_frames_hold_at_least_one_token():
    with pytest.raises(ConfigError, match=r"lora_server.max_rows=1 .*choose 2 or more"):
        FrameLayout(SHAPE, torch.float32, 1)
    assert FrameLayout(model_shape(0), torch.float32, 1).max_rows == 1
