# SPDX-License-Identifier: Apache-2.0
"""Text files of the served model and of its adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING

from moe_lora.config.cluster import ClusterConfig
from moe_lora.dist.cluster.instances import InstanceRegistry, ServedVersion
from moe_lora.engine.text.adapter_text import log_adapter_text, with_adapter_text
from moe_lora.engine.text.generation_config import log_generation_config
from moe_lora.engine.text.text import served_tokenizer

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer


def read_served_text(cluster: ClusterConfig) -> Tokenizer | None:
    """The base model's tokenizer.  Raises ConfigError for unreadable files.

    A thread compiles the chat templates and searches adapter folders during the start of instances.
    """
    engine = cluster.engine
    tokenizer = served_tokenizer(engine.model_dir)
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
    used, engine = cluster.front_end.adapter_chat_template, cluster.engine
    log_adapter_text(name, path, engine.model_dir, used=used, root=engine.adapter_root)


@dataclass(frozen=True)
class AdapterTexts:
    """Adapters with text files.  adapters: by name.  root: see `EngineConfig.adapter_root`."""

    adapters: Mapping[str, ServedVersion]
    root: str | None

    def applied(self, name: str, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer with the text files of the adapter.  Raises ConfigError for unreadable files."""
        adapter = self.adapters.get(name)
        if adapter is None:
            return tokenizer
        return with_adapter_text(tokenizer, adapter.path, adapter.version, self.root)


def adapter_texts(cluster: ClusterConfig, registry: InstanceRegistry) -> Callable[[], AdapterTexts] | None:
    """Returns the current `AdapterTexts`; None without --adapter-chat-template."""
    if not cluster.front_end.adapter_chat_template:
        return None
    return lambda: AdapterTexts(registry.adapters, cluster.engine.adapter_root)
