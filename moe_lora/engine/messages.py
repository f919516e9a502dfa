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


@dataclass(frozen=True)
class Beat:
    """That an engine is there, said again and again.

    stuck_s: how long its loop has been at one step or command, in seconds; 0: it waits for something to do.
    The others: of the requests that came over other connections than the one that this goes to, those that
    decode, those without a token yet, and the tokens that they may still need.
    """

    stuck_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    outstanding_tokens: int = 0


Command = Generate | Abort | Call | Stop
Event = Outputs | Rejected | Reply | Beat | Dead
