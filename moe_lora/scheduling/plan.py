"""What a scheduler decides: the work of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from .views import Schedulable

Sequence = TypeVar("Sequence", bound=Schedulable)


@dataclass(eq=False, slots=True)
class Scheduled(Generic[Sequence]):
    """`num_tokens` of a sequence from its first uncomputed one; `samples` if its last token is among them."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.sequence.num_uncomputed == self.num_tokens
