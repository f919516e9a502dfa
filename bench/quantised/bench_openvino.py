# SPDX-License-Identifier: Apache-2.0
"""Decode speed of quantised bases beside OpenVINO GenAI with weights of as many bits: an optional peer.

    python -m bench.quantised.bench_openvino --openvino-python VENV/bin/python --model llama [--out FILE]

VENV is another environment, with openvino-genai, optimum-intel and nncf; none is a dependency of ours.
optimum-cli exports the same random checkpoint in 8 and in 4 bits (symmetric groups of 64, as our int4).
OpenVINO quantises inputs to 8 bits if faster, and always the head, to 8 bits; so our head is quantised too,
in the format of the rest.  Steps of both are interleaved; ours also with eight adapters of rank 16 in the
batch, which OpenVINO cannot mix.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from bench.harness.interleave import interleave, ratio
from bench.harness.random_model import TINY, ModelSize
from bench.harness.records import Recorder
from bench.harness.tables import table

from .bench_quantised import (
    MODELS,
    NUM_ADAPTERS,
    NUM_ROUNDS,
    NUM_STEPS,
    NUM_THREADS,
    PROMPT_LEN,
    Cell,
    runs_of,
)

EXPORTS = {
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--ratio", "1.0", "--group-size", "64", "--sym"],
}
OURS = ("int8", "int4", "int8-dynamic", "int4-dynamic")


class OpenVino:
    """One exported model in a separate process."""

    def __init__(self, python: Path, model_dir: Path, threads: int, size: ModelSize) -> None:
        worker = Path(__file__).with_name("openvino_worker.py")
        numbers = [str(n) for n in (threads, PROMPT_LEN, size.vocab_size)]
        self._process = subprocess.Popen(
            [str(python), str(worker), str(model_dir), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def seconds(self, requests: int, steps: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{requests} {steps}\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._answer())
        if "error" in answer:
            raise click.ClickException(f"OpenVINO: {answer['error']}")
        return float(answer["s"])

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException("the OpenVINO process ended; its reason is above")
        return line

    def close(self) -> None:
        self._process.communicate()


def exported(python: Path, model: Path, bits: str, folder: Path) -> Path:
    """The checkpoint as OpenVINO takes it."""
    out = folder / f"openvino-{bits}"
    command = [str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
    task = ["--task", "text-generation-with-past", *EXPORTS[bits], str(out)]
    subprocess.run(command + task, check=True)
    return out


@click.command(help=__doc__)
@click.option("--openvino-python", "python", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--model", "name", type=click.Choice(list(MODELS)), default="llama", show_default=True)
@click.option("--out", type=click.Path(), help="Append records to this file.")
@click.option("--threads", default=NUM_THREADS, show_default=True)
@click.option("--quick", is_flag=True, help="A tiny model, one round, to see that it runs.")
def main(python: Path, name: str, out: str | None, threads: int, quick: bool) -> None:
    torch.set_num_threads(threads)
    size, requests, num_rounds = MODELS[name], {n: NUM_STEPS[n] for n in (1, 8, 16)}, NUM_ROUNDS
    if quick:
        size = replace(TINY, hidden_size=256, intermediate_size=256, num_experts=min(4, size.num_experts))
        requests, num_rounds = {1: 2, 8: 2}, 1
    recorder, lines = Recorder(out), []
    with tempfile.TemporaryDirectory() as folder:
        runs = runs_of(Path(folder), size, requests, OURS, head=True)
        peers = {
            bits: OpenVino(
                python, exported(python, Path(folder) / "model", bits, Path(folder)), threads, size
            )
            for bits in EXPORTS
        }
        contestants: dict[Any, Any] = {
            cell: (run, requests[cell[1]], num_rounds) for cell, run in runs.items()
        }
        for bits, peer in peers.items():
            for num in requests:

                def run(num_steps: int, peer: OpenVino = peer, num: int = num) -> float:
                    return peer.seconds(num, num_steps)

                contestants["openvino", bits, num] = (run, requests[num], num_rounds)
        for run, _, _ in contestants.values():
            run(2)
        times: dict[Any, list[float]] = interleave(contestants, num_rounds)
        for cell in runs:
            result = beside_openvino(cell, times)
            config = {
                "bench": "quantised_openvino",
                "model": name,
                "size": size.describe(),
                "threads": threads,
                "quantize_head": True,
            }
            config |= dict(zip(("quantize", "num_requests", "num_adapters"), cell, strict=True))
            recorder(config, result)
            lines.append(
                {
                    "format": cell[0],
                    "requests": str(cell[1]),
                    "adapters": str(cell[2]),
                    "tokens/s": f"{result['tokens_per_s']:.1f}",
                    "OpenVINO": f"{result['openvino_tokens_per_s']:.1f}",
                    "over OpenVINO": f"{result['over_openvino']['median']:.2f}",
                }
            )
        for peer in peers.values():
            peer.close()
        for core in {id(run.core): run.core for run in runs.values()}.values():
            core.close()
    click.echo(table(lines, f"\n{name}: ours with up to {NUM_ADAPTERS} adapters, OpenVINO's base"))


def beside_openvino(cell: Cell, times: dict[Any, list[float]]) -> dict[str, Any]:
    """A cell of ours and OpenVINO's base of as many bits and requests."""
    quantize, num_requests, _ = cell
    theirs = times["openvino", quantize.removesuffix("-dynamic"), num_requests]
    return {
        "tokens_per_s": num_requests / statistics.median(times[cell]),
        "openvino_tokens_per_s": num_requests / statistics.median(theirs),
        "over_openvino": ratio(theirs, times[cell]),
        "step_ms_rounds": [1e3 * one for one in times[cell]],
        "openvino_step_ms_rounds": [1e3 * one for one in theirs],
    }


if __name__ == "__main__":
    main()
