"""What travels between an engine loop and its clients: plain picklable data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_lora.core.request import GenerateRequest, TokenOutput


@dataclass(frozen=True)
class Generate:
    request: GenerateRequest


@dataclass(frozen=True)
class Abort:
    request_id: str


@dataclass(frozen=True)
class Call:
    """Run a method of `EngineLoop.methods`; a `Reply` with the same id follows."""

    call_id: int
    method: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Stop:
    """End the loop; running requests are dropped."""


@dataclass(frozen=True)
class Outputs:
    outputs: list[TokenOutput]


@dataclass(frozen=True)
class Rejected:
    """A request that could not be queued."""

    request_id: str
    error: Exception


@dataclass(frozen=True)
class Reply:
    call_id: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class Dead:
    """The last event of a loop that failed."""

    error: Exception


Command = Generate | Abort | Call | Stop
Event = Outputs | Rejected | Reply | Dead
