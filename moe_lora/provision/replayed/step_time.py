# SPDX-License-Identifier: Apache-2.0
"""Step times: by the formulas of emulated instances (`lora.paced`), or by a performance model."""

from __future__ import annotations

from .running import RunningRequests
from .system_config import InstanceConfig


class StepTime:
    """Time of a step with decode rows, prompt tokens, or both.  remote: a LoRA Server computes the deltas.

    By a profile, a layer of T rows: attention(T) + experts(T) + lora(T), deltas on the instance;
    remote: attention(T) + max(experts(T), transfer(T) + lora(T)), or the sum without overlap.
    By a model: a decode step plus a prefill step, as one layer.  By layer times: as given, prompts included.
    """

    def __init__(self, config: InstanceConfig, *, remote: bool) -> None:
        self._config = config
        self._remote = remote

    def layer_s(self, running: RunningRequests) -> tuple[float, float]:
        """Seconds of a layer's rows with an idle LoRA Server, and of their deltas.

        Layer times include prompt tokens; otherwise `prompts_s` adds the prompts.
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
        """Extra time of the prompt tokens."""
        if self._config.steps is not None:
            return self._config.steps.prefill_step_s(running.prompts)
        prefill = self._config.prefill
        return 0.0 if prefill is None else prefill.seconds(running.num_prompt_tokens)

    def step_s(self, layer_s: float, server_s: float = 0.0) -> float:
        """A step with layers of layer_s, and server_s of the LoRA Server's time per layer.

        server_s: for all instances.  The server works for one at a time, a lower limit of a layer's time.
        """
        return self._config.num_layers * max(layer_s, server_s)


def delayed_step_s(step_s: float, num_layers: int, first_layer_s: float, last_layer_s: float) -> float:
    """A step that waits for adapter loads.

    first_layer_s, last_layer_s: load times from the step's start; layers between come evenly.
    A layer ends after its load; later layers follow in sequence.
    """
    after_last_s = step_s / num_layers
    return max(step_s, first_layer_s + step_s, last_layer_s + after_last_s)
