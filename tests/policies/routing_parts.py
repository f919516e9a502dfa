# SPDX-License-Identifier: Apache-2.0
"""Instances and requests for tests of routers."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_lora.policies.routing.routing import InstanceLoad


@dataclass
class Instance:
    index: int
    outstanding_tokens: int = 0
    load: InstanceLoad = field(default_factory=InstanceLoad)

    def give(self, *adapters: str | None, prompt_tokens: int = 1) -> Instance:
        for adapter in adapters:
            self.load.add(adapter, prompt_tokens)
        return self

    def run(self, *adapters: str | None) -> Instance:
        for adapter in adapters:
            self.load.add(adapter, 1)
            self.load.start(adapter, 1)
        return self


@dataclass
class Request:
    adapter: str | None = None
    prompt_tokens: int = 1


BASE = Request()
