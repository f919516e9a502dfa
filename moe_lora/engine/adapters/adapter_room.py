"""What adapters may take of an arena beside one request: some can't be served at all, some not pinned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_lora.core.errors import CapacityError


@dataclass(frozen=True, kw_only=True)
class AdapterRoom:
    """num_slots: adapters on the device at once.  num_pages: those that the KV of one request leaves."""

    num_slots: int
    num_pages: int
    page_bytes: int

    def check_fits(self, name: str, num_pages: int, pinned: Sequence[int]) -> None:
        """Raises CapacityError if an adapter of so many pages could never be on the device.

        pinned: pages of each pinned adapter.
        """
        if not num_pages:
            return
        if len(pinned) >= self.num_slots:
            raise CapacityError(
                f"adapter {name!r} finds no slot: pinned ones take all max_loras={self.num_slots}; unpin one "
                "or raise max_loras"
            )
        if sum(pinned) + num_pages > self.num_pages:
            raise CapacityError(
                f"adapter {name!r} needs {self._mb(num_pages)} MB; beside a request of max_model_len the "
                f"arena has {self._mb(self.num_pages)} MB for adapters, of which {self._mb(sum(pinned))} MB "
                "are pinned; raise arena_mb or unpin adapters"
            )

    def check_pin(self, name: str, num_pages: int, pinned: Sequence[int], others: Sequence[int]) -> None:
        """Raises CapacityError if one more pinned adapter left no slot or no room for a request of another.

        others: pages of each adapter that stays without a pin and has any.
        """
        if others and len(pinned) + 1 >= self.num_slots:
            raise CapacityError(
                f"adapter {name!r} can't be pinned: of max_loras={self.num_slots} slots one must stay free "
                "for others; unpin another adapter or raise max_loras"
            )
        largest = max(others, default=0)
        if sum(pinned) + num_pages + largest > self.num_pages:
            raise CapacityError(
                f"adapter {name!r} of {self._mb(num_pages)} MB can't be pinned: that would leave no room for "
                f"a request of an adapter of {self._mb(largest)} MB; unpin another one or raise arena_mb"
            )

    def _mb(self, num_pages: int) -> str:
        return f"{num_pages * self.page_bytes / 1e6:.3f}"
