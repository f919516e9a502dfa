# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fastapi.routing
import pytest
from fastapi.dependencies import models

from moe_lora.config import EngineConfig, FrontEndConfig, LoraServerConfig, RegistryConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.dist.cluster.adapter_calls import FleetAdapters
from moe_lora.dist.cluster.controller.capacity_controller import CapacityController
from moe_lora.dist.cluster.controller.cluster_controller import ClusterController
from moe_lora.dist.cluster.controller.served_registry import ServedRegistry
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.server import create_app
from tests.patience import PATIENCE_S
from tests.small_tokenizers import characters, wrapped

from .demo_server import DEMO, DemoServer, demo_server
from .live_server import Served, ServerThread, Switch
from .scripted_engine import EOS, ScriptedEngine


def _codes(call: Any) -> tuple[Any, ...]:
    """Code of a function and of each function that it wraps; else the object itself."""
    function = getattr(call, "__func__", call)
    wrapped = getattr(function, "__wrapped__", None)
    return getattr(function, "__code__", call), *(() if wrapped is None else _codes(wrapped))


class _SameCode:
    """Stands in for the identity of a function in FastAPI's caches: functions of one code are of one kind."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._codes = _codes(call)

    def __hash__(self) -> int:
        return hash(self._codes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameCode) and self._codes == other._codes


@pytest.fixture(scope="session", autouse=True)
def endpoints_read_once() -> Iterator[None]:
    """FastAPI reads the signatures of 101 endpoints for each app: a half of its 45 ms of CPU time."""
    read, found = getattr(fastapi.routing, "get_dependant", None), dict[Any, Any]()

    def once(*, path: str, call: Any, **options: Any) -> Any:
        function = getattr(call, "__func__", call)
        defaults = function.__defaults__, *(function.__kwdefaults__ or {}).items()
        about = *_codes(call), *defaults, *function.__annotations__.items()
        key = path, *about, *options.items()
        if key not in found:
            found[key] = read(path=path, call=call, **options)
        own = copy.copy(found[key])
        own.call, own.dependencies = call, [*own.dependencies]
        return own

    with (
        mock.patch.object(fastapi.routing, "get_dependant", once, create=True),
        mock.patch.object(models, "_CallIdentity", _SameCode, create=True),
    ):
        yield


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


def app_of(engine, tokenizer, **settings):
    """The application over an engine whose base is called "base"."""
    return create_app(frontend_of(engine, tokenizer, **settings))


def frontend_of(
    engine,
    tokenizer,
    provision: CapacityController | None = None,
    registry: ServedRegistry | None = None,
    has_server: bool = False,
    **front_end,
) -> Frontend:
    """A front end that decides by itself.  front_end: settings of HTTP."""
    cluster = ClusterConfig(
        engine=EngineConfig(model_dir="base"),
        served_model_name="base",
        lora_server=LoraServerConfig() if has_server else None,
        provision=None if provision is None else provision.config,
        registry=None if registry is None else RegistryConfig(folder="registry"),
        front_end=FrontEndConfig(**{"check_timeout_s": PATIENCE_S, **front_end}),
    )
    controller = ClusterController(FleetAdapters(InstanceRegistry(())), provision, registry)
    return Frontend(client=engine, tokenizer=tokenizer, cluster=cluster, controller=controller)


def as_served(url: str, engine: ScriptedEngine) -> contextlib.AbstractContextManager[Served]:
    limits = {"max_model_len": engine.max_model_len, "vocab_size": engine.vocab_size}
    return Served.at(url, "base", "shout", **limits)


@contextlib.contextmanager
def serving(engine, tokenizer, **front_end) -> Iterator[Served]:
    """A server of its own over `engine`."""
    with (
        ServerThread(app_of(engine, tokenizer, **front_end)) as thread,
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
    switch.app = app_of(engine, tokenizer)
    with as_served(url, engine) as served:
        yield served


@pytest.fixture(scope="session")
def unchanged(tokenizer) -> Iterator[Served]:
    """A server for tests that change nothing: each application costs 25 ms of CPU time."""
    with serving(scripted(tokenizer), tokenizer) as served:
        yield served


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Iterator[DemoServer]:
    """The real thing: `moe-lora serve` with all adapters of the demo."""
    log = tmp_path_factory.mktemp("demo") / "log"
    with demo_server(log, "--lora-dir", str(DEMO / "adapters"), "--eager") as server:
        yield server


@pytest.fixture(scope="session")
def exact(tmp_path_factory) -> Iterator[Served]:
    """The demo in fp32, for tests that change no adapter."""
    log = tmp_path_factory.mktemp("exact") / "log"
    options = ("--lora-dir", str(DEMO / "adapters"), "--eager", "--dtype", "float32")
    with (
        demo_server(log, *options) as server,
        Served.at(server.url, "demo", "upper", max_model_len=256, vocab_size=128) as served,
    ):
        yield served


@pytest.fixture(scope="session", params=["scripted", "demo"])
def any_server(request) -> Iterator[Served]:
    """Servers that must all keep to the interface, whatever model is behind them."""
    if request.param == "scripted":
        yield request.getfixturevalue("unchanged")
        return
    url = request.getfixturevalue("demo").url
    with Served.at(url, "demo", "upper", max_model_len=256, vocab_size=128) as served:
        yield served
