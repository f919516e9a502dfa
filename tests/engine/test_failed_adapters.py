# SPDX-License-Identifier: Apache-2.0
"""An error of one adapter, while it is loaded or computed, ends the requests of that adapter only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moe_lora.config import EngineConfig
from moe_lora.core.errors import AdapterError, AdapterFailedError
from moe_lora.core.request import AdapterInfo, GenerateRequest, SamplingParams, TokenOutput
from moe_lora.engine.adapters.adapter_store import FIRST_PAUSE_S, MAX_LOADS
from moe_lora.engine.adapters.copies import RankCopier
from moe_lora.engine.build import build_engine
from moe_lora.engine.client.step_notes import ReadNotes, StepNotes
from moe_lora.engine.core import EngineCore
from moe_lora.engine.step import sampler
from moe_lora.engine.step.runner import ModelRunner
from tests.patience import PATIENCE_S

DEMO = Path(__file__).parents[2] / "demo"
NAMES = ("upper", "reverse", "double")
CONFIG = EngineConfig(
    model_dir=str(DEMO / "model"),
    adapters=tuple((name, str(DEMO / "adapters" / name)) for name in NAMES),
    eager=True,
    num_threads=1,
    max_num_seqs=8,
    dtype="float32",
)


@pytest.fixture
def core() -> Iterator[EngineCore]:
    core = build_engine(CONFIG)
    yield core
    core.close()


def infos(core: EngineCore) -> list[AdapterInfo]:
    return [core.adapters.info(one) for one in core.adapters.known()]


def request(name: str, adapter: str | None, prompt: Sequence[int] = (5, 6, 7)) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return GenerateRequest(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, adapter=adapter
    )


def drive(core: EngineCore, *requests: GenerateRequest) -> dict[str, tuple[list[int], TokenOutput]]:
    """Tokens and last output of each request."""
    for one in requests:
        core.add_request(one)
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    last: dict[str, TokenOutput] = {}
    deadline = time.monotonic() + PATIENCE_S
    while core.has_work:
        assert time.monotonic() < deadline
        for output in core.step():
            tokens[output.request_id] += output.token_ids
            last[output.request_id] = output
    return {name: (tokens[name], last[name]) for name in tokens}


def four() -> list[GenerateRequest]:
    return [request(name, name) for name in NAMES] + [request("base", None)]


def fail_where(monkeypatch, bad) -> list[int]:
    """Steps with such a sequence raise; the number of sequences of each failed step."""
    run, failed = ModelRunner.run, []

    def maybe(self, plan, drawn=None):
        if any(bad(item.sequence) for item in plan):
            failed.append(len(plan))
            raise RuntimeError("a kernel refused its operands")
        return run(self, plan, drawn)

    monkeypatch.setattr(ModelRunner, "run", maybe)
    return failed


@pytest.mark.parametrize(
    ("ranks", "where"),
    [
        ({"expert_parallel": 2}, "before"),
        ({"tensor_parallel": 2}, "after"),
        pytest.param({"tensor_parallel": 2}, "before", marks=pytest.mark.slow),
        pytest.param({"expert_parallel": 2}, "after", marks=pytest.mark.slow),
    ],
    ids=lambda one: one if isinstance(one, str) else next(iter(one)),
)
def test_rank_0_that_raises_beside_the_steps_of_all_ranks_ends_only_its_adapter(monkeypatch, ranks, where):
    core = build_engine(replace(CONFIG, **ranks))
    right = drive(core, *four())

    def is_bad(one) -> bool:
        return one.adapter is not None and one.adapter.name == "upper"

    if where == "before":
        failed = fail_where(monkeypatch, is_bad)
    else:
        failed, sampled = [], sampler.sample

        def maybe(logits, sampling, *rest):
            if any(map(is_bad, sampling)):
                failed.append(len(sampling))
                raise RuntimeError("a kernel refused its operands")
            return sampled(logits, sampling, *rest)

        monkeypatch.setattr(sampler, "sample", maybe)
    found = drive(core, *four())
    assert failed == [4, 1]
    assert found["upper"][1].finish_reason == "error"
    for name in ("reverse", "double", "base"):
        assert found[name][0] == right[name][0]
    core.close()


@pytest.mark.parametrize(
    "ranks",
    [{"expert_parallel": 2}, pytest.param({"tensor_parallel": 2}, marks=pytest.mark.slow)],
    ids=lambda one: next(iter(one)),
)
def test_rank_0_whose_every_step_raises_ends_the_engine_of_all_ranks(monkeypatch, ranks):
    core = build_engine(replace(CONFIG, **ranks))

    def broken(self, batch):
        raise RuntimeError("the library is gone")

    monkeypatch.setattr(ModelRunner, "execute", broken)
    with pytest.raises(RuntimeError, match="the library is gone"):
        drive(core, *four())
    core.close(at_once=True)


@pytest.mark.parametrize("ahead", ["off", "on"])
def test_step_that_raises_ends_only_the_adapter_that_raises_alone(monkeypatch, ahead):
    core = build_engine(replace(CONFIG, async_scheduling=ahead))
    right = drive(core, *four())
    failed = fail_where(monkeypatch, lambda one: one.adapter is not None and one.adapter.name == "upper")
    found = drive(core, *four())
    assert failed == [4, 1], "once together, once alone"
    for name in ("reverse", "double", "base"):
        assert found[name][0] == right[name][0]
    assert found["upper"][1].finish_reason == "error"
    problem = found["upper"][1].error or ""
    assert "'upper' is unavailable: computing its deltas failed: RuntimeError: a kernel refused" in problem
    core.close()


def test_failed_adapter_is_unavailable_until_it_is_loaded_again(core, monkeypatch):
    right = drive(core, *four())
    with monkeypatch.context() as patch:
        fail_where(patch, lambda one: one.adapter is not None and one.adapter.name == "upper")
        drive(core, *four())
        [upper, *others] = infos(core)
        assert (upper.residency, upper.problem[:20]) == ("unavailable", "computing its deltas")
        assert all(one.residency != "unavailable" and not one.problem for one in others)
        with pytest.raises(AdapterFailedError, match="load it again"):
            core.add_request(request("again", "upper"))
    core.add_adapter(core.read_adapter("upper", str(DEMO / "adapters" / "upper")), None)
    assert infos(core)[-1].residency != "unavailable"
    found = drive(core, *four())
    assert found["upper"][0] == right["upper"][0]


def test_request_of_the_base_model_that_raises_alone_ends_alone(core, monkeypatch):
    right = drive(core, *four())
    failed = fail_where(monkeypatch, lambda one: one.request.request_id == "odd")
    found = drive(core, *four(), request("odd", None, [9, 9]))
    assert failed == [5, 1]
    assert found["odd"][1].finish_reason == "error"
    assert "this request could not be computed: a kernel refused" in (found["odd"][1].error or "")
    assert [found[name][0] for name in (*NAMES, "base")] == [right[name][0] for name in (*NAMES, "base")]


def test_engine_whose_every_step_raises_ends(core, monkeypatch):
    def broken(self, batch):
        raise RuntimeError("the library is gone")

    monkeypatch.setattr(ModelRunner, "execute", broken)
    with pytest.raises(RuntimeError, match="the library is gone"):
        drive(core, *four())


@pytest.mark.parametrize(
    ("error", "num_tries"), [(OSError("the disk is gone"), MAX_LOADS), (TypeError("x"), 1)]
)
def test_load_that_fails_is_repeated_only_where_the_cause_may_pass(core, monkeypatch, error, num_tries):
    tries = []

    def fail(self, order, packed):
        if packed.name == "upper":
            tries.append(packed.name)
            raise error
        yield from bring(self, order, packed)

    bring = RankCopier._bring
    with monkeypatch.context() as patch:
        patch.setattr(RankCopier, "_bring", fail)
        found = drive(core, *four())
    assert len(tries) == num_tries
    assert found["upper"][1].finish_reason == "error"
    assert str(error) in (found["upper"][1].error or "")
    assert [found[name][1].finish_reason for name in ("reverse", "double", "base")] == ["length"] * 3
    with pytest.raises(AdapterFailedError):
        core.add_request(request("too soon", "upper"))
    if num_tries == 1:
        return
    while True:  # the pause ends
        try:
            again = drive(core, request("later", "upper"))
            break
        except AdapterFailedError:
            time.sleep(0.05)
    assert again["later"][1].finish_reason == "length"
    assert infos(core)[0].residency == "device"


def test_load_that_passes_at_the_second_try_harms_nobody(core, monkeypatch):
    right, tries = drive(core, request("upper", "upper"))["upper"][0], []
    core.add_adapter(core.read_adapter("upper", str(DEMO / "adapters" / "upper")), None, replace=True)

    def fail_once(self, order, packed):
        tries.append(packed.name)
        if len(tries) == 1:
            raise OSError("a moment")
        yield from bring(self, order, packed)

    bring = RankCopier._bring
    monkeypatch.setattr(RankCopier, "_bring", fail_once)
    assert drive(core, request("upper", "upper"))["upper"][0] == right
    assert tries == ["upper", "upper"]


@pytest.mark.parametrize("num_failed", [1, MAX_LOADS])
def test_a_pinned_adapter_comes_after_failed_loads_without_a_request(core, monkeypatch, num_failed):
    tries, waits = [], []

    def fail_first(self, order, packed):
        tries.append(packed.name)
        if len(tries) <= num_failed:
            raise OSError("a moment")
        yield from bring(self, order, packed)

    bring = RankCopier._bring
    monkeypatch.setattr(RankCopier, "_bring", fail_first)
    upper = core.adapters.current("upper")
    core.adapters.pin(upper)
    deadline = time.monotonic() + PATIENCE_S
    while upper.slot is None:
        assert time.monotonic() < deadline
        wait_s = core.tend()
        if core.adapters.failures.problem(upper) is not None and upper in core.adapters.to_bring:
            waits.append(wait_s)
        time.sleep(0.01)
    assert tries == ["upper"] * (num_failed + 1)
    assert not core.adapters.to_bring
    assert core.adapters.info(upper).residency == "device"
    assert bool(waits) == (num_failed == MAX_LOADS)
    assert all(0 < wait_s <= FIRST_PAUSE_S for wait_s in waits), "an idle engine wakes up by itself"


def test_rank_above_the_limit_of_a_device_is_refused_when_its_file_is_read(core):
    rank = infos(core)[0].lora_rank
    core.adapters.contents.max_lora_rank = rank - 1
    with pytest.raises(AdapterError, match=f"the LoRA rank {rank} is above max_lora_rank={rank - 1}"):
        core.read_adapter("big", str(DEMO / "adapters" / "upper"))


def test_notes_name_the_adapters_of_the_step_and_of_loads(core, monkeypatch):
    notes = StepNotes()
    core.attach_notes(notes)
    reader, seen = ReadNotes(notes.place), []
    run = ModelRunner.run

    def look(self, plan, drawn=None):
        seen.append((reader.adapters(), {i.sequence.adapter.name for i in plan if i.sequence.adapter}))
        return run(self, plan, drawn)

    monkeypatch.setattr(ModelRunner, "run", look)
    drive(core, *four())
    assert all(of_step <= noted for noted, of_step in seen)
    assert set().union(*(of_step for _, of_step in seen)) == set(NAMES)
    core.tend()
    assert reader.adapters() == frozenset()
    with notes.load("new"):
        assert reader.adapters() == {"new"}
    core.close()
    assert reader.adapters() == frozenset()


def test_a_load_that_fails_after_the_unload_leaves_no_failure(core, monkeypatch):
    bringing, go_on = threading.Event(), threading.Event()

    def fail(self, order, packed):
        bringing.set()
        go_on.wait(PATIENCE_S)
        raise AdapterError("damaged")
        yield

    monkeypatch.setattr(RankCopier, "_bring", fail)
    core.adapters.pin(core.adapters.current("upper"))
    core.tend()
    assert bringing.wait(PATIENCE_S)
    core.remove_adapter("upper")
    go_on.set()
    deadline = time.monotonic() + PATIENCE_S
    while core.transfers.busy:
        assert time.monotonic() < deadline
        core.tend()
    failures = core.adapters.failures
    assert (failures.by_version, failures._num_loads) == ({}, {})
