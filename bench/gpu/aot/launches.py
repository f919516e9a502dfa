# SPDX-License-Identifier: Apache-2.0
"""Launches of every Triton kernel without a table, on empty tensors, as `aot` records them."""

from __future__ import annotations

import torch

from moe_lora.kernels.operands import Zeros
from moe_lora.kernels.quantised import Format, QuantisedOperand
from moe_lora.kernels.triton import configs, exchange
from moe_lora.kernels.triton.linear import experts, quantised_linear
from moe_lora.kernels.triton.lora.problem import Deltas
from moe_lora.kernels.triton.lora.segments import RowsToSort, rows_to_sort
from moe_lora.kernels.triton.norm import norm

_SHAPES = (128, 8, 2048, 768, False), (32, 4, 2880, 2880, True), (8, 2, 1001, 517, True)
"""Experts, experts per token, hidden and inner size, bias: Qwen3-30B-A3B, GPT-OSS-20B, no model."""


def launch_experts(dtype: torch.dtype) -> None:
    """Launch every kernel by kind of model and batch, on empty tensors."""
    for num_experts, top_k, hidden, inner, biased in _SHAPES:
        weights = [
            torch.empty(num_experts, *shape, dtype=dtype) for shape in ((2 * inner, hidden), (hidden, inner))
        ]
        biases = [weight.new_empty(weight.shape[:2]) if biased else None for weight in weights]
        tiled = dtype == torch.bfloat16 and inner % 64 == 0
        logits, live = torch.empty(2, num_experts, dtype=dtype), torch.empty(2, dtype=torch.bool)
        correction = torch.empty(num_experts, dtype=torch.float32)
        grouped = (
            experts.GateChoice(top_k, 2, 1.0, 4, 2)
            if num_experts % 4 == 0 and num_experts > 8
            else experts.GateChoice(top_k, 2)
        )
        plain = [experts.GateChoice(top_k, *one) for one in ((1, 0.0), (1, 1.0), (1, 2.0), (0, 0.0))]
        corrected = [experts.GateChoice(top_k, 1, 1.0), experts.GateChoice(top_k, 2, 1.0), grouped]
        for choice, bias in [(one, None) for one in plain] + [(one, correction) for one in corrected]:
            experts.choose(logits, live, choice, bias)
            for tile_rows in (None, 0, 16):
                _launch_choice(logits, live, choice, bias, tile_rows)
        for rows_per_expert in (0, 2, 20, 40, 100) if tiled else (0, 2):
            num_tokens = max(1, rows_per_expert * num_experts // top_k)
            ids = torch.empty(num_tokens, top_k, dtype=torch.int32)
            rows = experts.order(ids, num_experts)
            x = torch.empty(num_tokens, hidden, dtype=dtype)
            inner_rows = experts.linear(x, weights[0], biases[0], ids, rows, experts.Gate(biased, 7.0))
            experts.linear(x, weights[0], biases[0], ids, rows)
            if experts.adds_deltas(ids, num_experts):
                slots, values = ids.new_empty(num_tokens), x.new_empty(ids.numel(), 2 * inner)
                deltas = Deltas(values, slots, slots, 1, 1)
                experts.linear(x, weights[0], biases[0], ids, rows, experts.Gate(biased, 7.0), deltas)
            y = experts.linear(inner_rows, weights[1], biases[1], ids, rows)
            experts.gate(inner_rows, experts.Gate(biased, 7.0))
            experts.weighted_sum(y, torch.empty(num_tokens, top_k))


def _launch_choice(
    logits: torch.Tensor,
    live: torch.Tensor,
    choice: experts.GateChoice,
    correction: torch.Tensor | None,
    tile_rows: int | None,
) -> None:
    slots, zeros, num_experts = live.int(), Zeros(), logits.shape[1]

    def rows(ids: torch.Tensor) -> RowsToSort:
        return rows_to_sort(slots, ids, 5, num_experts, tile_rows or 0, zeros)

    to_sort = None if tile_rows is None else rows
    experts.choose_and_order(logits, live, choice, correction, range(choice.top_k), zeros, to_sort)


_FORMATS = (
    *(Format("int8"), Format("int8", 32), Format("fp8"), Format("fp8", 128, 128)),
    *(Format("int4", 32), Format("int4", 64), Format("int4", 128), Format("mxfp4", 32)),
)


def launch_quantised(dtype: torch.dtype) -> None:
    """Launch both kernels with every format, dense and experts of few and many
    rows, on empty tensors.
    """
    width = 1024
    for form in _FORMATS if dtype != torch.float16 else _FORMATS[1::2]:
        for copies, tokens, num_out in (((), 1, 256), ((2,), 4, 1024), ((), 65, 1024), ((2,), 256, 64)):
            sizes, kinds = form.sizes(num_out, width), form.dtypes(dtype)
            data, scale = (
                torch.empty(*copies, *size, dtype=of) for size, of in zip(sizes, kinds, strict=True)
            )
            zero = torch.empty(*copies, num_out, form.num_groups(width), dtype=torch.int8)
            has_zero = form == Format("int4", 128)
            weight = QuantisedOperand(form, data, scale, zero if has_zero else None)
            ids = torch.zeros(tokens, 2, dtype=torch.int32) if copies else None
            bias = torch.empty(*copies, num_out, dtype=dtype)
            quantised_linear.launch(torch.empty(tokens, width, dtype=dtype), weight, bias, ids, num_out)


def launch_norms(dtype: torch.dtype) -> None:
    """Launch every kind, on empty tensors."""
    for width, centred, biased in (
        (2048, False, False),
        (2880, False, False),
        (4096, True, True),
        (6144, True, False),
    ):
        weight = torch.empty(width, dtype=dtype)
        norm(torch.empty(2, width, dtype=dtype), weight, 1e-6, centred, weight if biased else None)


def launch_exchange(word: torch.Tensor) -> None:
    """Launch every kernel of puts.  word: int64 [8]."""
    signals = exchange.Signals(word, word, range(1))
    for status in (None, (word, 8)):
        exchange.launch_wait(signals, 8, word, exchange.NO_BOUND, status)
    exchange.launch_admit(
        word,
        word,
        word.view(2, 4),
        0,
        torch.empty(64, dtype=torch.int32),
        word,
        word,
        exchange.NO_BOUND,
        True,
    )
    for dtype in configs.DTYPE_NAMES:
        y, ids = torch.empty(8, 2048, dtype=dtype), torch.empty(1, 8, dtype=torch.int32)
        exchange.launch_add_rows(y, y, word, None)
        exchange.launch_add_rows(y, y, word, ids)
