# SPDX-License-Identifier: Apache-2.0
"""Requests whose adapters are still loading: host workers compute their prompts, and no token changes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from moe_lora import LLM, GenerationError, SamplingParams
from moe_lora.api import InProcessClient
from moe_lora.config import EngineConfig, LoraServerConfig, PoolConfig
from moe_lora.config.optional_parts import EmulationConfig
from moe_lora.core.errors import ConfigError, StorageError
from moe_lora.core.request import GenerateRequest, TokenOutput
from moe_lora.dist.launch.server_role import build_rank
from moe_lora.dist.lora_server.server_rank import ServerRank
from moe_lora.engine.adapters.adapter_store import MAX_LOADS, AdapterVersion
from moe_lora.engine.adapters.copies import RankCopier
from moe_lora.engine.build import build_engine
from moe_lora.engine.core import EngineCore
from moe_lora.engine.step.runner import ModelRunner
from moe_lora.lora.row_routing import Lease, Source
from tests.families import BESIDE_FAMILIES, FAMILIES, FURTHER, MOE_FAMILIES, NEWER, NUM_LAYERS, later
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.models.test_oracle import SLOTS, make_prompts
from tests.oracle import greedy_reference
from tests.patience import PATIENCE_S

NUM_TOKENS = 14
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SLOW = {"emulation": EmulationConfig(load_gb_per_s=6e-4)}
"""An adapter of a tiny model takes about a third of a second."""
HOST = {"host_workers": 2, "host_tokens_per_worker": 8, **SLOW}
WAYS = {
    "all_at_once": {},
    "chunked_prefill": {"max_num_batched_tokens": 9, "max_num_seqs": 8},
    "compiled": {"eager": False},
    "ranks": {"expert_parallel": 2, "num_threads": 1, "host_workers": 1},
    "chunked_ranks": {"expert_parallel": 2, "num_threads": 1, "host_workers": 1}
    | {"max_num_batched_tokens": 9, "max_num_seqs": 8},
    "divided": {"tensor_parallel": 2, "num_threads": 1, "host_workers": 1},
    "divided_and_dealt": {"tensor_parallel": 2, "expert_parallel": 2, "num_threads": 1, "host_workers": 1},
}


def start(model, way: str = "all_at_once", **settings) -> LLM:
    adapters = {path.name: str(path) for path in model.adapters}
    options = {"eager": True, "host_workers": 2, "host_tokens_per_worker": 8}
    return LLM(model.model_dir, adapters=adapters, dtype="float32", **(options | WAYS[way] | settings))


def ask(llm: LLM, model) -> list[tuple[int, ...]]:
    """Answers to prompts of every adapter and of the base model, all at once."""
    names = [None if slot < 0 else model.adapters[slot].name for slot in SLOTS]
    return [completion.token_ids for completion in llm.generate(make_prompts(), names, GREEDY)]


def expected_of(model, drafts) -> list[tuple[int, ...]]:
    answers = []
    for slot, prompt, draft in zip(SLOTS, make_prompts(), drafts, strict=True):
        adapter = None if slot < 0 else model.adapters[slot]
        reference = greedy_reference(model.model_dir, adapter, [prompt], NUM_TOKENS, [draft])
        reference.check_margins()
        answers.append(reference.tokens[0])
    return answers


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(pytest.param(family, "all_at_once", marks=pytest.mark.slow) for family in FAMILIES),
        *(
            pytest.param(*one.values, "all_at_once", marks=one.marks)
            for one in later("olmoe", families=FURTHER + NEWER)
        ),
        ("gemma4", "all_at_once"),
        pytest.param("mixtral", "chunked_prefill", marks=pytest.mark.slow),
        pytest.param("llama", "compiled", marks=pytest.mark.slow),
        *(
            pytest.param(family, "ranks", marks=() if family == "gpt_oss" else pytest.mark.slow)
            for family in MOE_FAMILIES
        ),
        pytest.param("mixtral", "chunked_ranks", marks=pytest.mark.slow),
        *(
            pytest.param(family, "divided", marks=() if family == "llama" else pytest.mark.slow)
            for family in FAMILIES
        ),
        pytest.param("qwen3_moe", "divided_and_dealt", marks=pytest.mark.slow),
    ],
)
def test_cold_requests_answer_as_peft_does(family, way, served):  # noqa: F811
    model = served(family)
    with start(model, way, **SLOW) as llm:
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        cold = llm.stats()
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        warm = llm.stats()
    assert cold.lora_rows_host > 0, "host workers computed"
    assert cold.lora_rows_local > 0, "and the device what had come"
    assert cold.host_fallback_rows == 0, "workers computed every row that was theirs"
    assert warm.lora_rows_host == cold.lora_rows_host, "nothing is cold the second time"


@contextmanager
def pool_engines(model, transport: str, *settings: dict) -> Iterator[list[InProcessClient]]:
    """An engine for each of the settings."""
    options = {"dtype": "float32", "eager": True, "num_threads": 1, "pool": PoolConfig(transport=transport)}
    with ExitStack() as ends:
        clients = []
        for changes in settings:
            core = build_engine(EngineConfig(model_dir=str(model.model_dir), **options, **changes))
            clients.append(InProcessClient(core))
            ends.callback(clients[-1].shut_down)
        yield clients


def ask_client(client: InProcessClient, model, sampling: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    """As `ask`."""
    outputs: SimpleQueue = SimpleQueue()
    for number, (slot, prompt) in enumerate(zip(SLOTS, make_prompts(), strict=True)):
        request = GenerateRequest(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            adapter=None if slot < 0 else model.adapters[slot].name,
        )
        client.submit(request, outputs.put)
    tokens: dict[str, tuple[int, ...]] = {}
    unfinished = len(SLOTS)
    while unfinished:
        output = outputs.get(timeout=PATIENCE_S)
        assert isinstance(output, TokenOutput), output
        tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
        unfinished -= output.finish_reason is not None
    return [tokens[str(number)] for number in range(len(SLOTS))]


@pytest.mark.parametrize(
    ("family", "holder", "transport"),
    [
        pytest.param("mixtral", "itself", "shm", marks=pytest.mark.slow),
        ("mixtral", "a peer", "shm"),
        pytest.param("llama", "a peer", "gloo", marks=pytest.mark.slow),
    ],
)
def test_adapters_of_a_pool_are_computed_by_hosts_once_they_are_here(family, holder, transport, served):  # noqa: F811
    model = served(family)
    with pool_engines(model, transport, {}, HOST) as (peer, engine):
        for path in model.adapters:
            loads = engine if holder == "itself" else peer
            entry = loads.start_call("pool_load", path.name, str(path), False, 1).result(PATIENCE_S)
            if holder == "a peer":
                engine.start_call("pool_know", entry.facts, "nowhere", False, 1, [entry.source]).result(
                    PATIENCE_S
                )
        answered = ask_client(engine, model)
        assert answered == expected_of(model, answered)
        cold = engine.start_call("stats").result(PATIENCE_S)
        store = engine.core.adapters.store.host.store
        assert not list(store.directory.iterdir()), "once on the device they lie in the pool only"
        answered = ask_client(engine, model)
        assert answered == expected_of(model, answered)
        warm = engine.start_call("stats").result(PATIENCE_S)
    assert cold.lora_rows_host > 0
    assert cold.lora_rows_local > 0
    assert cold.host_fallback_rows == 0
    assert warm.lora_rows_host == cold.lora_rows_host
    assert cold.pool_peer_fetches == (len(model.adapters) if holder == "a peer" else 0)
    assert not worker_pids()
    assert not store.directory.exists()


@contextmanager
def lora_server(
    model, *, sites: str, num_ranks: int = 1, loads: threading.Event | None = None, tensor_parallel: int = 1
) -> Iterator[tuple[LoraServerConfig, ServerRank]]:
    """A rank in a thread, which loads layers after the first when the event comes.

    With a host worker, except beside tensor parallelism.
    """
    with tempfile.TemporaryDirectory(prefix="ls") as folder:  # short: paths of sockets are
        server = LoraServerConfig(
            address=f"{folder}/leader",
            store_dir=f"{folder}/store",
            sites=sites,
            memory_gb=0.01,
            host_workers=int(tensor_parallel == 1),
            host_tokens_per_worker=8,
        )
        options = {"dtype": "float32", "lora_server": server, "expert_parallel": num_ranks}
        options["tensor_parallel"] = tensor_parallel
        config = EngineConfig(model_dir=str(model.model_dir), **options)
        rank = build_rank(config, 0)
        load = rank.loop.server_store._load_layer

        def held(loading, layer, run):
            assert not layer or loads is None or loads.wait(PATIENCE_S)
            return load(loading, layer, run)

        rank.loop.server_store._load_layer = held
        thread = threading.Thread(target=rank.run)
        thread.start()
        try:
            yield server, rank
        finally:
            if loads is not None:
                loads.set()
            rank.stop()
            thread.join()


@pytest.mark.parametrize(
    ("family", "sites", "settings"),
    [
        ("mixtral", "experts", {"host_workers": 1}),
        pytest.param("mixtral", "experts", {"host_workers": 1, "expert_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("llama", "all", {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_lora_server_have_hosts_compute_what_they_load(family, sites, settings, served):  # noqa: F811
    """And the instance what it loads itself."""
    model = served(family)
    loads = threading.Event()
    num_ranks = settings.get("expert_parallel", 1)
    with lora_server(model, sites=sites, num_ranks=num_ranks, loads=loads) as (server, rank):
        none = {} if settings else {"host_workers": 0, "host_tokens_per_worker": None}
        options = {"num_threads": 1, "lora_server": server, **none, **SLOW, **settings}
        with start(model, **options) as llm:
            answered = ask(llm, model)
            assert answered == expected_of(model, answered)
            stats, num_host_rows = llm.stats(), rank.loop.num_host_rows
            assert num_host_rows > 0
            assert stats.lora_server_fallback_rows == 0
            assert (stats.lora_rows_host > 0) == bool(settings)
            assert stats.host_fallback_rows == 0
            loads.set()
            for _ in range(2):
                answered = ask(llm, model)
                assert answered == expected_of(model, answered)
                num_host_rows, before = rank.loop.num_host_rows, num_host_rows
            assert num_host_rows == before, "once all is there the host computes nothing"
    assert not worker_pids()


def test_host_workers_with_nothing_to_compute_are_refused(served):  # noqa: F811
    with (
        lora_server(served("llama"), sites="all") as (server, _),
        pytest.raises(ConfigError, match=r"set lora_server\.host_workers"),
    ):
        start(served("llama"), lora_server=server)


def test_without_room_for_an_adapter_of_a_pool_its_requests_wait_for_the_device(served):  # noqa: F811
    model = served("mixtral")
    with pool_engines(model, "shm", {}, HOST) as (_, engine):
        for path in model.adapters:
            engine.start_call("pool_load", path.name, str(path), False, 1).result(PATIENCE_S)
        folder = engine.core.adapters.store.host.store.directory
        folder.rmdir()
        folder.touch()
        answered = ask_client(engine, model)
        assert answered == expected_of(model, answered)
        assert engine.start_call("stats").result(PATIENCE_S).lora_rows_host == 0
        folder.unlink()


def num_prompt_rows() -> int:
    return sum(len(prompt) for slot, prompt in zip(SLOTS, make_prompts(), strict=True) if slot >= 0)


class HeldCopies:
    """Lets so many layers of each adapter come, and the rest when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_layers: int) -> None:
        bring = RankCopier._bring
        self.go_on = threading.Event()

        def held(copier, order, packed):
            for number, num_bytes in enumerate(bring(copier, order, packed)):
                assert number < num_layers or self.go_on.wait(PATIENCE_S)
                yield num_bytes

        monkeypatch.setattr(RankCopier, "_bring", held)

    def until(self, llm: LLM, num_rows: int) -> None:
        """Go on once the host has computed so many rows x layers."""
        deadline = time.monotonic() + PATIENCE_S
        while llm.stats().lora_rows_host < num_rows and time.monotonic() < deadline:
            time.sleep(0.01)
        self.go_on.set()


@pytest.mark.parametrize("num_layers", [0, 1])
def test_host_computes_what_had_not_come_and_the_device_what_had(num_layers, served, monkeypatch):  # noqa: F811
    """Without a layer there, workers compute every prompt row of every layer; with the second one there, a
    request goes from the host to the device between two layers."""
    model = served("mixtral")
    copies = HeldCopies(monkeypatch, num_layers)
    num_rows = num_prompt_rows() * (NUM_LAYERS if num_layers == 0 else 1)
    with start(model) as llm:
        thread = threading.Thread(target=copies.until, args=(llm, num_rows))
        thread.start()
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        thread.join()
        stats = llm.stats()
    if num_layers == 0:
        assert stats.lora_rows_host == num_rows
    else:
        assert 0.9 * num_rows <= stats.lora_rows_host < num_prompt_rows() * NUM_LAYERS
    assert stats.host_fallback_rows == 0


def children(name: str, *parents: int) -> set[int]:
    """Processes that these started (none given: this one) and whose command line has this name."""
    of = ",".join(map(str, parents or (os.getpid(),)))
    found = subprocess.run(["pgrep", "-P", of, "-f", name], capture_output=True, text=True, check=False)
    return set(map(int, found.stdout.split()))


def worker_pids() -> set[int]:
    """Host workers of this process and of the ranks that it started."""
    return children("host_workers.worker", os.getpid(), *children("ranks.follower"))


@pytest.mark.parametrize(
    ("family", "way", "num_killed"),
    [
        *(
            (family, "chunked_prefill", 1 if family == "mixtral" else 2)
            for family in (*FAMILIES, *BESIDE_FAMILIES)
        ),
        pytest.param("mixtral", "chunked_ranks", 2, marks=pytest.mark.slow),
        *(
            pytest.param(family, "chunked_prefill", 2 if family == "mixtral" else 1, marks=pytest.mark.slow)
            for family in FAMILIES
        ),
    ],
)
def test_killed_workers_change_no_token_and_come_back(family, way, num_killed, served, monkeypatch):  # noqa: F811
    model = served(family)
    copies = HeldCopies(monkeypatch, 0)
    with start(model, way) as llm:
        before = worker_pids()
        assert len(before) == 2

        def kill_then_go_on() -> None:
            while llm.stats().lora_rows_host == 0:
                time.sleep(0.001)
            for pid in sorted(before)[:num_killed]:
                os.kill(pid, signal.SIGKILL)
            copies.until(llm, num_prompt_rows() * NUM_LAYERS)

        thread = threading.Thread(target=kill_then_go_on)
        thread.start()
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        thread.join()
        if num_killed == 2:  # else the rows that are left may all have been the other one's
            assert llm.stats().host_fallback_rows > 0, "rows of workers that were gone are made up for"
        deadline = time.monotonic() + PATIENCE_S
        while len(worker_pids() - before) < num_killed:
            assert time.monotonic() < deadline, "the workers did not come back"
            time.sleep(0.05)
    assert not worker_pids()


def test_worker_of_another_rank_is_made_up_for_there(served, monkeypatch):  # noqa: F811
    model = served("mixtral")
    copies = HeldCopies(monkeypatch, 0)
    with start(model, "chunked_ranks") as llm:
        [follower] = children("ranks.follower")
        [worker] = children("host_workers.worker", follower)
        os.kill(worker, signal.SIGKILL)
        thread = threading.Thread(target=copies.until, args=(llm, num_prompt_rows() * NUM_LAYERS))
        thread.start()
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        thread.join()
        assert llm.stats().host_fallback_rows > 0
    assert not worker_pids()


def test_load_that_fails_ends_the_requests_that_wait_for_it(served, monkeypatch):  # noqa: F811
    model = served("mixtral")

    def fail(*_):
        time.sleep(0.2)
        raise OSError("the disk is gone")
        yield

    problems = []
    end = EngineCore._end
    with start(model) as llm, monkeypatch.context() as patch:
        patch.setattr(RankCopier, "_bring", fail)
        patch.setattr(EngineCore, "_end", lambda core, *how: problems.append(how[-1]) or end(core, *how))
        with pytest.raises(GenerationError) as caught:
            llm.generate([[5, 6, 7]] * 2, [model.adapters[0].name, None], GREEDY)
        lost, base = caught.value.completions
        assert (lost.finish_reason, base.finish_reason) == ("error", "length")
        assert len(lost.token_ids) <= MAX_LOADS, "a token of each try, and no decode step"
        [problem] = problems
        assert "is unavailable: it could not be loaded: OSError: the disk is gone; requests from" in problem


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host_workers": 1000}, "host_workers=1000 for each of 1 ranks is more than .*; choose at most"),
        ({"host_cores": (0,)}, "a core of its own"),
        ({"host_cores": (0, 999)}, "this process may not use core 999; choose from 0"),
        ({"expert_parallel": 2, "host_workers": 1, "host_cores": (0,)}, "a core of its own"),
    ],
)
def test_settings_that_host_workers_do_not_go_with_are_refused(settings, said, served):  # noqa: F811
    with pytest.raises(ConfigError, match=said):
        start(served("mixtral"), **settings)


def test_without_room_for_the_store_the_engine_does_not_start(served, monkeypatch, tmp_path):  # noqa: F811
    """Neither where a folder can't be made, nor where an adapter finds no room in it."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("moe_lora.adapters.host_store.save_file", full)
        with pytest.raises(StorageError, match=r"free room there, or let .* TMPDIR"):
            start(served("mixtral"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"absent.*No such file.*another place, or set host_workers=0"):
        start(served("mixtral"))
    assert not worker_pids()


def test_adapter_without_a_part_on_the_device_is_not_taken_for_one_that_loads():
    """Experts-only adapters beside a LoRA Server have no slot, and never will."""
    packed = SimpleNamespace(
        name="a", content_hash="0" * 64, targets=("gate", "up", "down"), layers=(), has_columns=False
    )
    adapter = AdapterVersion(1, 1, packed, None, lease=Lease(3, 9))
    runner = SimpleNamespace(
        _sources=[Source.LOCAL, Source.LEASED], _groups=((0, 1),) * NUM_LAYERS, _lora_rows=Counter()
    )
    runner.merged, runner._merged_route = None, lambda routes: -1
    runner._modules = {Source.LEASED: set(packed.targets)}
    sequence = SimpleNamespace(adapter=adapter, num_computed=0, base_tokens=0)
    plan = [SimpleNamespace(sequence=sequence)]
    routing = ModelRunner._routing(runner, plan, [1])
    assert routing.sources == [{Source.LOCAL}, {Source.LEASED}]
    assert routing.terms["slot"][0, :, 0].tolist() == [-1, 3]
