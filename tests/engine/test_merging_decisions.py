# SPDX-License-Identifier: Apache-2.0
"""The engine and the simulator, given the same requests and policy, decide alike step by step."""

from __future__ import annotations

from collections import Counter

import pytest

from moe_lora import SamplingParams
from moe_lora.config import EngineConfig
from moe_lora.config.optional_parts import DLoraConfig
from moe_lora.core.request import GenerateRequest
from moe_lora.engine import build
from moe_lora.engine.merging import merging
from moe_lora.policies.caching.caching import make_caching_policy
from moe_lora.policies.merging.merging import CheapestMode, DLora, MergedOnly
from moe_lora.policies.merging.merging_costs import MergingCosts
from moe_lora.sim.adapters import SimMerging
from moe_lora.sim.instance import CachedConfig, CachedInstance
from moe_lora.sim.requests import CachedRequest
from moe_lora.timing.step_model import StepModel, TransformerTime
from moe_lora.workload.replay_plan import TurnRequest
from tests.grids import with_quick
from tests.models.conftest import served  # noqa: F401  (the fixture)

ANSWERS = (12, 20, 8, 16, 16, 8, 20, 12, 16, 24)
ADAPTERS = (0, 0, 1, 0, 0, None, 0, 1, 2, 0)
PROMPT = 5


class Untaught(MergingCosts):
    """Costs of the model alone: what the machine takes differs between the two."""

    def took(self, *measured) -> None:
        """Nothing is learnt."""

    def swap_took(self, *measured) -> None:
        """Nor here."""


def costs() -> MergingCosts:
    model = StepModel(
        kernel="sgmv",
        form="full",
        expert_share=1.0,
        decode_s={"step": 0.01, "ranks": 1e-4},
        prefill_s={"step": 0.0},
    )
    return Untaught(model, lambda uid: 8, lambda before, after: 0.005)


POLICIES = {
    "merged": MergedOnly,
    "dlora": lambda: DLora(
        costs(), DLoraConfig(alpha_switch=0.5, beta_switch=0.3, credit=2, t_starve=2, t_normal=1)
    ),
    "auto": lambda: CheapestMode(costs(), max_wait_s=0.0),
}


class Noted:
    """A policy, and what it decided beside the rows that then computed, by the names of adapters."""

    def __init__(self, policy, name_of) -> None:
        self.steps: list[tuple] = []
        self._policy = policy
        self._name_of = name_of

    def decide(self, view):
        batching = self._policy.decide(view)
        names = None if batching.only is None else frozenset(map(self._name_of, batching.only))
        queue = Counter(self._name_of(request.adapter_uid) for request in view.requests)
        self._decided = (self._name_of(batching.merge), names, tuple(sorted(queue.items(), key=str)))
        return batching

    def took(self, batching, mode, num_rows, seconds, swap_s=0.0):
        self._policy.took(batching, mode, num_rows, seconds, swap_s)
        self.steps.append((*self._decided, mode, num_rows))

    def forget(self, uid):
        self._policy.forget(uid)


def by_engine(model, policy, monkeypatch) -> list[tuple]:
    adapters = {f"a{number}": str(model.adapters[number]) for number in range(3)}
    noted: list[Noted] = []

    def make(*_):
        def name_of(uid):
            return None if uid is None else core[0].adapters.versions[uid].name

        noted.append(Noted(policy, name_of))
        return noted[0]

    monkeypatch.setattr(merging, "make_merging_policy", make)
    core = []
    core.append(
        build.build_engine(
            EngineConfig(
                model_dir=str(model.model_dir),
                adapters=tuple(adapters.items()),
                dtype="float32",
                device="cpu",
                batching="merged",
                max_num_seqs=4,
                merge_mb_per_step=1e6,
                eager=True,
                prefix_caching=False,
            )
        )
    )
    engine = core[0]
    for name in adapters:
        engine.adapters.pin(engine.adapters.current(name))
        engine.transfers.send()
    while len(engine.stats().resident_adapters) < len(adapters):
        engine.tend()
    for index, (adapter, num_tokens) in enumerate(zip(ADAPTERS, ANSWERS, strict=True)):
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        prompt = tuple(range(10 * index + 1, 10 * index + 1 + PROMPT))
        name = None if adapter is None else f"a{adapter}"
        engine.add_request(
            GenerateRequest(request_id=str(index), prompt_token_ids=prompt, adapter=name, sampling=sampling),
            arrival_s=float(index),
        )
    while engine.has_work:
        engine.step()
    engine.close()
    return noted[0].steps


def by_simulator(decides) -> list[tuple]:
    noted = Noted(decides, lambda uid: uid)
    time = TransformerTime(
        num_params=1e6,
        num_layers=1,
        hidden_size=0,
        kv_token_bytes=1,
        flops_per_s=1e12,
        bytes_per_s=2e8,
    )
    config = CachedConfig(
        time=time,
        adapter_pages={f"a{number}": 1 for number in range(3)},
        num_device_pages=400,
        num_host_pages=1,
        link_bytes_per_s=1e15,
        block_size=16,
        max_num_seqs=4,
        merging=SimMerging(policy=lambda: noted, merge_s=0.0, swap_steps=1),
    )
    policy = make_caching_policy("lru", config.costs())
    instance = CachedInstance(config, policy, is_over=lambda: len(instance.done) == len(ADAPTERS))
    for name in config.adapter_pages:
        instance.cache.hold(name, 0.0)
        instance.cache.let_go(name, 0.0)
    instance.links.submit(instance.cache.take_orders(), urgent=True)

    def come() -> None:
        """All are there before the first step."""
        for index, (adapter, num_tokens) in enumerate(zip(ADAPTERS, ANSWERS, strict=True)):
            name = None if adapter is None else f"a{adapter}"
            prompt = tuple(range(100 * index, 100 * index + PROMPT))
            planned = TurnRequest(index, float(index), name, prompt, (7,) * num_tokens)
            instance.scheduler.add(CachedRequest(planned))
            instance.load.add(name, PROMPT)
        instance._step()

    instance.events.at(20.0, come)
    instance.events.run()
    return noted.steps


@pytest.mark.parametrize("name", with_quick(POLICIES, ("dlora", "auto")))
def test_both_decide_alike(name, served, monkeypatch):  # noqa: F811
    engine = by_engine(served("mixtral"), POLICIES[name](), monkeypatch)
    simulator = by_simulator(POLICIES[name]())
    assert engine == simulator
    modes = {step[3] for step in engine}
    assert modes >= {"merged"} | ({"mixed"} if name == "auto" else {"unmerged"})
