# SPDX-License-Identifier: Apache-2.0
"""Objects for all endpoints."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING

from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import ConfigError
from moe_lora.dist.cluster.instances import InstanceRegistry, ServedVersion
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.engine.client.messages import KnownAliases
from moe_lora.engine.text.text import served_tokenizer
from moe_lora.engine.text.tokenizer_files import TEXT_FILES, log_generation_config
from moe_lora.serve.metrics import Metrics

from .limits import REFUSALS, Limits
from .openai.checking_process import CheckingProcess
from .openai.fields import IgnoredFields

if TYPE_CHECKING:
    from moe_lora.dist.cluster.controller.cluster_controller import ClusterController
    from moe_lora.dist.cluster.controller.controller_link import ControllerLink
    from moe_lora.engine.text.text import Tokenizer

    from .api_keys import ApiKey
    from .batches.running import Batches
    from .openai.load_report import LoadReport


CUT = "the server is shutting down and does not finish this request; send it again"
ABORTED = "the request was aborted; send it again"


class Ending:
    """Ends running requests at a shutdown."""

    def __init__(self) -> None:
        self.begun = self.over = False
        self.running: set[asyncio.Task[object] | None] = set()
        """Tasks with a running engine request."""

    def cut(self) -> None:
        """End running requests with a 503, as the answer or last event."""
        self.over = True
        for task in self.running:
            if task is not None:
                task.cancel()


@dataclass(kw_only=True)
class Frontend:
    """One engine and the HTTP application.

    tokenizer None: prompts are token ids only.  batches, load_report: made at first use.  model_name: the
    first name of the base model; names outside model_names are adapters.  checks: None: starts with the first
    large body.  The creator closes the client.
    """

    client: FleetClient
    tokenizer: Tokenizer | None
    cluster: ClusterConfig
    controller: ClusterController | ControllerLink
    name: str | None = None
    adapter_texts: Callable[[ApiKey | None], AdapterTexts] | None = None
    checks: CheckingProcess | None = None
    aliases: KnownAliases = field(default_factory=KnownAliases)
    composed_s: dict[str, float] = field(default_factory=dict)
    ending: Ending = field(default_factory=Ending)
    batches: Batches | None = None
    load_report: LoadReport | None = None
    created_s: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        named = self.cluster.front_end_named
        self.config = self.cluster.front_end if self.name is None else named(self.name)
        self.model_name = self.cluster.served_model_name
        self.model_names = (self.model_name, *self.cluster.other_model_names)
        self.metrics = Metrics(self.cluster, self.controller, REFUSALS)
        self.metrics.aliases = self.aliases
        self.limits = Limits(self.config, self.metrics.refuse)
        self.ignored_fields = IgnoredFields()

    def adapter_of(self, model: str) -> str | None:
        """The adapter in `base:adapter`; None for `base:`."""
        return adapter_in(model, self.model_names, self.client.adapters) or None


def adapter_in(model: str, bases: Sequence[str], adapters: Collection[str]) -> str:
    """The adapter in SGLang's `base:adapter`; other names are unchanged."""
    if model in adapters:
        return model
    return next((model[len(base) + 1 :] for base in bases if model.startswith(f"{base}:")), model)


def read_served_text(cluster: ClusterConfig) -> Tokenizer | None:
    """The base model's tokenizer; None with tokens_only.  Raises ConfigError for unreadable files."""
    engine = cluster.engine
    tokenizer = None if cluster.front_end.tokens_only else served_tokenizer(engine)
    if engine.generation_config == "auto":
        log_generation_config(engine.model_dir)

    def look() -> None:
        if tokenizer is not None and tokenizer.chat_templates is not None:
            tokenizer.chat_templates.compile()
        for name, path in engine.adapters:
            log_text_of(cluster, name, path)

    Thread(target=look, name="text-files", daemon=True).start()
    return tokenizer


def log_text_of(cluster: ClusterConfig, name: str, path: str) -> None:
    """Log an adapter's text files.  Blocking: reads files."""
    if not any(os.path.exists(os.path.join(path, name)) for name in TEXT_FILES):
        return
    from moe_lora.engine.text.adapter_text import log_adapter_text

    used, engine = cluster.front_end.adapter_chat_template, cluster.engine
    log_adapter_text(name, path, engine.model_dir, used=used, root=engine.adapter_root)


@dataclass(frozen=True)
class AdapterTexts:
    """Adapters with text files.  key: the caller's; None: every adapter.  used: versions by name."""

    adapters: Mapping[str, ServedVersion]
    root: str | None
    key: ApiKey | None = None
    bases: Sequence[str] = ()
    used: dict[str, tuple[str, int]] = field(default_factory=dict)

    def has(self, model: str | None) -> bool:
        """True for an adapter, or `base:adapter`."""
        return model is not None and adapter_in(model, self.bases, self.adapters) in self.adapters

    def applied(self, model: str, tokenizer: Tokenizer, granted: Collection[str] = ()) -> Tokenizer:
        """The tokenizer with the adapter's text files.  Raises ConfigError.

        granted: adapters beyond the key's own.
        """
        from moe_lora.engine.text.adapter_text import with_adapter_text

        name = adapter_in(model, self.bases, self.adapters)
        adapter = self.adapters.get(name)
        may_use = self.key is None or name in granted or self.key.may_use(name)
        if adapter is None or not may_use:
            return tokenizer
        version = adapter.path, adapter.version
        found = with_adapter_text(tokenizer, *version, self.root, name)
        if found is tokenizer and self.used.get(name) == version:
            raise ConfigError("they are gone from its folder; load the adapter again")
        if found is not tokenizer and self.used.get(name) != version:
            self.used[name] = version
            for gone in self.used.keys() - self.adapters.keys():
                self.used.pop(gone, None)
        return found


def adapter_texts(
    cluster: ClusterConfig, registry: InstanceRegistry
) -> Callable[[ApiKey | None], AdapterTexts] | None:
    """Makes a key's `AdapterTexts`; None without --adapter-chat-template."""
    if not cluster.front_end.adapter_chat_template:
        return None
    bases = (cluster.served_model_name, *cluster.other_model_names)
    used: dict[str, tuple[str, int]] = {}
    return lambda key: AdapterTexts(registry.adapters, cluster.engine.adapter_root, key, bases, used)
