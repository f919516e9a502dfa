# SPDX-License-Identifier: Apache-2.0
"""Engines of several processes answer as one process does, and end together."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import product
from multiprocessing import Pipe
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed as dist

from bench.harness.processes import engine_processes
from bench.house.house_trace import CAPTURED
from moe_lora import LLM, SamplingParams
from moe_lora.config import EngineConfig
from moe_lora.core.errors import CapacityError, ConfigError, EngineDeadError
from moe_lora.core.host import OwnFolder
from moe_lora.core.processes import Child
from moe_lora.core.request import GenerateRequest
from moe_lora.engine.build import build_engine
from moe_lora.engine.ranks.follower import gather_followers
from moe_lora.engine.ranks.followers import HOST_STORE, Done, Followers
from moe_lora.engine.step.step_batch import packed_message
from tests.engine.test_oracle import smallest_kv_gb
from tests.families import BESIDE_FAMILIES, DENSE_FAMILIES, FURTHER_MOE, MOE_FAMILIES, NEWER_MOE, later
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.models.generated_code import captured_graphs
from tests.patience import PATIENCE_S
from tests.stopped_processes import stop

T = TypeVar("T")
MODEL = Path(__file__).parents[3] / "demo" / "model"
SLOW = pytest.mark.slow
NUM_TOKENS = 14
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
EXPERTS_ALONE = ("qwen3_next", "deepseek_v3", "glm4_moe_lite")
"""Families without tensor parallelism."""
INSTANCE = "moe_lora.dist.launch.run_role"
TIGHT = {"max_loras": 2, "max_num_batched_tokens": 9, "max_num_seqs": 8, "max_model_len": 128}
"""Prompts come in chunks and adapters take turns; with the least KV, sequences are preempted too."""


def settings(model, **changes) -> dict:
    adapters = {path.name: str(path) for path in model.adapters}
    return {"adapters": adapters, "dtype": "float32", "eager": True, "num_threads": 1, **changes}


def traffic(model) -> tuple[list[list[int]], list[str | None]]:
    """Prompts of 1 to 45 tokens for the base model and each adapter, mixed."""
    rng = random.Random(5)
    names = [None, *(path.name for path in model.adapters)] * 2
    return [[rng.randrange(3, 96) for _ in range(rng.randint(1, 45))] for _ in names], names


def answers(llm: LLM, model) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in llm.generate(*traffic(model), GREEDY)]


def followers_of(pid: int, module: str = "moe_lora.engine.ranks.follower") -> list[int]:
    """Processes of this module that this process started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_text()
            except (OSError, IndexError):
                continue
            if parent == pid and module in command:
                found.append(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie (nobody waits for a killed parent's children here)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def comes_true(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize(
    ("family", "size"),
    [
        *((family, 2) for family in (*MOE_FAMILIES, *BESIDE_FAMILIES)),
        *(
            pytest.param(*one.values, 2, marks=one.marks)
            for one in later("granitemoe", "phimoe", families=FURTHER_MOE + NEWER_MOE + EXPERTS_ALONE)
        ),
        pytest.param("mixtral", 4, marks=SLOW),
    ],
)
def test_tokens_are_those_of_one_process(family, size, served):  # noqa: F811
    model = served(family)
    tight = {**TIGHT, "kv_cache_gb": smallest_kv_gb(model)}
    with LLM(model.model_dir, **settings(model)) as llm:
        expected = answers(llm, model)
    with LLM(model.model_dir, **settings(model, expert_parallel=size, **tight)) as llm:
        assert answers(llm, model) == expected
        stats = llm.stats()
        assert stats.adapter_evictions > 0
        assert stats.num_preemptions > 0
        if family == "mixtral":
            assert_new_version_reaches_all_ranks(llm, model)
    assert comes_true(lambda: not followers_of(os.getpid()))


def assert_new_version_reaches_all_ranks(llm: LLM, model) -> None:
    """A name published anew answers as the adapter it now is, and an unloaded one leaves no file."""
    prompt, (first, *_, last) = [5, 6, 7], (path.name for path in model.adapters)
    before = llm.generate(prompt, [last], GREEDY)[0].token_ids
    assert before != llm.generate(prompt, [first], GREEDY)[0].token_ids
    llm.publish_adapter(first, str(model.adapters[-1]))
    assert llm.generate(prompt, [first], GREEDY)[0].token_ids == before
    for path in model.adapters:
        llm.unload_adapter(path.name)
    store = llm.client.core.transfers.followers.directory / HOST_STORE
    assert not list(store.iterdir())
    store.rmdir()
    store.touch()  # a folder that is only missing would be made again
    with pytest.raises(CapacityError, match="or TMPDIR name another place"):
        llm.publish_adapter("late", str(model.adapters[0]))
    assert llm.generate(prompt, None, GREEDY)[0].finish_reason == "length"


COMPILED = [
    pytest.param("mixtral", (4,), False, marks=SLOW),
    *(pytest.param(*cell, True, marks=SLOW) for cell in product(MOE_FAMILIES, (None, (4,)))),
]


@pytest.mark.parametrize(("family", "buckets", "generates"), COMPILED)
def test_compiled_ranks_give_the_tokens_of_one_eager_process(
    family,
    buckets,
    generates,
    served,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """generates: code from the captured graphs; else the graphs run."""
    model = served(family)
    with LLM(model.model_dir, **settings(model)) as llm:
        expected = answers(llm, model)
    compiled = settings(model, eager=False, expert_parallel=2, decode_buckets=buckets)
    if not generates:
        (tmp_path / "sitecustomize.py").write_text(CAPTURED)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with nullcontext() if generates else captured_graphs(), LLM(model.model_dir, **compiled) as llm:
        assert answers(llm, model) == expected


@contextmanager
def two_ranks(**changes) -> Iterator[LLM]:
    with LLM(str(MODEL), eager=True, num_threads=1, expert_parallel=2, **changes) as llm:
        yield llm


def test_follower_killed_between_requests_ends_its_engine_and_no_other():
    with two_ranks() as llm:
        directory = llm.client.core.transfers.followers.directory
        [follower] = followers_of(os.getpid())
        with two_ranks() as other:
            os.kill(follower, signal.SIGKILL)
            assert comes_true(lambda: not directory.exists())
            with pytest.raises(EngineDeadError, match="rank 1 of this instance was killed by SIGKILL"):
                llm.generate("ab=")
            assert other.generate("ab=", sampling=GREEDY)[0].finish_reason == "length"


def test_follower_killed_in_a_step_fails_the_requests():
    with two_ranks() as llm:
        [follower] = followers_of(os.getpid())
        stop(follower)
        killer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {follower}"])
        with pytest.raises(EngineDeadError, match="restart the instance"):
            llm.generate("ab=", sampling=SamplingParams(max_tokens=20))
        killer.wait()


def met_soon(build: Callable[[float], T]) -> T:
    """What `build` makes with the shortest of some rank_timeout_s in which this machine's ranks meet."""
    for limit_s in (2.0, 20.0, 100.0):
        with suppress(EngineDeadError):
            return build(limit_s)
    return build(PATIENCE_S)


@pytest.mark.parametrize("adapter", [None, "upper"])
def test_follower_that_hangs_ends_the_engine(adapter):
    """In a step, or while an adapter is brought in."""
    adapters = {"upper": str(MODEL.parent / "adapters" / "upper")}
    with ExitStack() as stack:
        llm = met_soon(
            lambda limit_s: stack.enter_context(two_ranks(adapters=adapters, rank_timeout_s=limit_s))
        )
        [follower] = followers_of(os.getpid())
        stop(follower)
        with pytest.raises(EngineDeadError, match="does not answer"):
            llm.generate("ab=", adapter, SamplingParams(max_tokens=4))
        assert comes_true(lambda: not is_running(follower))


def test_followers_end_with_a_killed_rank_0():
    config = EngineConfig(model_dir=str(MODEL), eager=True, num_threads=2, expert_parallel=2)
    with engine_processes(config):
        [pid] = followers_of(os.getpid(), INSTANCE)
        followers = followers_of(pid)
        assert len(followers) == 1
        os.kill(pid, signal.SIGKILL)
        assert comes_true(lambda: not any(map(is_running, followers)))


def test_failure_while_starting_leaves_no_follower(tmp_path):
    with pytest.raises(ConfigError, match="kv_cache_gb"), two_ranks(kv_cache_gb=1e-9):
        pass
    assert comes_true(lambda: not followers_of(os.getpid()))


def test_follower_that_can_not_be_set_up_is_not_waited_for_where_ranks_meet():
    ours, theirs = Pipe()
    problem = EngineDeadError("host-worker-0 did not start within 60 s; see the log")

    def follow() -> None:
        for _ in ("set up", "allocate"):
            theirs.recv_bytes()
            theirs.send_bytes(packed_message(Done()))
        theirs.send_bytes(packed_message(Done(problem)))

    threading.Thread(target=follow, daemon=True).start()
    config = EngineConfig(model_dir=str(MODEL), device="cpu", expert_parallel=2, arena_mb=64, eager=True)
    with pytest.raises(EngineDeadError, match="did not start"):
        build_engine(config, Followers([ours], OwnFolder()))


@pytest.mark.parametrize(
    ("size", "problem"), [(0, "expert_parallel=0 must be 1 or more"), (3, "does not divide num_experts=")]
)
def test_number_of_processes_that_cannot_be_is_refused(size, problem):
    with pytest.raises(ConfigError, match=problem):
        LLM(str(MODEL), expert_parallel=size)


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_dense_model_has_no_experts_to_share(family, served):  # noqa: F811
    with pytest.raises(ConfigError, match="needs a Mixture-of-Experts model"):
        LLM(served(family).model_dir, expert_parallel=2)


TORCHRUN_PROGRAM = f"""
import os

from moe_lora.config import EngineConfig
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.engine.ranks import follower as torchrun
from moe_lora.engine.build import build_engine

if os.environ["RANK"] == "0":
    config = EngineConfig(model_dir={str(MODEL)!r}, eager=True, num_threads=1, expert_parallel=2)
    core = build_engine(config, torchrun.gather_followers(config))
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    core.add_request(GenerateRequest(request_id="r", prompt_token_ids=(5, 6, 7), sampling=sampling))
    print("tokens", [core.step()[0].token_ids[0] for _ in range(3)], flush=True)
    core.close()
else:
    torchrun.follow_rank_0()
"""


def test_ranks_that_meet_as_torchrun_s_do_answer_alike(monkeypatch):
    """In the store of torchrun's agent."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    job |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    other = Child("-m", "tests.engine.ranks.torchrun_rank", environment={**job, "RANK": "1"})
    for name, value in {**job, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    config = EngineConfig(model_dir=str(MODEL), eager=True, num_threads=1)
    found = []
    for settings in ({}, {"expert_parallel": 2}):
        ranks = replace(config, **settings)
        core = build_engine(ranks, gather_followers(ranks) if settings else None)
        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        core.add_request(GenerateRequest(request_id="r", prompt_token_ids=(5, 6, 7), sampling=sampling))
        found.append([core.step()[0].token_ids[0] for _ in range(3)])
        core.close()
    assert found[0] == found[1]
    assert other.ended.result(PATIENCE_S) == 0


@SLOW
def test_ranks_started_by_torchrun_answer_alike(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TORCHRUN_PROGRAM)
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert launched.returncode == 0, launched.stderr
    with LLM(str(MODEL), eager=True, num_threads=1) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        [expected] = llm.generate([[5, 6, 7]], sampling=sampling)
    assert f"tokens {list(expected.token_ids)}" in launched.stdout
