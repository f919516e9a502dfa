from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_lora.serve.app import create_app
from tests.serve.live_server import Served, ServerThread, Switch
from tests.serve.scripted_engine import EOS, ScriptedEngine
from tests.small_tokenizers import characters, wrapped

DEMO = Path(__file__).parents[2] / "demo"


@pytest.fixture(scope="session")
def tokenizer():
    """One token per character; "</s>" is id 2."""
    return wrapped(characters())


def scripted(tokenizer, **settings) -> ScriptedEngine:
    """The base says "hello world" and ends, the adapter "shout" says "fox"."""
    words = {None: "hello world", "shout": "fox"}
    answers = {name: [*tokenizer.encode(text, add_special_tokens=False), EOS] for name, text in words.items()}
    return ScriptedEngine(answers, vocab_size=tokenizer.vocab_size, **settings)


@pytest.fixture
def engine(tokenizer) -> ScriptedEngine:
    return scripted(tokenizer)


def as_served(url: str, engine: ScriptedEngine) -> contextlib.AbstractContextManager[Served]:
    limits = {"max_model_len": engine.max_model_len, "vocab_size": engine.vocab_size}
    return Served.at(url, "base", "shout", **limits)


@contextlib.contextmanager
def serving(engine, tokenizer) -> Iterator[Served]:
    """A server of its own over `engine`."""
    with (
        ServerThread(create_app(engine, tokenizer, "base")) as thread,
        as_served(thread.url, engine) as served,
    ):
        yield served


@pytest.fixture(scope="session")
def shared_thread() -> Iterator[tuple[Switch, str]]:
    switch = Switch()
    with ServerThread(switch) as thread:
        yield switch, thread.url


@pytest.fixture
def server(engine, tokenizer, shared_thread) -> Iterator[Served]:
    """A server over `engine`."""
    switch, url = shared_thread
    switch.app = create_app(engine, tokenizer, "base")
    with as_served(url, engine) as served:
        yield served


@contextlib.contextmanager
def demo_server() -> Iterator[Served]:
    """The demo model and its adapters behind `moe-lora serve`, as a user starts it."""
    if not (DEMO / "model" / "config.json").is_file():
        pytest.skip("this checkout has no demo model")
    command = [sys.executable, "-m", "moe_lora.cli.main", "serve", str(DEMO / "model")]
    options = ["--lora-dir", str(DEMO / "adapters"), "--port", "0", "--eager", "--threads", "1"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    try:
        for line in process.stderr:
            log.append(line)
            if "Serving" in line:
                break
        else:
            raise AssertionError("the server did not start: " + "".join(log))
        # Read on, or a full pipe would stop the server.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        vocab_size = json.loads((DEMO / "model" / "config.json").read_text())["vocab_size"]
        url = log[-1].split()[-1]
        with Served.at(url, "model", "upper", max_model_len=256, vocab_size=vocab_size) as served:
            yield served
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.fixture(scope="session", params=["scripted", "demo"])
def any_server(request, tokenizer) -> Iterator[Served]:
    """Servers that must all keep to the interface, whatever model is behind them."""
    server = demo_server() if request.param == "demo" else serving(scripted(tokenizer), tokenizer)
    with server as served:
        yield served
