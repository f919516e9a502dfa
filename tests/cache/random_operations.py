# SPDX-License-Identifier: Apache-2.0
"""A cache under random use, with the bytes that a device and a host would hold per page."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from moe_lora.cache.orders import Copy, LoadAdapter, Order, Readiness
from moe_lora.cache.pages import BlockTable
from moe_lora.cache.unified import UnifiedCache
from moe_lora.policies.caching.caching import make_caching_policy
from moe_lora.timing.host_times import CacheCosts

from .consistency import check

BLOCK = 2
COSTS = CacheCosts(page_bytes=1 << 20, prefill_tokens_per_s=100.0)
LAYERS = ((1, 2), (2, 1), (3, 0), (0, 0))
"""Pages per layer of the adapters in use."""


class RandomCache:
    """Does one operation at a time, each drawn by `random`.

    device, host: page -> what was written there last; a KV page holds (namespace, all tokens up to its end),
    an adapter's (namespace, index among its pages).
    """

    def __init__(
        self, policy: str, random: Random, *, device_pages: int = 16, host_pages: int = 10, **settings: Any
    ) -> None:
        self.random = random
        self.cache = UnifiedCache(
            num_device_pages=device_pages,
            num_host_pages=host_pages,
            block_size=BLOCK,
            policy=make_caching_policy(policy, COSTS),
            max_adapters=3,
            **settings,
        )
        self.now_s = 0.0
        self.device: dict[int, object] = {}
        self.host: dict[int, object] = {}
        self.orders: list[Order] = []
        self.requests: list[tuple[BlockTable, list[int], object]] = []
        self.waiting: list[object] = []
        self.holds: Counter[object] = Counter()
        self.layers: dict[object, tuple[int, ...]] = {}
        self.num_versions = 0
        self.forgotten: set[object] = set()

    def check(self) -> None:
        check(self.cache, [table for table, _, _ in self.requests], self.holds)

    def known(self) -> list[object]:
        return [namespace for namespace in self.layers if namespace not in self.forgotten]

    def add(self) -> None:
        if len(self.known()) < 5:
            replaced = self.random.choice([None, *self.known()])
            self.num_versions += 1
            self.layers[self.num_versions] = self.random.choice(LAYERS)
            layers = self.layers[self.num_versions]
            self.cache.add_adapter(self.num_versions, layers, self.now_s, inherits=replaced)

    def forget(self) -> None:
        if self.known():
            namespace = self.random.choice(self.known())
            self.forgotten.add(namespace)
            self.cache.forget(namespace)

    def hold(self) -> None:
        namespace = self.random.choice([None, *self.known()])
        found = self.cache.hold(namespace, self.now_s, again=self.random.random() < 0.2)
        if found is not Readiness.NO_ROOM:
            self.holds[namespace] += 1
            self.waiting.append(namespace)

    def start(self) -> None:
        """A request whose adapter is held or on its way finds what there is of its prompt."""
        if not self.waiting:
            return
        namespace = self.waiting.pop(self.random.randrange(len(self.waiting)))
        if self.cache.readiness(namespace) is Readiness.NO_ROOM:  # its load failed
            self._let_go(namespace)
            return
        tokens = [self.random.randrange(2) for _ in range(self.random.randrange(1, 14))]
        table = self.cache.match(namespace, tokens, self.now_s)
        self.requests.append((table, tokens, namespace))

    def compute(self) -> None:
        """A request computes its prompt and a few tokens more, if all it needs is there."""
        if not self.requests:
            return
        table, tokens, namespace = self.random.choice(self.requests)
        if table.lost or self.cache.readiness(namespace) is Readiness.NO_ROOM:
            self._end(table, tokens, namespace)
            return
        if not table.ready or self.cache.readiness(namespace) is not Readiness.READY:
            return
        self._verify(table, tokens, namespace)
        tokens += [self.random.randrange(2) for _ in range(self.random.randrange(4))]
        if not self.cache.grow(table, len(tokens), self.now_s):
            self._end(table, tokens, namespace)
            return
        for index in range(table.num_shared, len(table.pages)):
            self.device[table.pages[index]] = (namespace, tuple(tokens[: (index + 1) * BLOCK]))
        self.cache.publish(table, tokens, len(tokens), self.now_s)
        self._verify(table, tokens, namespace)

    def end(self) -> None:
        if self.requests:
            self._end(*self.random.choice(self.requests))

    def tick(self) -> None:
        self.now_s += 0.1
        prompts = [[self.random.randrange(2) for _ in range(8)] for _ in range(2)]
        self.cache.look_ahead((self.random.choice([None, *self.known()]), prompt, "") for prompt in prompts)
        self.cache.tick(self.now_s, len(self.requests))

    def execute(self) -> None:
        """Orders are done in any order, some of them never."""
        self.orders += self.cache.take_orders()
        if self.orders:
            order = self.orders.pop(self.random.randrange(len(self.orders)))
            if self.random.random() < 0.05:
                self.cache.failed(order.copy_id)
                return
            self._perform(order)
            self.cache.copied(order.copy_id)

    def wait(self) -> None:
        self.now_s += self.random.choice([0.01, 1.0, 100.0])

    def step(self) -> None:
        """Any one of the above."""
        names = ("add", "forget", "hold", "start", "compute", "end", "tick", "execute", "wait")
        weights = (3, 1, 8, 12, 16, 6, 4, 12, 3)
        (name,) = self.random.choices(names, weights)
        getattr(self, name)()

    def finish(self) -> None:
        """End everything and forget it: all pages must be free again."""
        for request in list(self.requests):
            self._end(*request)
        for namespace in self.waiting:
            self._let_go(namespace)
        for namespace in self.known():
            self.cache.forget(namespace)
        self.orders += self.cache.take_orders()
        for order in self.orders:
            self.cache.copied(order.copy_id)
        self.requests, self.waiting, self.orders = [], [], []
        while self.cache._mover.sweep():
            self.check()
        base_kv = sum(n.num_pages for n in self.cache._tree.columns.nodes if n and n.device_pages)
        usage = self.cache.usage()
        self.check()
        assert set(self.cache._tree.adapters) == {None}
        assert usage["device_adapters"] == usage["host_adapters"] == 0
        assert usage["device_kv"] == base_kv

    def _perform(self, order: Order) -> None:
        if isinstance(order, LoadAdapter):
            index = 0
            for first, length in zip(order.layer_first_pages, self.layers[order.namespace], strict=True):
                for page in range(first, first + length):
                    self.device[page] = (order.namespace, index)
                    index += 1
        elif order.to_device:
            for target, source in zip(order.device_pages, order.host_pages, strict=True):
                self.device[target] = self.host[source]
        else:
            for source, target in zip(order.device_pages, order.host_pages, strict=True):
                self.host[target] = self.device[source]
        assert not isinstance(order, Copy) or len(order.device_pages) == len(order.host_pages) > 0

    def _verify(self, table: BlockTable, tokens: list[int], namespace: object) -> None:
        """What the request would read is what it expects."""
        for index in range(table.num_shared):
            assert self.device[table.pages[index]] == (namespace, tuple(tokens[: (index + 1) * BLOCK]))
        if sum(self.layers.get(namespace, ())):
            index = 0
            firsts = self.cache.layer_first_pages(namespace)
            for first, length in zip(firsts, self.layers[namespace], strict=True):
                for page in range(first, first + length):
                    assert self.device[page] == (namespace, index)
                    index += 1

    def _end(self, table: BlockTable, tokens: list[int], namespace: object) -> None:
        self.requests.remove((table, tokens, namespace))
        self.cache.release(table, self.now_s)
        self._let_go(namespace)

    def _let_go(self, namespace: object) -> None:
        self.holds[namespace] -= 1
        self.cache.let_go(namespace, self.now_s)
