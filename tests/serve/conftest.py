from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.serve.live_server import Served, ServerThread
from tests.serve.scripted_engine import EOS, ScriptedEngine
from tests.small_tokenizers import characters, wrapped


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


@contextlib.contextmanager
def serving(engine, tokenizer) -> Iterator[Served]:
    limits = {"max_model_len": engine.max_model_len, "vocab_size": engine.vocab_size}
    with (
        ServerThread(engine, tokenizer) as thread,
        Served.at(thread.url, "base", "shout", **limits) as served,
    ):
        yield served


@pytest.fixture
def server(engine, tokenizer) -> Iterator[Served]:
    """A server over `engine`."""
    with serving(engine, tokenizer) as served:
        yield served


@pytest.fixture(scope="session", params=["scripted"])
def any_server(request, tokenizer) -> Iterator[Served]:
    """Servers that must all keep to the interface, whatever model is behind them."""
    assert request.param == "scripted"
    with serving(scripted(tokenizer), tokenizer) as served:
        yield served
