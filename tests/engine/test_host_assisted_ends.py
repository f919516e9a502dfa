# SPDX-License-Identifier: Apache-2.0
"""Host workers when things end: cold requests, builds that fail, engines that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time

import pytest

from moe_lora import LLM, SamplingParams
from moe_lora.core.errors import AdapterNotFoundError, ConfigError
from moe_lora.engine.step.runner import ModelRunner
from tests.engine.test_host_assisted import (
    GREEDY,
    NUM_TOKENS,
    SLOW,
    HeldCopies,
    ask,
    children,
    expected_of,
    start,
    worker_pids,
)
from tests.engine.test_oracle import smallest_kv_gb
from tests.forked_programs import start_program
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.oracle import greedy_reference
from tests.patience import PATIENCE_S

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
RANKS = {"expert_parallel": 2, "host_workers": 1, "num_threads": 1}


def expected(model, adapter) -> tuple[int, ...]:
    return greedy_reference(model.model_dir, adapter, [PROMPT], NUM_TOKENS).tokens[0]


def until(condition, what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


class ColdRequest(threading.Thread):
    """One request of an adapter that does not come before `copies.go_on`; its prompt is computed by hosts."""

    def __init__(self, llm: LLM, adapter: str) -> None:
        super().__init__()
        self.llm, self.adapter = llm, adapter
        self.tokens: tuple[int, ...] = ()
        before = llm.stats().lora_rows_host
        self.start()
        until(lambda: llm.stats().lora_rows_host > before, "no host computed the prompt")

    def run(self) -> None:
        [answer] = self.llm.generate([PROMPT], self.adapter, GREEDY)
        self.tokens = answer.token_ids


def test_cold_request_that_is_aborted_leaves_its_place_to_others(served, monkeypatch):  # noqa: F811
    model = served("mixtral")
    copies = HeldCopies(monkeypatch, 0)
    with start(model) as llm:
        request = ColdRequest(llm, model.adapters[0].name)
        [request_id] = llm.client._sinks
        llm.client.leave(request_id)
        llm.client.abort_now(request_id)
        request.join(PATIENCE_S)
        assert len(request.tokens) < NUM_TOKENS
        until(lambda: llm.stats().num_running == llm.stats().num_waiting == 0, "it still holds its place")
        copies.go_on.set()
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)


def test_adapter_that_is_unloaded_or_replaced_while_cold_answers_what_was_begun(served, monkeypatch):  # noqa: F811
    model = served("mixtral")
    copies = HeldCopies(monkeypatch, 0)
    first, second, *_ = model.adapters
    with start(model) as llm:
        requests = [ColdRequest(llm, path.name) for path in (first, second)]
        llm.publish_adapter(first.name, str(second))
        unload = threading.Thread(target=llm.unload_adapter, args=(second.name,))
        unload.start()
        until(lambda: second.name not in [info.name for info in llm.list_adapters()], "it is still known")
        later = ColdRequest(llm, first.name)
        copies.go_on.set()
        for thread in (*requests, unload, later):
            thread.join(PATIENCE_S)
        assert requests[0].tokens == expected(model, first)
        assert requests[1].tokens == later.tokens == expected(model, second)
        with pytest.raises(AdapterNotFoundError):
            llm.generate([PROMPT], second.name, GREEDY)
        assert llm.stats().host_fallback_rows == 0


def test_cold_requests_that_give_their_pages_back_answer_as_before(served):  # noqa: F811
    model = served("mixtral")
    tight = {"kv_cache_gb": smallest_kv_gb(model), "max_model_len": 128, "max_loras": 2, **SLOW}
    with start(model, "chunked_prefill", **tight) as llm:
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        stats = llm.stats()
    assert stats.num_preemptions + stats.num_put_back > 0
    assert stats.adapter_evictions > 0
    assert stats.lora_rows_host > 0
    assert stats.host_fallback_rows == 0


@pytest.mark.parametrize("settings", [{}, RANKS], ids=["alone", "ranks"])
def test_build_that_fails_leaves_nothing(settings, served, monkeypatch, tmp_path):  # noqa: F811
    model = served("mixtral")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(threading.enumerate())
    seen: set[int] = set()

    def fail(*_: object) -> None:
        seen.update(worker_pids())
        raise ConfigError("it can't be warmed up")

    monkeypatch.setattr(ModelRunner, "warm_up", fail)
    with pytest.raises(ConfigError, match="can't be warmed up"):
        start(model, **settings)
    assert len(seen) == 2, "workers were there"
    assert not worker_pids()
    assert not children("ranks.follower")
    assert not list(tmp_path.iterdir())
    until(lambda: set(threading.enumerate()) <= before, "threads stay")


ENGINE = """
import os
import sys
import tempfile
tempfile.tempdir = os.environ["TMPDIR"] = sys.argv[4]
from moe_lora import LLM
llm = LLM(sys.argv[1], dtype="float32", eager=True, num_threads=1, host_workers=1,
          expert_parallel=int(sys.argv[2]), adapters={"a": sys.argv[3]})
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_next_start_removes_what_a_killed_engine_left(num_ranks, served, monkeypatch, tmp_path):  # noqa: F811
    model = served("mixtral")
    words = (model.model_dir, num_ranks, model.adapters[0], tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    engine = start_program(ENGINE, *map(str, words), **pipes)
    assert engine.stdout.readline().strip() == b"ready"
    followers = children("ranks.follower", engine.pid)
    pids = {engine.pid, *followers, *children("host_workers.worker", engine.pid, *followers)}
    assert len(pids) == 2 * num_ranks
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none sees another end
        for pid in pids:
            os.kill(pid, number)
    engine.communicate()
    assert list(tmp_path.iterdir()), "nobody was left to remove it"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    two = SamplingParams(temperature=0.0, max_tokens=2)
    with start(model, host_workers=1) as llm:
        [answer] = llm.generate([PROMPT], model.adapters[0].name, two)
        assert len(list(tmp_path.iterdir())) == 1, "only its own"
    assert answer.token_ids == expected(model, model.adapters[0])[:2]
    assert not list(tmp_path.iterdir())
