# SPDX-License-Identifier: Apache-2.0
"""Finds launch configurations and algorithms by rank of the GPU's LoRA kernels; writes them into its table.

    python -m bench.kernels.autotune_lora [--budget-s 150] [--state FILE.json] [--dry-run]

Time-boxed and resumable: every measurement goes to --state at once, a later run goes on from there; see
README.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice, takewhile
from pathlib import Path

import click
import torch

from bench.harness.records import environment
from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton.configs import KERNEL_NAMES, PHASES, Config, ConfigTable
from moe_lora.workload.popularity.named import LORA_RANKS

from .lora_kernel_cases import Case
from .lora_kernel_clock import COLD_BYTES, Passes
from .lora_kernel_own import ALGORITHMS, gpu_phases
from .lora_kernel_plan import ALL, CaseSpec, Shape
from .lora_kernel_runs import check
from .lora_spaces import config_space, save_table
from .lora_tuning import Crossovers, Found, Pair, Target, descend, in_turn, rank_classes, together, updated

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TUNING_GPU = "NVIDIA H200"
CROSSOVER_SHARE = 0.25
"""Part of the budget for the algorithms by rank, after the best configurations."""
ROWS = {"decode": (64, 32), "prefill": (2048, 8)}


def targets(dtype: str) -> dict[Target, Shape]:
    """Tuned targets, each for both phases: every kernel at every site shape of the benchmark."""
    return {
        Target(
            kernel=kernel,
            dtype=dtype,
            in_features=shape.site.in_features,
            out_features=sum(shape.site.out_features),
        ): shape
        for shape in ALL
        for kernel in KERNEL_NAMES
    }


def case_spec(shape: Shape, dtype: str, phase: str, lora_ranks: tuple[int, ...]) -> CaseSpec:
    """The tuning batch of a phase: decode 64 rows over 32 adapters, prefill 2048 rows over 8."""
    rows, adapters = ROWS[phase]
    return CaseSpec(
        group=phase,
        shape=shape,
        num_rows=rows,
        num_adapters=adapters,
        popularity="uniform" if phase == "decode" else "blocks",
        lora_ranks=lora_ranks,
        dtype=DTYPES[dtype],
    )


def rank_mixes(kernel: str) -> tuple[tuple[int, ...], ...]:
    """Ranks of a kernel's tuning batches: SGMV's expand differs for ranks up to 64."""
    small = tuple(lora_rank for lora_rank in LORA_RANKS if lora_rank <= 64)
    return (LORA_RANKS, small) if kernel == "wgmma_expand" else (LORA_RANKS,)


@lru_cache(maxsize=2 * len(PHASES))
def _case(spec: CaseSpec, device: str) -> Case:
    return Case(spec, torch.device(device), COLD_BYTES["cuda"])


@dataclass
class Tuner:
    """Measures on a device: seconds of a configuration or algorithm, infinite for
    failures and wrong results.
    """

    dtype: str
    shapes: Mapping[Target, Shape]
    device: str = "cuda"
    failures: list[str] = field(default_factory=list)

    def configured(self, target: Target, phase: str, config: Config) -> float:
        """Seconds of the kernel's own part of a delta with this configuration, summed over its batches."""
        algorithm, _, part = target.kernel.partition("_")
        seconds = 0.0
        for lora_ranks in rank_mixes(target.kernel):
            case = _case(case_spec(self.shapes[target], self.dtype, phase, lora_ranks), self.device)
            with configs.override(target.kernel, config):
                seconds += self._seconds(case, algorithm, part, f"{target.key(phase)} {config}")
        return seconds

    def algorithm(self, target: Target, lora_rank: int, name: str, phase: str) -> float:
        """Seconds of a whole delta by an algorithm with adapters of one rank."""
        spec = case_spec(self.shapes[target], self.dtype, phase, (lora_rank,))
        what = f"{target.key(phase)} rank {lora_rank} {name}"
        return self._seconds(_case(spec, self.device), name, "delta", what)

    def _seconds(self, case: Case, algorithm: str, phase: str, what: str) -> float:
        try:
            phases = gpu_phases({"kernel": "sgmv", "algorithm": algorithm})(case)
            check(case, phases)
            before = phases.get("shrink") if phase == "expand" else None
            passes = Passes(phases[phase], case.num_copies, case.device, True, before)
            return min(passes(1) for _ in range(3)) / case.num_copies
        except Exception as error:  # any error of a compiler or launcher for an impossible configuration
            if isinstance(error, torch.AcceleratorError):
                raise  # the device is lost
            self.failures.append(f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            return math.inf


def search_order(shapes: Mapping[Target, Shape]) -> list[list[Target]]:
    """Targets in groups with a common case, made once per turn."""
    groups: dict[tuple[int, int], list[Target]] = {}
    for target in shapes:
        key = (target.in_features, target.out_features)
        groups.setdefault(key, []).append(target)
    return list(groups.values())


def tune(tuner: Tuner, table: ConfigTable, found: Found, deadline: Callable[[float], bool]) -> None:
    """Search the configurations of all targets until 1 - CROSSOVER_SHARE of the budget is spent."""

    def start(target: Target) -> Pair:
        return found.best(target) or known(table, target)

    def one(group: list[Target]) -> Iterator[Pair]:
        for target in group:
            yield from descend(target, start(target), partial(tuner.configured, target), found)

    def spent() -> bool:
        return deadline(1 - CROSSOVER_SHARE)

    in_turn([_in_runs(one(group), spent) for group in search_order(tuner.shapes)], spent)


def known(table: ConfigTable, target: Target) -> Pair:
    """The table's entry for the target."""
    widths = (target.in_features, target.out_features)
    return {phase: table.config(target.kernel, target.dtype, phase, *widths) for phase in PHASES}


def _in_runs(search: Iterator[Pair], spent: Callable[[], bool], length: int = 8) -> Iterator[list[Pair]]:
    """Several measurements a turn: to make the operands anew costs as much as they do."""
    while run := list(islice(takewhile(lambda _: not spent(), search), length)):
        yield run


def crossovers(tuner: Tuner, found: Found, deadline: Callable[[float], bool]) -> Crossovers:
    """Algorithms by ranks, for sites measured at every rank of LORA_RANKS."""
    classes: Crossovers = {}
    for first, *_ in search_order(tuner.shapes):
        place = f"crossover {first.dtype} {first.in_features}x{first.out_features}"
        seconds: dict[int, dict[str, float]] = {}
        for lora_rank in LORA_RANKS:
            if deadline(1.0):
                return classes
            seconds[lora_rank] = {
                name: together(
                    [
                        found.measured(
                            place,
                            {"lora_rank": lora_rank, "algorithm": name, "phase": phase},
                            partial(tuner.algorithm, first, lora_rank, name, phase),
                        )
                        for phase in PHASES
                    ]
                )
                for name in ALGORITHMS
            }
        classes[first] = rank_classes(seconds)
    return classes


@click.command()
@click.option("--budget-s", type=float, default=150.0, show_default=True, help="Seconds of searching.")
@click.option(
    "--state",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("bench/results/lora_tuning.json"),
    show_default=True,
    help="Every measurement; a later run goes on from it.",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True)
@click.option("--dry-run", is_flag=True, help="Say what would be searched; needs no GPU, writes nothing.")
def main(budget_s: float, state: Path, dtype: str, dry_run: bool) -> None:
    """Tune the LoRA kernels for this machine's GPU and write the result into its table."""
    shapes = targets(dtype)
    if dry_run:
        click.echo(plan_text(shapes, configs.load_table(TUNING_GPU)))
        return
    if not torch.cuda.is_available():
        raise click.ClickException("no CUDA device; --dry-run shows what would be searched")
    table = replace(configs.load_table(torch.cuda.get_device_name()), gpu=torch.cuda.get_device_name())
    found, tuner = Found.load(state), Tuner(dtype, shapes)
    started_s = time.monotonic()

    def deadline(share: float) -> bool:
        return time.monotonic() - started_s > share * budget_s

    tune(tuner, table, found, deadline)
    commit = environment(None)["git_commit"]
    note = f"Entries marked tuned: bench/kernels/autotune_lora.py on {table.gpu}, commit {commit}."
    note += " Others are defaults."
    save_table(updated(table, list(shapes), found, {}, note))
    classes = crossovers(tuner, found, deadline)
    path = save_table(updated(table, list(shapes), found, classes, note))
    tuned = sum(found.best(target) is not None for target in shapes)
    click.echo(f"{path}: {tuned} of {len(shapes)} kernels tuned, {len(classes)} rules of ranks")
    click.echo("\n".join(tuner.failures[:20]))


def plan_text(shapes: Mapping[Target, Shape], table: ConfigTable) -> str:
    """The planned searches, and their starts."""
    lines = [
        f"{target.key(phase)}: {len(config_space(target.kernel))} configurations, from {config}"
        for target in shapes
        for phase, config in known(table, target).items()
    ]
    return "\n".join([*lines, f"{len(shapes)} targets in {len(search_order(shapes))} groups"])


if __name__ == "__main__":
    main()
