"""The composition root: settings in, wired processes out."""

from __future__ import annotations

from pathlib import Path

from moe_lora.core.config import EngineConfig


def serve(config: EngineConfig, *, host: str, port: int, served_model_name: str | None = None) -> None:
    """Start an engine process and serve it over HTTP until the process is told to stop.

    Raises ConfigError or AdapterError for what can be known at start.
    """
    from moe_lora.engine.process import ProcessClient
    from moe_lora.engine.text import load_tokenizer
    from moe_lora.serve.server import bind, run_server

    tokenizer = load_tokenizer(config.model_dir)
    with bind(host, port) as sock:
        client = ProcessClient(config)
        try:
            name = served_model_name or Path(config.model_dir).resolve().name
            run_server(client, tokenizer, name, sock=sock)
        finally:
            client.shut_down()
