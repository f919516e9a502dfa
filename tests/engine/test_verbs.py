# SPDX-License-Identifier: Apache-2.0
"""Verbs of an engine by name: a new method of the table is reached, and wrong calls are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from moe_lora.api import InProcessClient
from moe_lora.config import EngineConfig
from moe_lora.core.errors import AdapterNotFoundError, ConfigError
from moe_lora.dist.net.codec import Interface, verb, verbs_of
from moe_lora.engine.build import build_engine
from moe_lora.engine.verbs import ADAPTER_VERBS, ENGINE_INTERFACE, ENGINE_VERBS, Steps
from tests.patience import PATIENCE_S

DEMO = Path(__file__).parents[2] / "demo"


class NewVerbs:
    """As a developer adds verbs: methods, and nothing elsewhere."""

    def __init__(self) -> None:
        self.files = ThreadPoolExecutor(1)
        self.may_end = False

    @verb
    def count(self, names: list[str], twice: bool = False) -> int:
        return len(names) * (1 + twice)

    @verb
    def count_slowly(self, names: list[str]) -> Steps[int]:
        found: Future[int] = yield self.files.submit(len, names)
        return found.result()

    @verb
    def fail_slowly(self) -> Steps[None]:
        (yield self.files.submit(int, "no number")).result()

    @verb
    def wait(self) -> Steps[str]:
        yield lambda: self.may_end
        return "over"

    @verb
    def end(self) -> None:
        self.may_end = True

    def hidden(self) -> None:
        """Without the mark."""


@pytest.fixture(scope="module")
def client() -> Iterator[InProcessClient]:
    owner = InProcessClient(build_engine(EngineConfig(model_dir=str(DEMO / "model"), eager=True)))
    owner._loop._verbs |= verbs_of(NewVerbs())
    yield owner
    owner.shut_down()


def test_a_new_verb_is_called_by_its_name(client):
    assert asyncio.run(client.call("count", ["a", "b"])) == 2
    assert asyncio.run(client.call("count", ["a", "b"], True)) == 4


def test_a_verb_may_wait_for_another_thread_or_for_a_condition(client):
    assert asyncio.run(client.call("count_slowly", ["a", "b", "c"])) == 3
    waiting = client.start_call("wait")
    assert asyncio.run(client.call("count", [])) == 0, "the loop goes on"
    assert not waiting.done()
    client.start_call("end")
    assert waiting.result(PATIENCE_S) == "over"


def test_errors_of_a_verb_are_those_of_the_call(client):
    with pytest.raises(ValueError, match="no number"):
        asyncio.run(client.call("fail_slowly"))
    with pytest.raises(AdapterNotFoundError, match="'nobody' is not loaded"):
        asyncio.run(client.call("pin_adapter", "nobody", pinned=True))


def test_a_verb_that_the_engine_lacks_is_refused(client):
    for name in ("hidden", "no_verb", "_core", "pool_state"):
        with pytest.raises(ConfigError, match=f"this engine has no {name}"):
            asyncio.run(client.call(name))


@pytest.mark.parametrize(
    ("args", "words", "problem"),
    [
        (("a",), {}, "missing a required argument: 'pinned'"),
        (("a", True, 1), {}, "too many positional arguments"),
        (("a",), {"pinnd": True}, "'pinn"),
    ],
)
def test_wrong_arguments_are_refused_before_they_travel(client, args, words, problem):
    with pytest.raises(TypeError, match=f"pin_adapter.*does not take these arguments: .*{problem}"):
        asyncio.run(client.call("pin_adapter", *args, **words))


def test_words_and_defaults_travel_in_order():
    assert ENGINE_INTERFACE.bind("load_adapter", ("a", "p"), {"version": 3}) == ("a", "p", False, 3, None)
    with pytest.raises(ValueError, match=r"'no_verb' is no method here; choose one of .*pin_adapter"):
        ENGINE_INTERFACE.bind("no_verb", (), {})


def test_the_type_of_a_verb_that_waits_is_that_of_its_return_value():
    from msgspec import Raw

    from moe_lora.dist.net.codec import encode

    interface = Interface(verbs_of(NewVerbs))
    assert "hidden" not in interface
    assert interface.results["count_slowly"](Raw(encode(3))) == 3
    assert interface.args["count"](Raw(encode((["a"], False)))) == (["a"], False)


def test_front_ends_reach_verbs_of_adapters_only():
    assert "pin_adapter" in ADAPTER_VERBS
    assert not {"kv_send", "pool_free", "hold_request", "stats"} & ADAPTER_VERBS.keys()
    assert ADAPTER_VERBS.keys() < ENGINE_VERBS.keys()
