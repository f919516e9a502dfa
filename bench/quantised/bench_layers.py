# SPDX-License-Identifier: Apache-2.0
"""Linear layers over quantised weights, format by format, beside the same layers in bf16.

    python -m bench.quantised.bench_layers --out bench/results/quantised_isa.jsonl [--quick]

With MOE_LORA_ISA=avx512_bf16 it does without AMX.

No engine: matrices of a Llama's gate_up [8192, 1024] and down [1024, 4096], beyond the caches' size, one pass
over all of a kind per turn, turns interleaved.  Each round also measures the machine's read bandwidth and its
rate of int8 matrix products: the larger share binds a layer.  The last lines name each cell slower than bf16:
the rule is that there is none, on each instruction set.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import click
import torch

from bench.engine.ceiling import ReadBandwidth
from bench.harness.interleave import interleave, ratio, repeated
from bench.harness.records import Recorder
from bench.harness.tables import table
from moe_lora.kernels.cpu import cpu
from moe_lora.kernels.quantised import Format, QuantisedOperand, format_of

from .bench_quantised import NUM_ROUNDS, NUM_THREADS, Int8Rate, one_reading

SHAPES = {"gate_up": (8192, 1024), "down": (1024, 4096)}
FORMATS = (
    *(format_of("int8"), format_of("int4", 64), format_of("fp8"), format_of("fp8", 128, 128)),
    *(format_of("mxfp4", 32), format_of("int8-dynamic"), format_of("int4-dynamic", 64)),
)
ROWS = (1, 4, 8, 12, 16, 64)
NUM_WEIGHTS = 64 << 20
"""Of a shape, in as many matrices as it takes; in 4 bits still more than the caches hold."""


def title(form: Format | None) -> str:
    if form is None:
        return "bf16"
    return f"{form.name}/{form.group_size}" if form.group_size else form.name


def any_weights(form: Format, num_out: int, width: int) -> QuantisedOperand:
    """Random bytes of both signs that are numbers in each format, and a random scale per group."""
    sizes, kinds = form.sizes(num_out, width), form.dtypes(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    size = torch.randint(127, sizes[0], generator=generator, dtype=torch.uint8)
    sign = torch.randint(2, sizes[0], generator=generator, dtype=torch.uint8)
    scale = 110 + 20 * torch.rand(sizes[1], generator=generator)
    return QuantisedOperand(form, (size + 128 * sign).view(kinds[0]), scale.to(kinds[1]))


def layers_of(form: Format | None, num_out: int, width: int, count: int) -> tuple[Callable[..., Any], int]:
    """One pass over `count` matrices for given inputs, and its bytes read."""
    if form is None:
        plain = [torch.full((num_out, width), 0.5, dtype=torch.bfloat16) for _ in range(count)]
        return lambda x: [cpu.linear(x, weight, None) for weight in plain], sum(w.nbytes for w in plain)
    held = [any_weights(form, num_out, width) for _ in range(count)]
    num_bytes = sum(weight.data.nbytes + weight.scale.nbytes for weight in held)
    return lambda x: [cpu.quantised_linear(x, weight, None, None, num_out) for weight in held], num_bytes


def slower_cells(lines: list[dict[str, str]]) -> list[str]:
    """A line for each cell whose median over bf16 is below 1, and a last line with their number."""
    slower = [one for one in lines if float(one["over bf16"]) < 1]
    return [
        *(
            f"slower than bf16: {one['layer']}, {one['format']}, {one['rows']} rows: {one['over bf16']}"
            for one in slower
        ),
        f"{cpu.isa()}: {len(slower)} of {len(lines)} cells are slower than bf16",
    ]


@click.command(help=__doc__)
@click.option("--out", type=click.Path(), help="Append records to this file.")
@click.option("--threads", default=NUM_THREADS, show_default=True)
@click.option("--quick", is_flag=True, help="Few small matrices, one round, to see that it runs.")
def main(out: str | None, threads: int, quick: bool) -> None:
    torch.set_num_threads(threads)
    shapes, num_weights, num_rounds = SHAPES, NUM_WEIGHTS, NUM_ROUNDS
    if quick:
        shapes, num_weights, num_rounds = {"gate_up": (256, 128)}, 1 << 16, 1
    recorder, bandwidths, rates = Recorder(out), list[float](), list[float]()
    contestants: dict[Any, Any] = {
        "bandwidth": (one_reading(ReadBandwidth().measure, bandwidths), 1, num_rounds),
        "int8": (one_reading(Int8Rate().measure, rates), 1, num_rounds),
    }
    read: dict[tuple[str, str], int] = {}
    for name, (num_out, width) in shapes.items():
        for form in (None, *FORMATS):
            layers, read[name, title(form)] = layers_of(
                form, num_out, width, num_weights // (num_out * width)
            )
            for rows in ROWS:
                x = torch.rand(rows, width).bfloat16()
                layers(x)
                run = repeated(functools.partial(layers, x))
                contestants[name, title(form), rows] = (run, 1, num_rounds)
    times: dict[Any, list[float]] = interleave(contestants, num_rounds)
    bandwidth, rate, lines = statistics.median(bandwidths), statistics.median(rates), []
    for (name, form_title), num_bytes in read.items():
        for rows in ROWS:
            seconds = statistics.median(times[name, form_title, rows])
            result: dict[str, Any] = {
                "ms": 1e3 * seconds,
                "over_bf16": ratio(times[name, "bf16", rows], times[name, form_title, rows]),
                "read_bytes": num_bytes,
                "share_of_ceiling": num_bytes / bandwidth / seconds,
                "read_bytes_per_s": bandwidth,
                "int8_gemm_per_s": rate,
                "share_of_int8_gemm": 2 * rows * num_weights / seconds / rate,
            }
            shape = {"layer": name, "num_out": shapes[name][0], "width": shapes[name][1]}
            recorder(
                {
                    "bench": "quantised_layers",
                    **shape,
                    "format": form_title,
                    "rows": rows,
                    "threads": threads,
                    "isa": cpu.isa(),
                },
                result,
            )
            lines.append(
                {
                    "layer": name,
                    "format": form_title,
                    "rows": str(rows),
                    "ms": f"{1e3 * seconds:.2f}",
                    "over bf16": f"{result['over_bf16']['median']:.2f}",
                    "of ceiling": f"{result['share_of_ceiling']:.0%}",
                    "of int8 GEMM": f"{result['share_of_int8_gemm']:.0%}",
                }
            )
    click.echo(table(lines, "\nlayers"))
    for line in slower_cells(lines):
        click.echo(line)


if __name__ == "__main__":
    main()
