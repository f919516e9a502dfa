# SPDX-License-Identifier: Apache-2.0
"""Part of the first run on a GPU: linear layers over quantised weights, beside torch's over bf16 ones."""

from __future__ import annotations

import math
from typing import Any

from .run_log import Log, copied_per_s, cuda_us, tried

FORMATS = (
    ("int8", 0, 1),
    ("int8", 128, 1),
    ("int4", 32, 1),
    ("int4", 64, 1),
    ("int4", 128, 1),
    ("fp8", 0, 1),
    ("fp8", 128, 128),
    ("mxfp4", 32, 1),
)
"""Name, group size, outputs per scale."""
LAYERS = {"qkv": (0, 1, 5120, 2048), "down": (0, 1, 4096, 14336), "experts": (128, 8, 1536, 2048)}
"""Experts (0: dense), experts per token, outputs, inputs."""
ROWS = (1, 8, 64, 2048)
_CACHED_BYTES = 160 << 20
"""More than any cache holds: layers of fewer bytes are there several times, in turn."""


def quantised(log: Log, device: str = "cuda", layers: Any = None, rows: tuple[int, ...] = ROWS) -> None:
    """Error against the dequantised weights, then GB/s of values and scales, and TFLOP/s; copying's rate."""
    import torch

    if device == "cuda":
        log("quantised", what="copy_TB_s", value=copied_per_s()["best"] / 1e12)
    for name, layer in (layers or LAYERS).items():
        for form in FORMATS:
            with tried(log, "quantised", layer=name, format=form):
                _format(log, name, layer, form, device, rows)
        if device == "cuda" and not layer[0]:
            _plain(log, name, layer, rows)
            torch.cuda.empty_cache()


def _operand(form: Any, experts: tuple[int, ...], num_out: int, width: int, device: str) -> Any:
    """Random values with scales for weights of about one over the root of the width."""
    import torch

    from moe_lora.kernels.quantised import QuantisedOperand

    sizes, kinds = form.sizes(num_out, width), form.dtypes(torch.bfloat16)
    data = torch.randint(0, 120, (*experts, *sizes[0]), dtype=torch.uint8, device=device)
    size = width**-0.5 / {"int8": 64, "int4": 4, "fp8": 16, "mxfp4": 2}[form.name]
    scale = torch.full((*experts, *sizes[1]), size, device=device)
    if form.name == "mxfp4":
        scale.fill_(127 + round(math.log2(size)))
    return QuantisedOperand(form, data.view(kinds[0]), scale.to(kinds[1]))


def _format(log: Log, name: str, layer: Any, of: Any, device: str, rows: tuple[int, ...]) -> None:
    import torch

    from moe_lora.kernels import reference
    from moe_lora.kernels.quantised import format_of
    from moe_lora.kernels.triton.linear.quantised_linear import quantised_linear

    num_experts, top_k, num_out, width = layer
    form, experts = format_of(*of), (num_experts,) * bool(num_experts)
    first = _operand(form, experts, num_out, width, device)
    num_bytes = first.data.nbytes + first.scale.nbytes
    copies = max(1, -(-_CACHED_BYTES // num_bytes)) if device == "cuda" else 1
    held = [first, *(_operand(form, experts, num_out, width, device) for _ in range(copies - 1))]
    for num_rows in rows:
        x = torch.randn(num_rows, width, device=device).to(torch.bfloat16)
        ids, chosen = None, 1.0
        if num_experts:
            ids = torch.rand(num_rows, num_experts, device=device).topk(top_k).indices.int().sort(-1).values
            chosen = ids.unique().numel() / num_experts
        found = quantised_linear(x, first, None, ids, num_out).float()
        exact = reference.quantised_linear(x, first, None, ids, num_out).float()
        about: dict[str, Any] = {"layer": name, "format": of, "rows": num_rows}
        about["error"] = float((found - exact).abs().max() / exact.abs().max())
        if device == "cuda":

            def run(x: Any = x, ids: Any = ids) -> None:
                for weight in held:
                    quantised_linear(x, weight, None, ids, num_out)

            us, about["how"] = cuda_us(run, 7)
            about["us"] = us / copies
            about["TB_s"] = chosen * num_bytes * copies / us / 1e6
            about["TFLOP_s"] = 2 * num_rows * top_k * num_out * width * copies / us / 1e6
        log("quantised", **about)


def _plain(log: Log, name: str, layer: Any, rows: tuple[int, ...]) -> None:
    """torch's product over bf16 weights."""
    import torch

    _, _, num_out, width = layer
    copies = -(-_CACHED_BYTES // (2 * num_out * width))
    held = [torch.randn(num_out, width, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    for num_rows in rows:
        x = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)

        def run(x: Any = x) -> None:
            for weight in held:
                torch.nn.functional.linear(x, weight)

        us, how = cuda_us(run, 7)
        rates = {"TB_s": 2 * num_out * width * copies / us / 1e6}
        log("quantised", layer=name, format="bf16, torch", rows=num_rows, us=us / copies, how=how, **rates)
