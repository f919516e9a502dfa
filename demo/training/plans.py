# SPDX-License-Identifier: Apache-2.0
"""Which adapters the demo has: every task once under its own name, and again at another rank.

Together with the base they stay below 16 MB: a unit of rank costs 48 kB in the fused form and
56 kB in the per-expert form, which keeps an A for gate and another for up.
"""

from __future__ import annotations

from demo.tasks import TASKS

from .lora import AdapterPlan

_HARDEST_STEPS = 800
_HARD_STEPS = 300
_STEPS = 150
_HARD_TASKS = ("reverse", "rotate", "swap_pairs", "every_second", "no_vowels", "squeeze", "mark_caps")
_HARDEST = ("reverse", "mark_caps", "squeeze", "swap_pairs-r4", "double-r6")
_RANKS = {"upper": 4, "lower": 4, "leet": 4, "dashes": 4, "mark_caps": 4}
_DEFAULT_RANK = 8
_VARIANT_RANKS = {
    "upper": 2,
    "lower": 2,
    "swapcase": 2,
    "alternate": 4,
    "reverse": 16,
    "rotate": 4,
    "swap_pairs": 4,
    "mark_caps": 2,
    "squeeze": 4,
    "every_second": 4,
    "no_vowels": 4,
    "star_vowels": 2,
    "double": 6,
    "rot13": 2,
    "caesar": 4,
    "atbash": 2,
    "leet": 2,
    "dashes": 2,
}
_PER_EXPERT = ("rot13", "caesar", "atbash", "leet", "dashes", "no_vowels", "star_vowels-r2", "upper-r2")


def _num_steps(name: str, task: str) -> int:
    if name in _HARDEST:
        return _HARDEST_STEPS
    return _HARD_STEPS if task in _HARD_TASKS else _STEPS


def _plan(name: str, task: str, lora_rank: int) -> AdapterPlan:
    return AdapterPlan(
        name=name,
        task=task,
        lora_rank=lora_rank,
        num_steps=_num_steps(name, task),
        form="per_expert" if name in _PER_EXPERT else "fused",
    )


def adapter_plans() -> list[AdapterPlan]:
    """All adapters: `<task>` and `<task>-r<lora rank>`."""
    plans = [_plan(task, task, _RANKS.get(task, _DEFAULT_RANK)) for task in TASKS]
    return plans + [_plan(f"{task}-r{rank}", task, rank) for task, rank in _VARIANT_RANKS.items()]
