# SPDX-License-Identifier: Apache-2.0
"""Steps that are launched before the tokens of those before are read give the tokens of steps in turn."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moe_lora import SamplingParams
from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.request import GenerateRequest
from moe_lora.engine.build import build_engine
from moe_lora.engine.client.messages import Abort, Call, Generate, Inbox, Outputs, Reply, Stop
from moe_lora.engine.core import EngineCore
from moe_lora.engine.loop import EngineLoop
from moe_lora.engine.step.sampler import schedules_ahead

DEMO = Path(__file__).parents[2] / "demo"
NAMES = [None, *list(json.loads((DEMO / "adapters" / "index.json").read_text()))[:3]]
CONFIG = EngineConfig(
    model_dir=str(DEMO / "model"),
    adapters=tuple((name, str(DEMO / "adapters" / name)) for name in NAMES if name),
    dtype="float32",
    eager=True,
    num_threads=1,
    max_num_seqs=6,
    max_num_batched_tokens=24,
)
KINDS = (
    {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 3, "max_tokens": 9, "logprobs": 0, "min_tokens": 4},
    {"temperature": 0.0, "max_tokens": 1},
    {"temperature": 0.9, "top_k": 5, "max_tokens": 30},
)
EDITED = (
    *KINDS[:2],
    {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.4, "max_tokens": 14},
    {
        "temperature": 1.0,
        "seed": 4,
        "bad_word_ids": ((40,), (41, 42)),
        "presence_penalty": 2.0,
        "logprobs": 1,
    },
)
"""Kinds of which some need all tokens before the next step."""


def requests(num: int, kinds=KINDS) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=tuple(30 + (7 * i + j) % 60 for j in range(2 + 5 * (i % 4))),
            sampling=SamplingParams(**kinds[i % len(kinds)]),
            adapter=NAMES[i % len(NAMES)],
        )
        for i in range(num)
    ]


def answers(core: EngineCore, wanted: list[GenerateRequest], abort: dict[str, int]) -> dict[str, list]:
    """Tokens, log probabilities and reason of each.  abort: those that leave after so many tokens."""
    found: dict[str, list] = {one.request_id: [] for one in wanted}
    waiting = list(wanted)
    for _ in range(30_000):
        for one in waiting[:2]:
            core.add_request(one)
        del waiting[:2]
        outputs = core.step()
        if not outputs:
            time.sleep(1e-3)  # adapters are on their way
        for output in outputs:
            found[output.request_id].append((output.token_ids, output.logprobs, output.finish_reason))
        for name, num_tokens in abort.items():
            if len(found[name]) == num_tokens and core.abort(name) is not None:
                found[name].append("aborted")
        if not (core.has_work or waiting):
            return found
    raise AssertionError("requests did not end")


def test_prompt_of_several_steps_of_which_only_the_last_draws():
    """Also where it is left in the middle, and another comes."""
    prompt = tuple(30 + j % 60 for j in range(60))
    long = [GenerateRequest(request_id=name, prompt_token_ids=prompt) for name in ("long", "left", "next")]
    core = build_engine(replace(CONFIG, async_scheduling="on"))
    in_turn = build_engine(replace(CONFIG, async_scheduling="off"))
    try:
        assert answers(core, long[:1], {}) == answers(in_turn, long[:1], {})
        core.add_request(long[1])
        core.step()
        core.abort("left")
        assert answers(core, long[2:], {}) == answers(in_turn, long[2:], {})
    finally:
        core.close()
        in_turn.close()


def run(kinds=KINDS, **settings) -> tuple[dict[str, list], EngineCore]:
    core = build_engine(replace(CONFIG, **settings))
    try:
        return answers(core, requests(15, kinds), {"5": 2, "10": 5}), core
    finally:
        core.close()


@pytest.fixture(scope="module")
def in_turn() -> dict[str, list]:
    found, _ = run(async_scheduling="off")
    assert {one[-1][-1] for one in found.values() if one[-1] != "aborted"} == {"stop", "length"}
    assert any(one[-1] == "aborted" for one in found.values())
    return found


def test_tokens_and_reports_are_those_of_steps_in_turn(in_turn, monkeypatch):
    launched: list[bool] = []
    launch = EngineCore._launch

    def noting(core, plan):
        launched.append(any(item.sequence.tokens[-1] < 0 for item in plan))
        return launch(core, plan)

    monkeypatch.setattr(EngineCore, "_launch", noting)
    found, core = run(async_scheduling="on")
    assert found == in_turn
    assert sum(launched) > len(launched) / 2, "steps were launched with tokens that nobody knew"
    assert core.stats().num_running == core.stats().num_waiting == 0


def test_preempted_requests_go_on_with_the_tokens_that_they_had():
    """An arena that is too small for all of them."""
    settings = {"max_model_len": 56, "arena_mb": 0.91, "block_size": 4}
    expected, _ = run(async_scheduling="off", **settings)
    found, core = run(async_scheduling="on", **settings)
    assert core.stats().num_preemptions > 0
    assert found == expected


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"max_model_len": 56, "arena_mb": 0.91, "block_size": 4},
    ],
)
def test_only_requests_with_penalties_wait_for_their_tokens(settings, monkeypatch):
    """Also where requests are preempted."""
    expected, _ = run(EDITED, async_scheduling="off", **settings)
    launched: list[tuple[bool, bool]] = []
    launch = EngineCore._launch

    def noting(core, plan):
        launched.extend(
            (item.sequence.request.sampling.edits_logits, item.sequence.tokens[-1] < 0) for item in plan
        )
        return launch(core, plan)

    monkeypatch.setattr(EngineCore, "_launch", noting)
    found, core = run(EDITED, async_scheduling="on", **settings)
    assert found == expected
    assert (False, True) in launched
    assert (True, True) not in launched
    assert (core.stats().num_preemptions > 0) == bool(settings)


def test_calls_see_no_token_that_is_not_known():
    """A request is held in the midst of its answer, and goes on where it was."""
    core, events, inbox = build_engine(replace(CONFIG, async_scheduling="on")), [], Inbox()
    request = requests(1)[0]
    loop = EngineLoop(core, events.append, inbox)

    def tokens() -> list[int]:
        outputs = [one for event in events if isinstance(event, Outputs) for one in event.outputs]
        return [token for one in outputs if one.request_id == "0" for token in one.token_ids]

    loop._handle(Generate(request), 0.0)
    for _ in range(4):
        events.append(Outputs(core.step()))
    assert len(tokens()) == 3
    loop._handle(Call(1, "hold_request", ("0", 0)), 0.0)
    held = next(event.value for event in events if isinstance(event, Reply))
    assert list(held.tokens) == tokens()
    assert len(tokens()) == 4
    core.step()
    loop._handle(Call(2, "resume_request", ("0", (), 0, 0, False)), 0.0)
    inbox.put(Stop())
    while core.has_work:
        events.append(Outputs(core.step()))
    loop._handle(Abort("0"), 0.0)
    core.close()
    other = build_engine(replace(CONFIG, async_scheduling="off"))
    expected = answers(other, [request], {})["0"]
    other.close()
    assert tokens() == [token for one in expected for token in one[0]]


SERVER = LoraServerConfig(address="/nowhere", store_dir="/nowhere")
ALONE = {"merges": False, "host": False}


@pytest.mark.parametrize(
    ("named", "settings", "found"),
    [
        ("several ranks", {"expert_parallel": 2}, {}),
        ("several ranks", {"tensor_parallel": 2}, {}),
        ("a LoRA Server", {"lora_server": SERVER}, {}),
        ("host_workers", {}, {"host": True}),
        ("batching='dlora'", {"batching": "dlora"}, {"merges": True}),
    ],
)
def test_what_cannot_be_combined_is_refused_and_auto_leaves_it_off(named, settings, found):
    parts = {**ALONE, **found}
    on = replace(CONFIG, async_scheduling="on", **settings)
    with pytest.raises(ConfigError, match=f"async_scheduling='on' does not go together with {named}"):
        schedules_ahead(on, "cpu", **parts)
    assert not schedules_ahead(replace(on, async_scheduling="auto"), "cuda", **parts)


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel": 2},
        {"lora_server": SERVER},
        {"host_workers": 1},
        {"batching": "dlora"},
    ],
)
def test_what_cannot_be_combined_is_refused_before_the_model_is_loaded(settings, tmp_path):
    """There are no weights beside the model's settings, and nothing is started."""
    shutil.copy(DEMO / "model" / "config.json", tmp_path)
    on = replace(CONFIG, model_dir=str(tmp_path), adapters=(), async_scheduling="on", **settings)
    with pytest.raises(ConfigError, match="async_scheduling='on' does not go together with"):
        build_engine(on)


def test_auto_is_on_where_the_device_computes_beside_the_host():
    for device, expected in (("cuda", True), ("cpu", False)):
        assert schedules_ahead(CONFIG, device, **ALONE) is expected
