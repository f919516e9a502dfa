# SPDX-License-Identifier: Apache-2.0
"""The autotuner's search and what it writes, with invented times."""

from __future__ import annotations

import math
from pathlib import Path

from click.testing import CliRunner

from bench.kernels.autotune_lora import TUNING_GPU, main, rank_mixes, targets
from bench.kernels.lora_spaces import config_space
from bench.kernels.lora_tuning import (
    Found,
    Pair,
    Target,
    descend,
    in_turn,
    neighbours,
    rank_classes,
    updated,
)
from moe_lora.kernels.triton.configs import PHASES, Config, load_table, order_of
from moe_lora.kernels.triton.lora.triton_lora import choose

TARGET = Target(kernel="vector_expand", dtype="bf16", in_features=4096, out_features=4096)
WIDTHS = (4096, 4096)


def test_expand_is_tuned_where_ranks_take_one_lane_and_where_they_take_two() -> None:
    assert sorted(max(ranks) > 64 for ranks in rank_mixes("wgmma_expand")) == [False, True]
    assert len(rank_mixes("wgmma_shrink")) == 1


def start() -> Pair:
    return dict.fromkeys(PHASES, config_space(TARGET.kernel)[0])


def goal(phase: str) -> Config:
    """The fastest of a phase; the phases want other blocks of columns, which they must share."""
    last = config_space(TARGET.kernel)[-1]
    return last if phase == "decode" else {**last, "block_c": 128, "num_stages": 2}


def distance(phase: str, config: Config) -> float:
    """Fastest at `goal`, and slower with every value that differs; decode cares more."""
    weight = 2.0 if phase == "decode" else 1.0
    return 1.0 + weight * sum(config[name] != value for name, value in goal(phase).items())


BEST = {"decode": goal("decode"), "prefill": {**goal("prefill"), "block_c": goal("decode")["block_c"]}}
"""The blocks that decode wants, as it loses more without them."""


def measured(found: Found) -> int:
    return sum(len(found.seconds[TARGET.key(phase)]) for phase in PHASES)


def test_neighbours_differ_in_one_value_and_add_in_the_same_order() -> None:
    space = config_space(TARGET.kernel)
    for pair in neighbours(TARGET.kernel, start()):
        assert all(config in space for config in pair.values())
        changed = {
            name for phase in PHASES for name, value in start()[phase].items() if pair[phase][name] != value
        }
        assert len(changed) == 1
        assert len({order_of(TARGET.kernel, config) for config in pair.values()}) == 1


def test_descent_finds_the_best_pair_without_measuring_everything() -> None:
    found = Found()
    steps = list(descend(TARGET, start(), distance, found))
    assert found.best(TARGET) == BEST
    assert len(steps) <= measured(found) < len(config_space(TARGET.kernel))


def test_a_second_run_goes_on_where_the_first_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    first = descend(TARGET, start(), distance, Found.load(path))
    done = [(phase, config) for _ in range(4) for phase, config in next(first).items()]

    def measure(phase: str, config: Config) -> float:
        assert (phase, config) not in done
        return distance(phase, config)

    found = Found.load(path)
    list(descend(TARGET, start(), measure, found))
    assert found.best(TARGET) == BEST


def test_what_failed_is_never_the_best_and_is_remembered(tmp_path: Path) -> None:
    found = Found.load(tmp_path / "state.json")
    list(descend(TARGET, start(), lambda phase, config: math.inf, found))
    assert found.best(TARGET) is None
    assert Found.load(tmp_path / "state.json").seconds == found.seconds


def test_a_phase_alone_has_no_best_pair() -> None:
    found = Found()
    found.measured(TARGET.key("decode"), goal("decode"), lambda: 1.0)
    found.measured(TARGET.key("prefill"), goal("prefill"), lambda: 1.0)
    assert found.best(TARGET) is None, "they add in different orders"


def test_searches_take_turns_until_time_is_up() -> None:
    turns: list[str] = []

    def search(name: str, length: int):  # type: ignore[no-untyped-def]
        for _ in range(length):
            turns.append(name)
            yield name

    assert in_turn([search("a", 3), search("b", 1)], lambda: False) == 4
    assert turns == ["a", "b", "a", "a"]
    assert in_turn([search("c", 9)], lambda: turns.count("c") == 2) == 2


def test_rank_classes_cover_every_rank_and_merge_equal_neighbours() -> None:
    seconds = {
        8: {"vector": 1.0, "wgmma": 2.0},
        16: {"vector": 1.0, "wgmma": 2.0},
        64: {"vector": 3.0, "wgmma": 2.0},
        128: {"vector": math.inf, "wgmma": 5.0},
    }
    assert rank_classes(seconds) == [(1, 16, "vector"), (17, 512, "wgmma")]
    assert rank_classes({8: {"vector": math.inf}}) == []
    assert rank_classes({}) == []


def test_the_table_takes_what_was_found_and_keeps_the_rest() -> None:
    table, found = load_table(TUNING_GPU), Found()
    list(descend(TARGET, start(), distance, found))
    new = updated(table, [TARGET], found, {TARGET: [(1, 16, "vector"), (17, 512, "wgmma")]}, "note")
    for phase in PHASES:
        assert new.config(TARGET.kernel, "bf16", phase, *WIDTHS) == BEST[phase]
        other = (TARGET.kernel, "bf16", phase, 4096, 4097)
        assert new.config(*other) == table.config(*other)
    (shape,) = {shape.model: shape for shape in targets("bf16").values() if shape.model == "dense"}.values()
    classes = choose(shape.site, "bf16", new)
    assert [(c.algorithm, c.min_rank, c.max_rank) for c in classes] == [("vector", 1, 16), ("wgmma", 17, 512)]
    assert choose(shape.site, "fp16", new) == choose(shape.site, "fp16", table)
    again = updated(new, [TARGET], found, {TARGET: [(1, 512, "wgmma")]}, "note")
    assert len(again.entries) == len(new.entries)
    assert len(choose(shape.site, "bf16", again)) == 1


def test_dry_run_names_every_target_without_a_gpu() -> None:
    done = CliRunner().invoke(main, ["--dry-run"])
    assert done.exit_code == 0, done.output
    assert all(target.key(phase) in done.output for target in targets("bf16") for phase in PHASES)
