"""What travels between the controller and the front ends: plain picklable data.

Both sides also send `engine.messages`: a front end's `Call` is answered by a `Reply`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moe_lora.core.request import RequestTiming
from moe_lora.engine.messages import Call, Reply
from moe_lora.engine.served import Holding, Served
from moe_lora.provision.online import Outlook
from moe_lora.provision.placement_quality import PlacementQuality

PROTOCOL = "front end 1"
"""Unlike any that an engine speaks, whose door this one may be taken for."""


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """What the controller has decided.

    number: counts up with each change, also over the controller's restarts.  ranks: LoRA ranks by adapter.
    holdings: of the instances in the controller's routing.  table: adapter -> (instance name, phi) of the
    routing table, and the number of that; demand: tokens/s by adapter that it was made for.
    """

    number: int
    served: Served = field(default_factory=Served)
    ranks: Mapping[str, int] = field(default_factory=dict)
    holdings: Mapping[str, Holding] = field(default_factory=dict)
    table: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    table_version: int = 0
    demand: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FrontEndHello:
    """A front end's first message.  state: the last one that it had from a controller."""

    name: str
    state: ClusterState | None
    protocol: str = PROTOCOL


@dataclass(frozen=True)
class VisitEvent:
    """What a request for an adapter did.  number: of the request, unlike others of its front end."""

    kind: Literal["begin", "start", "refuse", "end"]
    number: int
    adapter: str | None = None
    timing: RequestTiming | None = None


@dataclass(frozen=True)
class Report:
    """What a front end's requests did since the last report.  tokens: by adapter."""

    tokens: Mapping[str, int]
    visits: tuple[VisitEvent, ...]


@dataclass(frozen=True)
class Taken:
    """The front end routes by the state of this number, or by a later one."""

    number: int


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the controller's metrics would say.  num_copies, num_problems, quality: see
    `serve.placement.PlacementController`.  outlook: of `serve.controller.Controller`.
    """

    num_copies: int = 0
    num_problems: int = 0
    quality: PlacementQuality | None = None
    outlook: Outlook | None = None


@dataclass(frozen=True)
class Beat:
    """Nothing but that one is there."""


ToController = Call | Report | Taken | Beat
ToFrontEnd = Reply | ClusterState | Figures | Beat
