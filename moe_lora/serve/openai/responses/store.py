# SPDX-License-Identifier: Apache-2.0
"""Finished responses in bounded memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_lora.serve.http_errors import ApiError, to_json

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_RESPONSES = 1024
MAX_STORED_BYTES = 64 << 20
PLACE = f"the memory of this front end, at most {MAX_RESPONSES} responses and {MAX_STORED_BYTES >> 20} MiB"
STORE_HEADERS = {"X-Response-Store": PLACE}
OVERHEAD_BYTES = 1024
"""Of a response beside its texts."""


@dataclass(frozen=True)
class Stored:
    """A response.  answer: JSON.  messages: JSON; empty: no response continues it."""

    owner: str
    response_id: str
    answer: bytes
    messages: bytes

    @property
    def nbytes(self) -> int:
        return len(self.answer) + len(self.messages) + OVERHEAD_BYTES

    @classmethod
    def of(
        cls, owner: str, response: dict[str, Any], asked: bytes, answered: Sequence[dict[str, Any]]
    ) -> Self:
        """asked: messages of the request, as JSON."""
        both = filter(None, (asked[1:-1], json.dumps(answered).encode()[1:-1]))
        messages = b"[%s]" % b", ".join(both)
        return cls(owner, response["id"], to_json(response), messages)


class ResponseStore:
    """Responses by owner.  The largest owner loses the oldest response first."""

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_STORED_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._owners: dict[str, OrderedDict[str, Stored]] = {}
        self._bytes: dict[str, int] = {}
        self._num = 0

    def add(self, stored: Stored) -> None:
        """Replaces a response of the same id; drops too large responses."""
        if stored.response_id in self._owners.get(stored.owner, ()):
            self.remove(stored.owner, stored.response_id)
        if stored.nbytes > self._most_bytes:
            return
        self._owners.setdefault(stored.owner, OrderedDict())[stored.response_id] = stored
        self._count(stored, 1)
        while self._num > self._most or sum(self._bytes.values()) > self._most_bytes:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self.remove(largest, next(iter(self._owners[largest])))

    def get(self, owner: str, response_id: str) -> Stored:
        """The owner's response.  Raises ApiError."""
        found = self._owners[owner].get(response_id) if owner in self._owners else None
        if found is None:
            what = f"Response with id {response_id[:128]!r} not found. Responses of a key are in {PLACE}"
            raise ApiError(404, f"{what}; send the whole conversation as input", "response_id")
        return found

    def remove(self, owner: str, response_id: str) -> None:
        """Remove the owner's response.  Raises ApiError."""
        found = self.get(owner, response_id)
        del self._owners[owner][response_id]
        self._count(found, -1)
        if not self._owners[owner]:
            del self._owners[owner], self._bytes[owner]

    def _count(self, stored: Stored, by: int) -> None:
        self._num += by
        self._bytes[stored.owner] = self._bytes.get(stored.owner, 0) + by * stored.nbytes
