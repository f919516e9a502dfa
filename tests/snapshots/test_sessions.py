# SPDX-License-Identifier: Apache-2.0
"""Fields of messages between front ends and instances: a change of these needs another session version."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from moe_lora.core.request import GenerateRequest
from moe_lora.dist.cluster.instance_links import HANDSHAKE
from moe_lora.engine.client.messages import Beat, Dead, InstanceFacts, Move, Outputs, Rejected, Request

from .test_interfaces import check

SENT = (InstanceFacts, Request, GenerateRequest, Outputs, Rejected, Dead, Beat, Move)


def _lines(kind: Any) -> Iterator[str]:
    """Fields of the type in their order, and of the types of its fields."""
    if dataclasses.is_dataclass(kind) or isinstance(kind, msgspec.StructMeta):
        for number, (name, text) in enumerate(inspect.get_annotations(kind).items()):
            yield f"{kind.__name__} {number} {name}: {text}"
        for hint in typing.get_type_hints(kind).values():
            yield from _lines(hint)
    for inner in typing.get_args(kind):
        yield from _lines(inner)


def test_messages_of_instances() -> None:
    lines = [line for kind in SENT for line in _lines(kind)]
    check("instance_session", [f"version {HANDSHAKE.version}", *lines])
