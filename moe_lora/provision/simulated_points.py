"""A run at one rate in the simulator, steps timed by a performance model; for operating points in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_lora.core.step_profile import StageTime, StepProfile
from moe_lora.policies.step_model import Row, StepModel
from moe_lora.sim.config import InstanceConfig, LocalConfig, SystemConfig
from moe_lora.sim.system import simulate

from .operating_points import PointLoad, SloGoal, Trial, judge


@dataclass(frozen=True, kw_only=True)
class _RankTime(StageTime):
    """A model's times of batches of one rank, instead of a line; of a decode step, or of prompts."""

    model: StepModel
    lora_rank: int
    num_adapters: int
    prompt_tokens: int | None
    known_s: dict[int, float] = field(default_factory=dict, compare=False)

    def seconds(self, num_rows: float) -> float:
        """Of num_rows decode rows, or prompt tokens."""
        count = round(num_rows)
        if count not in self.known_s:
            self.known_s[count] = self._seconds(count)
        return self.known_s[count]

    def _seconds(self, count: int) -> float:
        if self.prompt_tokens is None:
            return self.model.decode_step_s(self._rows([1] * count))
        whole, rest = divmod(count, self.prompt_tokens)
        return self.model.prefill_step_s(self._rows([self.prompt_tokens] * whole + [rest] * (rest > 0)))

    def _rows(self, lengths: list[int]) -> list[Row]:
        """Over as many adapters as that many even draws would have: A (1 - (1 - 1/A)^n)."""
        total = self.num_adapters
        distinct = max(1, round(total * (1 - (1 - 1 / total) ** len(lengths))))
        return [Row(str(i % distinct), self.lora_rank, length) for i, length in enumerate(lengths)]


def simulated_run(
    model: StepModel,
    lora_rank: int,
    load: PointLoad,
    slo: SloGoal,
    rate_per_s: float,
    seed: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> Trial:
    """One instance, all adapters resident, a step of prompts and decode rows as long as both one by one.

    That is more than the engine needs, which computes both in one step.
    """

    def times(prompt_tokens: int | None) -> _RankTime:
        return _RankTime(
            model=model, lora_rank=lora_rank, num_adapters=load.num_adapters, prompt_tokens=prompt_tokens
        )

    config = SystemConfig(
        num_instances=1,
        instance=InstanceConfig(
            profile=StepProfile(attention=times(None)),
            num_layers=1,
            max_num_seqs=max_num_seqs,
            prefill=times(load.prompt_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
        ),
        adapters=LocalConfig(capacity=load.num_adapters),
    )
    names = [str(i) for i in range(load.num_adapters)]
    return judge(rate_per_s, simulate(config, load.plan(rate_per_s, names, seed)).requests, slo)
