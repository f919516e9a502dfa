"""How long a step of an instance takes, by the formulas that pace an emulated one (`execution.paced`)."""

from __future__ import annotations

from dataclasses import dataclass

from moe_lora.core.errors import ConfigError
from moe_lora.core.step_profile import StepProfile


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Decode steps of `num_layers` equal layers.

    A layer of T rows: attention(T) + experts(T) + lora(T), deltas on the instance;
    attention(T) + max(experts(T), transfer(T) + lora(T)), or the sum without overlap, when they are remote.
    """

    profile: StepProfile
    num_layers: int
    remote: bool

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ConfigError(f"num_layers={self.num_layers} makes no model; choose 1 or more")

    def layer_s(self, num_rows: int, has_adapters: bool) -> float:
        """A layer of a step, the LoRA Server working for nobody else."""
        profile = self.profile
        base_s = profile.experts.seconds(num_rows)
        delta_s = profile.lora.seconds(num_rows) if has_adapters else 0.0
        if self.remote and has_adapters:
            delta_s += profile.transfer.seconds(num_rows)
        side_by_side = self.remote and profile.overlap
        return profile.attention.seconds(num_rows) + (
            max(base_s, delta_s) if side_by_side else base_s + delta_s
        )

    def step_s(self, layer_s: float, server_s: float = 0.0) -> float:
        """A step whose layers take layer_s each, and for each of which the server is busy for server_s.

        server_s: of a layer, for all instances together.  It works for one at a time, so none gets through a
        layer faster than that; instances that step alike fall into line, and below that nobody waits.
        """
        return self.num_layers * max(layer_s, server_s)


def delayed_step_s(step_s: float, num_layers: int, first_layer_s: float, last_layer_s: float) -> float:
    """A step that waits for adapters being loaded.

    first_layer_s, last_layer_s: from the step's begin until that layer is loaded; those between come evenly.
    Layer l can't end before it is loaded, and the layers after it take their time.
    """
    after_last_s = step_s / num_layers
    return max(step_s, first_layer_s + step_s, last_layer_s + after_last_s)
