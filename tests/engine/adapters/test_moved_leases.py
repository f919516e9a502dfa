# SPDX-License-Identifier: Apache-2.0
"""An instance moves from one LoRA Server to another of another layout, in the middle of answers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import read_config
from moe_lora.engine.core import EngineCore
from moe_lora.engine.verbs import EngineVerbs
from moe_lora.families import shape_of
from tests.dist.lora_server.cluster import Cluster, until
from tests.engine.test_switching import MODEL, ask, drive, engine, tokens_of
from tests.models.generated_code import captured_graphs

NUM = 60


@contextmanager
def servers(*layouts: str, num_ranks: int = 1, **settings) -> Iterator[list[Cluster]]:
    """Running servers of one store, each for instances of num_ranks."""
    shape = shape_of(read_config(MODEL))
    first = Cluster(shape, layouts[0], **settings)
    found = [
        first,
        *(Cluster(shape, one, store_dir=first.config.store_dir, **settings) for one in layouts[1:]),
    ]
    for one in found:
        one.client_ranks = num_ranks
    with first, found[1]:
        yield found


class Driven:
    """An engine with requests under way.  outputs: by request."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.outputs = core, defaultdict(list)

    def step(self) -> None:
        for output in self.core.step():
            self.outputs[output.request_id] += output.token_ids

    def step_until(self, condition) -> None:
        until(lambda: self.step() or condition())

    def move(self, cluster: Cluster, change: Callable[[], None] = lambda: None) -> None:
        """By the verb; steps go on while the verb waits.  change: called before the move itself."""
        with ThreadPoolExecutor(1) as files:
            leases, server = self.core.adapters.leases, cluster.config
            steps = leases.move(self.core, files, server.address, server.layout)
            try:
                waited = next(steps)
                while True:
                    self.step_until(waited.done)
                    change()
                    waited = steps.send(waited)
            except StopIteration:
                return

    def end(self) -> dict[str, list[int]]:
        while self.core.has_work:
            self.step()
            time.sleep(1e-4)
        return dict(self.outputs)


def requests():
    policy, second = ask("a", max_tokens=NUM), ask("b", adapter="second", max_tokens=NUM)
    return policy, second, ask("c", adapter="second", max_tokens=NUM, prompt_token_ids=(1, *range(50, 70)))


def expected() -> dict[str, list[int]]:
    with engine() as core:
        return {name: tokens_of(outputs) for name, outputs in drive(core, *requests()).items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"expert_parallel": 2}, marks=pytest.mark.slow),
        pytest.param({"eager": False}, marks=pytest.mark.slow),
    ],
)
def test_answers_go_on_with_the_same_tokens_and_no_row_is_computed_by_the_instance(settings):
    num_ranks = settings.get("expert_parallel", 1)
    with (
        captured_graphs(),
        servers("EP2-PP1", "EP4-PP1", num_ranks=num_ranks) as (former, following),
        engine(lora_server=former.config, **settings) as core,
    ):
        driven = Driven(core)
        for one in requests():
            core.add_request(one)
        driven.step_until(lambda: len(driven.outputs) == 3)
        for there, here in ((following, former), (former, following)):
            before = [there.rank(number).loop.num_requests for number in range(there.num_ranks)]
            driven.move(there)
            gone = [here.rank(number).loop.num_requests for number in range(here.num_ranks)]
            driven.step_until(
                lambda there=there, before=before: all(
                    there.rank(number).loop.num_requests > count for number, count in enumerate(before)
                )
            )
            assert core.has_work
            assert gone == [here.rank(number).loop.num_requests for number in range(here.num_ranks)]
        assert driven.end() == expected()
        assert core.stats().lora_server_fallback_rows == 0
        driven.move(former)  # is there already
        core.add_request(ask("again"))
        assert driven.end()["again"] == driven.outputs["a"][: len(driven.outputs["again"])]


def test_adapters_that_change_meanwhile_are_those_of_the_next_server():
    with (
        servers("EP1-PP1", "EP2-PP1") as (former, following),
        engine(lora_server=former.config) as core,
    ):
        driven = Driven(core)

        def change() -> None:
            core.adapters.remove("second")
            path = dict(core.rank.config.adapters)["policy"]
            core.add_adapter(core.read_adapter("third", path), path)

        driven.move(following, change)
        core.add_request(ask("a"))
        core.add_request(ask("t", adapter="third"))
        found = driven.end()
        assert found["a"] == found["t"]
        assert core.stats().lora_server_fallback_rows == 0


def test_an_engine_without_a_lora_server_refuses():
    with engine() as core, pytest.raises(ConfigError, match="no LoRA Server to move from"):
        next(EngineVerbs(core, None, None, None).join_lora_server("/nowhere", "EP1-PP1"))
