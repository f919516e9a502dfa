"""Popularity that moves from adapter to adapter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .popularity import Popularity, from_weights


@dataclass(frozen=True, slots=True)
class Drifting:
    """The k-th of N adapters at time share t is as popular as the (k + m) mod N-th of `base`, with
    m = int(t · num_moves).

    Every 1 / num_moves of the time the least popular adapter becomes the most popular one, as when a new
    function is rolled out, and all others lose a place (base: by falling popularity).
    """

    base: Popularity
    num_moves: int

    def __post_init__(self) -> None:
        if self.num_moves < 0:
            raise ValueError(f"num_moves={self.num_moves} is not allowed; choose 0 or more")

    @property
    def adapters(self) -> tuple[str, ...]:
        return self.base.adapters

    @property
    def lora_ranks(self) -> tuple[int, ...]:
        return self.base.lora_ranks

    def at(self, time_share: float) -> Popularity:
        shift = -int(time_share * self.num_moves)
        return from_weights(self.adapters, np.roll(self.base.probabilities, shift).tolist(), self.lora_ranks)

    def draw(self, time_shares: NDArray[np.float64], rng: np.random.Generator) -> list[str]:
        probabilities = np.asarray(self.base.probabilities)
        places = rng.choice(len(probabilities), size=len(time_shares), p=probabilities)
        moved = (places - (time_shares * self.num_moves).astype(int)) % len(probabilities)
        return [self.adapters[index] for index in moved.tolist()]
