# SPDX-License-Identifier: Apache-2.0
"""A sleeping engine gives its memory back, and has the same tokens after it wakes up."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from llguidance import LLMatcher

from moe_lora import LLM, SamplingParams
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.errors import BusyError, ConfigError
from moe_lora.engine.client.messages import PauseScope
from moe_lora.engine.ranks import rank as rank_module
from moe_lora.engine.step.grammar_masks import Grammars
from moe_lora.engine.text.grammars import json_grammar
from moe_lora.models.loader import held_weights
from tests.grids import diagonal, with_quick
from tests.models.generated_code import captured_graphs
from tests.patience import PATIENCE_S
from tests.serve.live_server import wait_until

from .test_pauses import DEMO, REVERSE, UPPER, Stream, call, is_still, pause

ARENA_MB = 120.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
ALL = ("kv_cache", "weights")


@contextmanager
def engine(model: Path | str = DEMO / "model", **settings: Any) -> Iterator[LLM]:
    given = {"eager": True, "num_threads": 1, "dtype": "float32", "arena_mb": ARENA_MB, **settings}
    with LLM(str(model), adapters={"policy": UPPER, "other": REVERSE}, **given) as llm:
        yield llm


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    prompts, adapters = ["abcdefgh=", "xyz="] * 3, ["policy", None, "other", "other", None, "policy"]
    return [one.token_ids for one in llm.generate(prompts, adapters, GREEDY)]


def sleep(llm: LLM, level: int, mode: str = "abort", timeout_s: float = 600.0) -> None:
    call(llm, "sleep", ALL, level == 2, mode, timeout_s)


def asleep(llm: LLM) -> list[str]:
    return [part for order in call(llm, "sleep_orders") for part in sorted(order.parts)]


def resident(*tensors: torch.Tensor) -> int:
    """Bytes of the tensors' pages in memory; other parts of the process do not count."""
    found = 0
    for one in tensors:
        start = one.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        pages = (ctypes.c_ubyte * (1 + (one.data_ptr() + one.nbytes - 1 - start) // mmap.PAGESIZE))()
        size = ctypes.c_size_t(len(pages) * mmap.PAGESIZE)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), size, pages) == 0
        found += min(one.nbytes, mmap.PAGESIZE * sum(page & 1 for page in pages))
    return found


def refuses(llm: LLM) -> bool:
    with pytest.raises(BusyError, match="/wake_up"):
        Stream(llm, "refused", "policy").get()
    return True


@pytest.mark.parametrize(
    ("level", "settings"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, {}),
        (2, {"eager": False, "decode_buckets": (8,)}),
        pytest.param(2, {"quantize": "int8"}, marks=pytest.mark.slow),
        (1, {"host_arena_mb": 20.0}),
        pytest.param(2, {"load_format": "dummy"}, marks=pytest.mark.slow),
        (2, {"tensor_parallel": 2}),
        pytest.param(1, {"expert_parallel": 2}, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_same_after_a_sleep(level, settings):
    with captured_graphs(), engine(**settings) as llm:
        before = tokens(llm)
        call(llm, "pin_adapter", "policy", True)
        for _ in range(2):
            sleep(llm, level)
            assert refuses(llm)
            assert not any(one.residency == "device" for one in call(llm, "list_adapters"))
            call(llm, "wake_up", ALL)
            assert tokens(llm) == before
            assert next(one.residency for one in call(llm, "list_adapters")) == "device"


def test_memory_of_the_arena_and_of_the_weights_is_given_back():
    with engine() as llm:
        rank = llm.client.core.rank
        rank.arena.fill_(1)
        weights = held_weights(rank.model)
        num_bytes = sum(one.nbytes for one in weights)
        assert resident(rank.arena) == rank.arena.nbytes > 0.9 * ARENA_MB * 1e6
        sleep(llm, 1)
        assert resident(rank.arena) < 0.1 * rank.arena.nbytes
        assert resident(*weights) == num_bytes
        assert any(one.any() for one in weights)
        sleep(llm, 2)
        assert resident(*weights) < 0.5 * num_bytes
        large = [one for one in weights if one.nbytes > 1 << 16]
        assert large
        assert not any(one.flatten()[len(one.flatten()) // 2] for one in large)
        call(llm, "wake_up", ALL)
        assert resident(*weights) == num_bytes
        assert all(torch.isfinite(one).all() for one in weights)


def test_an_adapter_loaded_or_pinned_during_a_sleep_serves_after_it():
    with engine() as llm:
        before = tokens(llm)
        sleep(llm, 2)
        call(llm, "load_adapter", "new", UPPER)
        call(llm, "pin_adapter", "new", True)
        call(llm, "unload_adapter", "policy")
        call(llm, "load_adapter", "policy", UPPER)
        call(llm, "wake_up", ALL)
        assert tokens(llm) == before
        assert llm.generate("abcdefgh=", "new", GREEDY)[0].token_ids == before[0]


@pytest.mark.parametrize("verb", ["pin", "preload"])
def test_an_adapter_that_loads_while_memory_is_freed_serves_after_it(verb, monkeypatch):
    freeing, go_on, free = threading.Event(), threading.Event(), rank_module.give_memory_back

    def free_later(memory: torch.Tensor) -> None:
        freeing.set()
        go_on.wait(PATIENCE_S)
        free(memory)

    with engine() as llm:
        before = tokens(llm)
        monkeypatch.setattr(rank_module, "give_memory_back", free_later)
        asked = llm.client.start_call("sleep", ALL, False, "abort", 600.0)
        assert freeing.wait(PATIENCE_S)
        if verb == "pin":
            call(llm, "pin_adapter", "policy", True)
        else:
            call(llm, "preload_adapters", ["policy"])
        call(llm, "stats")
        while llm.client.core.transfers.busy:
            call(llm, "stats")
        go_on.set()
        asked.result(timeout=PATIENCE_S)
        call(llm, "wake_up", ALL)
        assert tokens(llm) == before


def test_it_is_awake_with_its_last_part():
    with engine() as llm:
        before = tokens(llm)
        sleep(llm, 2)
        assert asleep(llm) == ["kv_cache", "weights"]
        call(llm, "wake_up", ("weights", "scheduling"))
        assert asleep(llm) == ["kv_cache"]
        assert refuses(llm)
        call(llm, "wake_up", ("kv_cache",))
        assert asleep(llm) == []
        assert tokens(llm) == before
        call(llm, "wake_up", ALL)
        assert tokens(llm) == before


@pytest.mark.parametrize("part", ALL)
def test_a_part_sleeps_alone(part):
    with engine() as llm:
        before = tokens(llm)
        call(llm, "sleep", (part,), part == "weights", "wait", 600.0)
        assert asleep(llm) == [part]
        assert refuses(llm)
        call(llm, "wake_up", (part,))
        assert tokens(llm) == before


def test_running_requests_end_or_go_on_before_it():
    with engine() as llm:
        running = Stream(llm, "running", "policy", gated=True)
        running.get()
        asked = llm.client.start_call("sleep", ALL, False, "wait", 600.0)
        late = Stream(llm, "late", "policy")
        running.gate.set()
        with pytest.raises(BusyError):
            late.get()
        asked.result(timeout=PATIENCE_S)
        assert running.rest() == "length"
        call(llm, "wake_up", ALL)
        running = Stream(llm, "again", "policy", gated=True)
        running.get()
        asked = llm.client.start_call("sleep", ALL, False, "abort", 600.0)
        running.gate.set()
        asked.result(timeout=PATIENCE_S)
        assert running.rest() == "abort"


@pytest.mark.parametrize(
    ("level", "settings"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, {}),
        pytest.param(1, {"eager": False}, marks=pytest.mark.slow),
        pytest.param(2, {"tensor_parallel": 2}, marks=pytest.mark.slow),
    ],
)
def test_kept_requests_go_on_by_their_version_with_the_same_tokens(level, settings):
    adapters = ("policy", None, "other")
    with captured_graphs(), engine(**settings) as llm:
        whole = [Stream(llm, f"whole {name}", name) for name in adapters]
        expected = [(one.rest(), answer(one)) for one in whole]
        kept = [Stream(llm, f"kept {name}", name, gated=name == "policy") for name in adapters]
        kept[0].get()
        asked = llm.client.start_call("sleep", ALL, level == 2, "keep", 600.0)
        kept[0].gate.set()
        asked.result(timeout=PATIENCE_S)
        assert refuses(llm)
        call(llm, "load_adapter", "policy", REVERSE, True)
        assert is_still(llm, kept[-1])
        assert asleep(llm) == sorted(ALL)
        call(llm, "wake_up", ALL)
        assert [(one.rest(), answer(one)) for one in kept] == expected
        assert {one.adapter_version for one in kept[0].outputs} == {1}
        assert Stream(llm, "next", "policy", tokens=3).rest() == "length"


def answer(stream: Stream) -> list[int]:
    return [token for output in stream.outputs for token in output.token_ids]


def test_a_kept_request_ends_by_an_abort_or_by_a_second_sleep():
    with engine() as llm:
        first, second = Stream(llm, "first", "policy", gated=True), Stream(llm, "second", "policy")
        first.get()
        asked = llm.client.start_call("sleep", ALL, False, "keep", 600.0)
        first.gate.set()
        asked.result(timeout=PATIENCE_S)
        asyncio.run(llm.client.abort("first"))
        assert first.rest() == "abort"
        assert is_still(llm, second)
        sleep(llm, 2)
        assert second.rest() == "abort"
        call(llm, "wake_up", ALL)
        assert Stream(llm, "next", "policy", tokens=3).rest() == "length"


@pytest.mark.parametrize(("expires", "mode"), diagonal([False, True], ["keep", "wait"]))
def test_requests_that_a_pause_delays_go_on_after_the_sleep(mode, expires):
    with engine() as llm:
        first = Stream(llm, "first", tokens=1, gated=True)
        first.get()
        llm.client.start_call("pause_requests", PauseScope(), "keep", 1.0 if expires else 600.0)
        late = Stream(llm, "late", "policy", tokens=3)
        asked = llm.client.start_call("sleep", ALL, False, mode, 600.0)
        first.gate.set()  # the engine reads all of that in one turn, however early the pause expires
        asked.result(timeout=PATIENCE_S)
        if not expires:
            call(llm, "resume_requests", None)
        while call(llm, "paused_scopes"):
            pass
        assert is_still(llm, late)
        assert call(llm, "stats").num_waiting == 1
        call(llm, "load_adapter", "policy", REVERSE, True)
        call(llm, "wake_up", ("kv_cache",))
        assert is_still(llm, late)
        call(llm, "wake_up", ("weights",))
        assert late.rest() == "length"
        assert late.versions == {2}


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_requests_that_wait_for_a_grammar_go_on_after_the_sleep(mode, monkeypatch):
    compiled, compile_now = threading.Event(), Grammars._compile

    def compile_later(self: Grammars, grammar: str) -> LLMatcher:
        compiled.wait(PATIENCE_S)
        return compile_now(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", compile_later)
    grammar = json_grammar({"type": "array", "items": {"type": "integer"}})
    with engine() as llm:
        asked = Stream(llm, "asked", "policy", tokens=4, grammar=grammar)
        sleep(llm, 1, mode)
        compiled.set()
        if mode == "abort":
            assert asked.rest() == "abort"
            return
        wait_until(lambda: call(llm, "stats").num_waiting == 1, "the request is delayed")
        assert is_still(llm, asked)
        assert refuses(llm)
        call(llm, "wake_up", ALL)
        assert asked.rest() == "length"
        again = Stream(llm, "again", "policy", tokens=4, grammar=grammar)
        again.rest()
        assert asked.tokens == again.tokens


def test_requests_that_a_pause_delays_go_on_after_a_sleep_that_is_refused():
    with engine() as llm:
        running = Stream(llm, "running", gated=True)
        pause(llm, "keep", running, scope=PauseScope("key", "", ("policy",)))
        call(llm, "hold_request", "running", 0)
        late = Stream(llm, "late", "policy", tokens=3)
        asked = llm.client.start_call("sleep", ALL, False, "wait", 0.5)
        call(llm, "resume_requests", "key")
        with pytest.raises(TimeoutError, match="stays awake"):
            asked.result(timeout=PATIENCE_S)
        assert late.rest() == "length"


def test_a_request_that_does_not_end_in_time_keeps_it_awake():
    with engine() as llm:
        running = Stream(llm, "running", "policy", gated=True)
        running.get()
        asked = llm.client.start_call("sleep", ALL, False, "wait", 0.2)
        held = llm.client.start_call("hold_request", "running", 0)  # before the next step
        running.gate.set()
        held.result(timeout=PATIENCE_S)
        with pytest.raises(TimeoutError, match="stays awake"):
            asked.result(timeout=PATIENCE_S)
        assert is_still(llm, running)
        assert asleep(llm) == []
        assert Stream(llm, "next", "policy", tokens=3).rest() == "length"


def test_a_sleep_that_fails_leaves_it_awake_with_its_pins(monkeypatch):
    with engine() as llm:
        before = tokens(llm)
        call(llm, "pin_adapter", "policy", True)
        with monkeypatch.context() as broken:
            broken.setattr(UnifiedCache, "clear_history", Mock(side_effect=RuntimeError("drawn")))
            with pytest.raises(RuntimeError, match="drawn"):
                sleep(llm, 2, "keep")
        assert asleep(llm) == []
        assert tokens(llm) == before
        sleep(llm, 1)
        with monkeypatch.context() as broken:
            broken.setattr(UnifiedCache, "clear_history", Mock(side_effect=RuntimeError("drawn")))
            with pytest.raises(RuntimeError, match="drawn"):
                sleep(llm, 2)
        assert refuses(llm)
        call(llm, "wake_up", ALL)
        call(llm, "pin_adapter", "policy", False)
        assert tokens(llm) == before
        assert not llm.client.core.adapters._cache._mover.held


def test_a_failed_release_of_weights_stays_asleep_until_they_are_read_again(monkeypatch):
    with engine() as llm:
        before = tokens(llm)
        rank, free = llm.client.core.rank, llm.client.core.rank.free_weights

        def fail() -> None:
            free()
            raise MemoryError("drawn")

        monkeypatch.setattr(rank, "free_weights", fail)
        with pytest.raises(MemoryError, match="drawn"):
            sleep(llm, 2)
        assert refuses(llm)
        call(llm, "wake_up", ALL)
        assert tokens(llm) == before


def test_a_change_beside_another_is_refused():
    with engine() as llm:
        running = Stream(llm, "running", "policy", gated=True)
        running.get()
        asked = llm.client.start_call("sleep", ALL, False, "wait", 600.0)
        second = llm.client.start_call("wake_up", ALL)
        running.gate.set()
        with pytest.raises(BusyError, match="falls asleep"):
            second.result(timeout=PATIENCE_S)
        asked.result(timeout=PATIENCE_S)


@pytest.mark.parametrize("ranks", with_quick((1, 2), (1,)))
def test_a_checkpoint_that_is_gone_leaves_it_asleep_until_it_is_back(tmp_path, ranks):
    model = tmp_path / "model"
    shutil.copytree(DEMO / "model", model)
    with engine(model, tensor_parallel=ranks) as llm:
        before = tokens(llm)
        sleep(llm, 2)
        model.rename(tmp_path / "elsewhere")
        with pytest.raises(ConfigError):
            call(llm, "wake_up", ALL)
        assert refuses(llm)
        (tmp_path / "elsewhere").rename(model)
        call(llm, "wake_up", ALL)
        assert tokens(llm) == before


def test_merged_weights_refuse_to_sleep():
    with engine(batching="merged") as llm:
        with pytest.raises(ConfigError, match="batching='unmerged'"):
            sleep(llm, 1)
        assert asleep(llm) == []
        assert Stream(llm, "next", "policy", tokens=3).rest() == "length"


def test_adapters_of_requests_and_on_the_device_are_named():
    with engine() as llm:
        assert call(llm, "used_adapters") == {}
        tokens(llm)
        assert call(llm, "ready_adapters", ["policy", "unknown"]) == ["policy"]
        assert call(llm, "ready_adapters", []) == []
