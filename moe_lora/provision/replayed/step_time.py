# SPDX-License-Identifier: Apache-2.0
"""How long a step of an instance takes: by the formulas that pace an emulated one (`lora.paced`), or by
a performance model.
"""

from __future__ import annotations

from .running import RunningRequests
from .system_config import InstanceConfig


class StepTime:
    """Asked before each step; it has decode rows, or prompt tokens, or both.  remote: a LoRA Server computes
    the deltas.

    By a profile, a layer of T rows: attention(T) + experts(T) + lora(T), deltas on the instance;
    attention(T) + max(experts(T), transfer(T) + lora(T)), or the sum without overlap, when they are remote.
    By a model: a decode step over the decode rows and a prefill step over the prompts, one after the other;
    the whole is then one layer.  By times of layers: as these say, prompts included.
    """

    def __init__(self, config: InstanceConfig, *, remote: bool) -> None:
        self._config = config
        self._remote = remote

    def layer_s(self, running: RunningRequests) -> tuple[float, float]:
        """Seconds of a layer's rows, the LoRA Server working for nobody else, and of their deltas.

        Times of layers include prompt tokens; by a profile or a model `prompts_s` adds these.
        """
        if self._config.layers is not None:
            return self._config.layers.layer_s(running)
        profile, num_rows = self._config.profile, running.num_rows
        if profile is None:
            assert self._config.steps is not None
            assert running.decode is not None
            return self._config.steps.seconds("decode", running.decode), 0.0
        base_s = profile.experts.seconds(num_rows)
        lora_s = delta_s = profile.lora.seconds(num_rows) if running.num_with_adapter else 0.0
        if self._remote and running.num_with_adapter:
            delta_s += profile.transfer.seconds(num_rows)
        side_by_side = self._remote and profile.overlap
        both_s = max(base_s, delta_s) if side_by_side else base_s + delta_s
        return profile.attention.seconds(num_rows) + both_s, lora_s

    def prompts_s(self, running: RunningRequests) -> float:
        """What the prompt tokens add."""
        if self._config.steps is not None:
            return self._config.steps.prefill_step_s(running.prompts)
        prefill = self._config.prefill
        return 0.0 if prefill is None else prefill.seconds(running.num_prompt_tokens)

    def step_s(self, layer_s: float, server_s: float = 0.0) -> float:
        """A step whose layers take layer_s each, and for each of which the server is busy for server_s.

        server_s: of a layer, for all instances together.  It works for one at a time, so none gets through a
        layer faster than that; instances that step alike fall into line, and below that nobody waits.
        """
        return self._config.num_layers * max(layer_s, server_s)


def delayed_step_s(step_s: float, num_layers: int, first_layer_s: float, last_layer_s: float) -> float:
    """A step that waits for adapters being loaded.

    first_layer_s, last_layer_s: from the step's begin until that layer is loaded; those between come evenly.
    Layer l can't end before it is loaded, and the layers after it take their time.
    """
    after_last_s = step_s / num_layers
    return max(step_s, first_layer_s + step_s, last_layer_s + after_last_s)
