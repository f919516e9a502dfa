"""A run at one rate in the simulator, steps timed by a performance model; for operating points in seconds."""

from __future__ import annotations

from moe_lora.policies.step_model import StepModel
from moe_lora.sim.system_config import InstanceConfig, LocalConfig, SystemConfig
from moe_lora.sim.system import simulate

from .operating_points import PointLoad, SloGoal, Trial, judge


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
    names = [str(index) for index in range(load.num_adapters)]
    config = SystemConfig(
        num_instances=1,
        instance=InstanceConfig(
            steps=model,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        ),
        adapters=LocalConfig(capacity=load.num_adapters),
        lora_ranks=dict.fromkeys(names, lora_rank),
    )
    return judge(rate_per_s, simulate(config, load.plan(rate_per_s, names, seed)).requests, slo)
