# SPDX-License-Identifier: Apache-2.0
"""Part of the first run on a GPU: the experts of a layer by our kernels, beside grouped_mm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from .run_log import Log, cuda_us, tried

DEVICE = "cuda"
MODELS = {
    "qwen3": (128, 8, 2048, 768, False),
    "gpt_oss": (32, 4, 2880, 2880, True),
    "mixtral": (8, 2, 4096, 14336, False),
}
"""Experts, experts per token, hidden size, inner size, clamped and biased."""
BATCHES = (1, 4, 8, 16, 64, 256, 2048, 8192)
TRIALS: dict[int, tuple[dict[str, int], ...]] = {
    1: (
        *({"num_stages": stages, "programs_per_sm": per_sm} for stages in (4, 6, 8) for per_sm in (1, 2)),
        {"num_stages": 6, "programs_per_sm": 2, "num_warps": 8},
    ),
    16: (
        *({"num_stages": stages, "programs_per_sm": per_sm} for stages in (3, 5, 6) for per_sm in (2, 3)),
        {"block_n": 64, "num_stages": 5, "programs_per_sm": 3},
        {"block_n": 128, "num_stages": 4, "programs_per_sm": 2},
    ),
    64: (
        *({"num_stages": stages, "programs_per_sm": per_sm} for stages in (3, 5) for per_sm in (2, 3)),
        {"block_n": 64, "num_stages": 5, "programs_per_sm": 3},
        {"block_n": 128, "num_stages": 4, "programs_per_sm": 2},
        {"block_t": 32, "num_stages": 4, "programs_per_sm": 2},
    ),
    8192: (
        {"num_stages": 4},
        {"num_stages": 3, "programs_per_sm": 2},
        {"num_stages": 3, "num_warps": 4, "programs_per_sm": 2},
        {"block_n": 64, "num_stages": 3, "num_warps": 4, "programs_per_sm": 2},
        {"block_n": 64, "num_stages": 4, "num_warps": 4, "programs_per_sm": 2},
        {"block_n": 64, "num_stages": 3, "num_warps": 8, "programs_per_sm": 2},
        {"block_n": 256, "num_stages": 3},
        {"block_n": 256, "num_stages": 4},
        {"block_t": 256, "num_stages": 3},
        {"block_t": 256, "block_n": 64, "num_stages": 3},
        {"block_t": 256, "block_n": 64, "num_stages": 4},
        {"group": 4},
        {"group": 16},
        {"group": 32, "num_stages": 4},
    ),
}
"""Changes to the experts' launch, by number of tokens."""


def experts(log: Log) -> None:
    """Correctness, bits, then GB/s against the bytes of the experts chosen, and TFLOP/s."""
    for name, model in MODELS.items():
        _check(log, name, _Layer(*model))
    time_all(log)


def time_all(log: Log) -> None:
    """Layers of all models, with all batches."""
    import torch

    for name, model in MODELS.items():
        layer = _Layer(*model)
        for tokens in BATCHES:
            _time(log, name, layer, tokens)
        del layer
        torch.cuda.empty_cache()


def expert_tiles(log: Log) -> None:
    """Effect of each change to a launch, and equality of rows' bits; experts of each model."""
    import torch

    for name, model in MODELS.items():
        layer = _Layer(*model)
        for tokens, trials in TRIALS.items():
            _try_tiles(log, name, layer, tokens, trials)
        del layer
        torch.cuda.empty_cache()


def tile_rule(log: Log) -> None:
    """Each size of tiles at rows per expert of prompts: the best rule for `experts.rows_of_tiles`."""
    import torch

    from moe_lora.kernels.triton.linear import experts as kernels

    for name, per_token in (("qwen3", 16), ("gpt_oss", 8)):
        layer = _Layer(*MODELS[name])
        for per_expert in (6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 128):
            x, ids, _ = layer.rows(per_expert * per_token)
            for block_t in (16, 32, 64, 128):
                if not per_expert / 4 < block_t < 8 * per_expert:
                    continue

                def rule(rows: int, experts: int, block_t: int = block_t) -> int:
                    return block_t

                with patch.object(kernels, "rows_of_tiles", rule):
                    order = kernels.order(ids, layer.num_experts)
                    inner = kernels.linear(x, layer.up, layer.biases[0], ids, order, layer.gate)
                    us = [
                        cuda_us(
                            partial(kernels.linear, x, layer.up, layer.biases[0], ids, order, layer.gate)
                        ),
                        cuda_us(partial(kernels.linear, inner, layer.down, layer.biases[1], ids, order)),
                    ]
                about = {"model": name, "rows_per_expert": per_expert, "block_t": block_t}
                log("tile_rule", **about, gate_up_us=us[0][0], down_us=us[1][0])
        del layer
        torch.cuda.empty_cache()


class _Layer:
    """Random experts in bf16, and rows with random experts."""

    def __init__(self, num_experts: int, top_k: int, hidden: int, inner: int, biased: bool) -> None:
        import torch

        from moe_lora.kernels.triton.linear.experts import Gate

        self.num_experts, self.top_k, self.gate = num_experts, top_k, Gate(biased, 7.0)
        given: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
        self.up = torch.randn(num_experts, 2 * inner, hidden, **given).mul_(hidden**-0.5)
        self.down = torch.randn(num_experts, hidden, inner, **given).mul_(inner**-0.5)
        self.biases = [torch.randn(w.shape[:2], **given) if biased else None for w in (self.up, self.down)]
        self.hidden, self.inner = hidden, inner

    def rows(self, tokens: int) -> tuple[Any, Any, Any]:
        """x, ids and weights of a batch."""
        import torch

        x = torch.randn(tokens, self.hidden, device=DEVICE, dtype=torch.bfloat16)
        chosen = torch.rand(tokens, self.num_experts, device=DEVICE).topk(self.top_k)
        return x, chosen.indices.int().sort(-1).values, chosen.values

    def run(self, x: Any, ids: Any, weights: Any) -> Any:
        """A layer's launches, without deltas."""
        from moe_lora.kernels.triton.linear import experts as kernels

        order = kernels.order(ids, self.num_experts)
        inner = kernels.linear(x, self.up, self.biases[0], ids, order, self.gate)
        return kernels.weighted_sum(kernels.linear(inner, self.down, self.biases[1], ids, order), weights)


def _check(log: Log, name: str, layer: _Layer) -> None:
    """Against the reference; and equality of a row's bits alone and in a batch."""
    import torch

    from moe_lora.kernels import reference
    from moe_lora.models.linear import glu

    x, ids, weights = layer.rows(70)
    found = layer.run(x, ids, weights)
    inner = glu(reference.expert_linear(x, layer.up, layer.biases[0], ids), _activation(layer), 7.0)
    down = reference.expert_linear(inner, layer.down, layer.biases[1], ids)
    exact = (down.view(*ids.shape, -1).float() * weights[..., None]).sum(1)
    error = float((found.float() - exact).abs().max() / exact.abs().max())
    whole = layer.run(*(torch.cat([one] * 40) for one in (x, ids, weights)))
    same = [bool(torch.equal(layer.run(x[:n], ids[:n], weights[:n]), found[:n])) for n in (1, 3, 8, 9, 33)]
    log(
        "experts",
        model=name,
        error=error,
        same_bits_alone=same,
        same_in_prefill=bool(torch.equal(whole[:70], found)),
    )


def _activation(layer: _Layer) -> str:
    return "swigluoai" if layer.gate.clamped else "silu"


def _time(log: Log, name: str, layer: _Layer, tokens: int) -> None:
    """The layer, its parts, and the two GEMMs by grouped_mm, without order, bias and gate.

    Few tokens: several batches in turn, with experts' weights outside the L2 cache.
    """
    batches = [_Batch(layer, tokens) for _ in range(4 if tokens <= 16 else 1)]
    share = sum(batch.share for batch in batches) / len(batches)
    num_weights = {"gate_up": layer.up.numel(), "down": layer.down.numel()}
    for call in batches[0].calls:
        about: dict[str, Any] = {"model": name, "tokens": tokens, "call": call}

        def run(call: str = call) -> None:
            for batch in batches:
                batch.calls[call]()

        try:
            all_us, how = cuda_us(run)
        except Exception as error:  # an impossible case of this torch is a result
            log("experts", **about, error=str(error)[:200])
            continue
        us = all_us / len(batches)
        size = num_weights.get(
            call.removeprefix("grouped_mm "), sum(num_weights.values()) * (call == "layer")
        )
        flops = 2 * size / layer.num_experts * tokens * layer.top_k
        rates = {"TB_s": 2 * size * share / us / 1e6, "TFLOP_s": flops / us / 1e6}
        log("experts", **about, us=us, how=how, **(rates if size else {}))


class _Batch:
    """Rows of a layer and their timed calls; share: of chosen experts."""

    def __init__(self, layer: _Layer, tokens: int) -> None:
        import torch
        from torch.nn import functional

        from moe_lora.kernels.triton.linear import experts as kernels

        x, ids, weights = layer.rows(tokens)
        order, expert = kernels.order(ids, layer.num_experts), ids.flatten().sort().values
        ends = torch.searchsorted(expert, torch.arange(1, layer.num_experts + 1, device=DEVICE)).int()
        wide = torch.randn(ids.numel(), layer.hidden, device=DEVICE, dtype=torch.bfloat16)
        inner = torch.randn(ids.numel(), layer.inner, device=DEVICE, dtype=torch.bfloat16)
        self.share = int(ids.unique().numel()) / layer.num_experts
        self.calls: dict[str, Callable[[], Any]] = {
            "layer": lambda: layer.run(x, ids, weights),
            "order": lambda: kernels.order(ids, layer.num_experts),
            "gate_up": lambda: kernels.linear(x, layer.up, layer.biases[0], ids, order, layer.gate),
            "down": lambda: kernels.linear(inner, layer.down, layer.biases[1], ids, order),
            "sum": lambda: kernels.weighted_sum(wide, weights),
            "grouped_mm gate_up": lambda: functional.grouped_mm(wide, layer.up.mT, offs=ends),
            "grouped_mm down": lambda: functional.grouped_mm(inner, layer.down.mT, offs=ends),
        }


def _try_tiles(log: Log, name: str, layer: _Layer, tokens: int, trials: tuple[dict[str, int], ...]) -> None:
    """gate_up and down of `tokens` tokens, as usual and with each change."""
    from unittest.mock import patch

    import torch

    from moe_lora.kernels.triton.linear import experts as kernels

    batches = [_Batch(layer, tokens) for _ in range(4 if tokens <= 16 else 1)]
    for call in ("gate_up", "down"):
        right = batches[0].calls[call]()
        for change in ({}, *trials):

            def run(call: str = call) -> None:
                for batch in batches:
                    batch.calls[call]()

            about: dict[str, Any] = {"model": name, "tokens": tokens, "call": call, "change": change}
            tile, row = _changed(kernels.tile_config, change), _changed(kernels.row_config, change)
            patched = patch.multiple(kernels, tile_config=tile, row_config=row)
            with tried(log, "expert_tiles", **about), patched:
                us, how = cuda_us(run, 10)
                same = bool(torch.equal(batches[0].calls[call](), right))
                log("expert_tiles", **about, us=us / len(batches), how=how, same_bits=same)


def _changed(config: Callable[..., Any], change: dict[str, int]) -> Callable[..., Any]:
    return lambda *given: config(*given)._replace(**change)
