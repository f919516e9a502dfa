# SPDX-License-Identifier: Apache-2.0
"""A second tenant, or the first move, comes while 16 requests stream: their tokens stay the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moe_lora.config import EngineConfig
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.engine.build import build_engine
from moe_lora.engine.core import EngineCore

DEMO = Path(__file__).parents[2] / "demo"
NAMES = ("upper", "reverse", "rot13")
CONFIG = EngineConfig(
    model_dir=str(DEMO / "model"),
    adapters=tuple((name, str(DEMO / "adapters" / name)) for name in NAMES),
    dtype="float32",
    eager=True,
    max_num_seqs=17,
    num_threads=1,
    arena_mb=24,
)
LENGTH = 24
Arrival = Callable[[EngineCore], None]


def request(name: str, number: int, tenant: str = "one", **fields) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.0, min_tokens=number % 3)
    prompt = tuple(range(20 + number, 40 + 2 * number))
    adapter = (None, *NAMES)[number % 4]
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=sampling,
        adapter=adapter,
        tenant=tenant,
        **fields,
    )


def streams(core: EngineCore, arrival: Arrival | None = None, at_step: int = 8) -> dict[str, list[int]]:
    """The tokens of 16 requests; `arrival` is called between two steps."""
    for number in range(16):
        core.add_request(request(f"r{number}", number))
    tokens: dict[str, list[int]] = {}
    num_steps = 0
    while any(f"r{number}" in core._sequences for number in range(16)) or "two2" in core._sequences:
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        num_steps += 1
        if num_steps == at_step and arrival is not None:
            for output in core.catch_up():
                tokens[output.request_id] += output.token_ids
            arrival(core)
    return {f"r{number}": tokens[f"r{number}"] for number in range(16)}


@pytest.fixture(params=[pytest.param("off", marks=pytest.mark.slow), "on"])
def core(request):
    made = build_engine(replace(CONFIG, async_scheduling=request.param))
    yield made
    made.close()


def add_tenant(core: EngineCore) -> None:
    assert core._scheduler.tenants is None
    for number in range(3):
        core.add_request(request(f"two{number}", number, "two"))
    assert core._scheduler.tenants is not None


def test_second_tenant_changes_no_tokens(core):
    alone = streams(core)
    assert all(len(tokens) == LENGTH for tokens in alone.values())
    assert streams(core, add_tenant) == alone
    assert core._scheduler.num_preemptions, "the batch was full"


def hold_and_resume(core: EngineCore) -> None:
    assert core._moves is None
    held = [core.moves.hold(f"r{number}", 0) for number in (3, 7)]
    assert all(held)
    core.moves.resume("r3", (), 0, 0, False)
    core.moves.resume("r7", (), 0, 0, False)


def test_first_hold_changes_no_tokens(core):
    alone = streams(core)
    assert core._moves is None
    assert streams(core, hold_and_resume) == alone


def test_first_request_that_comes_held_is_announced_and_changes_no_tokens(core):
    alone = streams(core)

    def come(core: EngineCore) -> None:
        core.add_request(request("coming", 15, held=True, generated=tuple(alone["r15"][:4])))

    assert streams(core, come, at_step=2) == alone
    assert core._sequences["coming"].num_computed > 20, "it was announced when it had computed its tokens"
    core.moves.resume("coming", alone["r15"][4:6], 0, 0, False)
    rest: list[int] = []
    while core.has_work:
        rest += [token for output in core.step() for token in output.token_ids]
    assert rest == alone["r15"][6:]


def test_first_move_that_can_not_begin_leaves_no_request(core):
    def no_memory(*parts):
        raise MemoryError("no window for KV")

    core.attach_moves(no_memory)
    with pytest.raises(MemoryError):
        core.add_request(request("coming", 15, held=True))
    assert not core.has_work


@pytest.mark.slow
def test_parts_that_are_off_are_not_imported():
    code = """
import sys
from tests.engine.test_arrivals import CONFIG, add_tenant, build_engine, hold_and_resume, streams
core = build_engine(CONFIG)
moves = {"moe_lora.engine.moving"}
tenants = {"moe_lora.policies.admission.fairness", "moe_lora.policies.caching.arena_shares"}
off = ("merging", "lora_server", "leases", "host_workers", "pool_store", "dist.deltas", "prompt_kv")
streams(core)
assert not (moves | tenants) & sys.modules.keys(), (moves | tenants) & sys.modules.keys()
found = [name for name in sys.modules for part in off if name.startswith("moe_lora.") and part in name]
assert not found, found
streams(core, add_tenant)
assert tenants <= sys.modules.keys() and not moves & sys.modules.keys()
streams(core, hold_and_resume)
assert moves <= sys.modules.keys() and "moe_lora.engine.prompt_kv" not in sys.modules
core.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
