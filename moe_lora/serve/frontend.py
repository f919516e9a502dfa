# SPDX-License-Identifier: Apache-2.0
"""Objects for all endpoints: engine, tokenizer, names, limits, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moe_lora.config.cluster import ClusterConfig
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.serve.metrics.metrics import Metrics

from .limits import REFUSALS, Limits
from .openai.checking_process import CheckingProcess
from .openai.fields import IgnoredFields

if TYPE_CHECKING:
    from moe_lora.dist.cluster.controller.cluster_controller import ClusterController
    from moe_lora.dist.cluster.controller.controller_link import ControllerLink
    from moe_lora.engine.text.text import Tokenizer

    from .served_text import AdapterTexts


CUT = "the server is shutting down and does not finish this request; send it again"


class Ending:
    """Ends running requests after the time for a shutdown.  begun: the server accepts no new requests."""

    def __init__(self) -> None:
        self.begun = self.over = False
        self.running: set[asyncio.Task[object] | None] = set()
        """Tasks with a running engine request, for `cut`."""

    def cut(self) -> None:
        """End running requests with a 503: as the answer, or as the last event of a stream."""
        self.over = True
        for task in self.running:
            if task is not None:
                task.cancel()


@dataclass(kw_only=True)
class Frontend:
    """One engine and the HTTP application.

    tokenizer None: prompts are token ids only.  controller: runs while the application serves.  ending:
    cuts requests at shutdown.  model_name: the base model's main name; every name outside model_names is an
    adapter's.  adapter_texts: see `served_text`.  checks: checks large bodies; None: starts with the first
    large body.  The creator closes the client.
    """

    client: FleetClient
    tokenizer: Tokenizer | None
    cluster: ClusterConfig
    controller: ClusterController | ControllerLink
    name: str | None = None
    adapter_texts: Callable[[], AdapterTexts] | None = None
    checks: CheckingProcess | None = None
    ending: Ending = field(default_factory=Ending)
    created_s: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        named = self.cluster.front_end_named
        self.config = self.cluster.front_end if self.name is None else named(self.name)
        self.model_name = self.cluster.served_model_name
        self.model_names = (self.model_name, *self.cluster.other_model_names)
        self.metrics = Metrics(self.cluster, self.controller, REFUSALS)
        self.limits = Limits(self.config, self.metrics.refuse)
        self.ignored_fields = IgnoredFields()
