"""The text files of the served model, at a front end's start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_lora.config.cluster import ClusterConfig
from moe_lora.engine.text.generation_config import log_generation_config
from moe_lora.engine.text.text import load_tokenizer

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer


def read_served_text(cluster: ClusterConfig) -> Tokenizer | None:
    """The tokenizer; its chat templates are compiled in a thread.  Raises ConfigError for unreadable files."""
    engine = cluster.engine
    tokenizer = load_tokenizer(engine.model_dir)
    if engine.generation_config == "auto":
        log_generation_config(engine.model_dir)
    if tokenizer is not None and tokenizer.chat_templates is not None:
        tokenizer.chat_templates.compile_ahead()
    return tokenizer
