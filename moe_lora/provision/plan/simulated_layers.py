"""A plan's own stage times as the simulator takes them, prompts and decode rows of a step together."""

from __future__ import annotations

from moe_lora.sim.system_config import StepRows

from .stages import StageTimes, StepTokens


class SimulatedLayers:
    """`sim.system_config.LayerTimes`.  ep: of the LoRA Server; None: the instance computes its deltas.

    Where one request of a step has an adapter, every row counts as a row with one.
    """

    def __init__(self, stages: StageTimes, ep: int | None) -> None:
        self._stages, self._ep = stages, ep
        self._found: dict[tuple[int, int, int, bool], tuple[float, float]] = {}

    def layer_s(self, step: StepRows) -> tuple[float, float]:
        """Seconds of a layer, and the seconds of it that the LoRA Server is busy."""
        key = step.num_rows, step.num_prompt_tokens, step.num_prompts, step.num_with_adapter > 0
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._without_pairs(*key)
        return found[0] + self._stages.pair_s * step.num_prompt_pairs, found[1]

    def _without_pairs(
        self, rows: int, prompt_tokens: int, prompts: int, adapters: bool
    ) -> tuple[float, float]:
        stages, step = self._stages, StepTokens(rows, prompt_tokens, prompts)
        attention_s, experts_s = stages.attention_of(step), stages.experts_of(step)
        if not adapters:
            return attention_s + experts_s, 0.0
        if self._ep is None:
            return attention_s + experts_s + stages.local_deltas_s(step), 0.0
        served = stages.server_of(self._ep, step)
        return attention_s + max(experts_s, served.total_s), served.longest[1]
