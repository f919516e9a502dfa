"""Where a simulated instance's adapters come from: the interface, and the link they come over."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class SimAdapter:
    """An adapter as one instance knows it (`policies.eviction.ResidentView`).

    first_layer_s, last_layer_s: when these are, or were, loaded.  told_s: when the instance hears, or heard,
    that it may use it.
    """

    name: str
    uid: int
    num_running: int = 0
    num_waiting: int = 0
    last_used_s: float = -math.inf
    told_s: float = -math.inf
    first_layer_s: float = -math.inf
    last_layer_s: float = -math.inf


class AdapterSource(Protocol):
    """Makes adapters ready for one instance; the twin of `engine.adapters.adapter_loader.Placement`."""

    loads_first: bool
    """Whether a request leaves the queue only when its adapter is there, holding up the step meanwhile."""
    starvation_s: float
    """See `policies.admission.admissible`; inf where somebody else sees to it."""

    def hold(self, adapter: SimAdapter) -> bool:
        """Make the adapter ready, or begin to, and keep it so; False if that can't be done now.

        Sets the adapter's times.
        """
        ...

    def let_go(self, adapter: SimAdapter) -> bool:
        """Its last running request ended; whether another adapter of this instance may find room by that."""
        ...

    def work(self, layer_s: float, delta_s: float) -> float:
        """From now on the instance's layers take layer_s each, of which a server computes for delta_s.

        Returns the time that a server needs for a layer of all instances.
        """
        ...


class LoadLink:
    """Loads over one link of `bytes_per_s`, in parts of 1 / num_layers.

    layer_wise: a layer of each adapter under way in turn (InfiniLoRA section 5.3); else whole adapters one
    after the other, of which nothing is ready before all is.
    """

    def __init__(self, bytes_per_s: float, num_layers: int, *, layer_wise: bool) -> None:
        self._bytes_per_s = bytes_per_s
        self._num_layers = num_layers if layer_wise else 1
        self._free_s = -math.inf
        self._under_way: list[float] = []
        self.num_loads = 0
        self.busy_s = 0.0

    def load(self, now_s: float, num_bytes: float) -> tuple[float, float]:
        """When the first and the last part are there.

        As if nothing came after it: a later load takes turns with this one and makes its last parts later.
        """
        load_s = num_bytes / self._bytes_per_s
        self._free_s = max(self._free_s, now_s) + load_s
        self._under_way = [end_s for end_s in self._under_way if end_s > now_s]
        before = len(self._under_way)
        self._under_way.append(self._free_s)
        self.num_loads += 1
        self.busy_s += load_s
        if self._num_layers == 1:
            return self._free_s, self._free_s
        return min(self._free_s, now_s + (before + 1) * load_s / self._num_layers), self._free_s
