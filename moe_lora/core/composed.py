# SPDX-License-Identifier: Apache-2.0
"""Names and paths of weighted sums of adapters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from .request import COMPOSED


@dataclass(frozen=True)
class Part:
    """A term of a sum.  content_hash: of the adapter in the folder `path`."""

    name: str
    path: str
    content_hash: str
    weight: float


def name_of(parts: Sequence[Part]) -> str:
    """Equal for equal contents and weights."""
    text = json.dumps([(part.content_hash, part.weight) for part in parts])
    return f"{COMPOSED}{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def path_of(parts: Sequence[Part]) -> str:
    fields = [(part.name, part.path, part.content_hash, part.weight) for part in parts]
    return f"{COMPOSED}{json.dumps(fields)}"


def parts_in(path: str) -> list[Part]:
    return [Part(*fields) for fields in json.loads(path.removeprefix(COMPOSED))]
