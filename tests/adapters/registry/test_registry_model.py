# SPDX-License-Identifier: Apache-2.0
"""The registry against a dictionary, over random sequences of what can be done to it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moe_lora.adapters.peft.files import WEIGHTS_FILE
from moe_lora.adapters.registry.registry import Registry
from moe_lora.core.errors import AdapterError, AdapterExistsError, AdapterNotFoundError
from tests.adapters.peft_folders import BASE, OTHER_BASE, alter, peft_folder

NUM_CONTENTS = 3
names = st.sampled_from(["x", "y", "z with spaces / and more"])
contents = st.integers(0, NUM_CONTENTS - 1)
bases = st.sampled_from([BASE, BASE, OTHER_BASE])
versions = st.none() | st.integers(1, 4)


class RegistryMachine(RuleBasedStateMachine):
    """model: name → its versions as [content, base, removed].  damaged: contents whose files are not whole.
    noticed: those of them that the registry was made to read."""

    @initialize()
    def start(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.sources = [peft_folder(self.root / f"source-{one}", one) for one in range(NUM_CONTENTS)]
        self.registry = Registry(self.root / "registry", create=True)
        self.model: dict[str, list[list]] = {}
        self.damaged: set[int] = set()
        self.noticed: set[int] = set()
        self.hashes: dict[int, str] = {}

    def teardown(self) -> None:
        self.registry.close()
        shutil.rmtree(self.root)

    def live(self, name: str) -> list[tuple[int, list]]:
        return [(i + 1, one) for i, one in enumerate(self.model.get(name, [])) if not one[2]]

    def contents_in_use(self) -> set[int]:
        return {one[0] for versions in self.model.values() for one in versions if not one[2]}

    @rule(name=names, content=contents, base=bases, link=st.booleans())
    def add(self, name: str, content: int, base: str, link: bool) -> None:
        current = self.live(name)[-1:]
        if current and current[0][1][1] != base:
            with pytest.raises(AdapterExistsError):
                self.registry.add(name, self.sources[content], base_hash=base, link=link)
            return
        added = self.registry.add(name, self.sources[content], base_hash=base, link=link)
        if not current or current[0][1][0] != content:
            self.model.setdefault(name, []).append([content, base, False])
        assert added.version == self.live(name)[-1][0]
        self.hashes[content] = added.content_hash
        self.damaged.discard(content)
        self.noticed.discard(content)

    @rule(name=names, version=versions)
    def remove(self, name: str, version: int | None) -> None:
        gone = [(number, one) for number, one in self.live(name) if version in (None, number)]
        if not gone:
            with pytest.raises(AdapterNotFoundError):
                self.registry.remove(name, version)
            return
        assert [one.version for one in self.registry.remove(name, version)] == [number for number, _ in gone]
        for _, one in gone:
            one[2] = True
        self.damaged &= self.contents_in_use()
        self.noticed &= self.damaged

    @rule(content=contents, lost=st.booleans())
    def damage(self, content: int, lost: bool) -> None:
        if content not in self.contents_in_use() or content in self.damaged:
            return
        path = self.registry.folder / "store" / self.hashes[content] / WEIGHTS_FILE
        if lost or path.is_symlink():
            path.unlink()
        else:
            alter(path)
        self.damaged.add(content)

    @rule(name=names, base=bases)
    def resolve(self, name: str, base: str) -> None:
        if not self.live(name):
            with pytest.raises(AdapterNotFoundError):
                self.registry.resolve(name, base)
            return
        number, (content, its_base, _) = self.live(name)[-1]
        if its_base == base and content not in self.damaged:
            assert self.registry.resolve(name, base).version == number
            return
        with pytest.raises(AdapterError, match="base model" if its_base != base else "lost|altered"):
            self.registry.resolve(name, base)
        if its_base == base:
            self.noticed.add(content)

    @rule()
    def check(self) -> None:
        found = {(one.name, one.version): problem is not None for one, problem in self.registry.check()}
        expected = {
            (name, number): one[0] in self.damaged for name in self.model for number, one in self.live(name)
        }
        assert found == expected
        self.noticed = set(self.damaged)

    @rule()
    def reopen(self) -> None:
        self.registry.close()
        self.registry = Registry(self.root / "registry")

    @invariant()
    def table_and_store_are_those_of_the_model(self) -> None:
        states = {
            name: [
                "removed" if gone else "broken" if content in self.noticed else "ready"
                for content, _, gone in versions
            ]
            for name, versions in self.model.items()
        }
        assert {name: [one.state for one in self.registry.versions(name)] for name in self.model} == states
        current = {name: self.live(name)[-1][0] for name in sorted(self.model) if self.live(name)}
        assert {one.name: one.version for one in self.registry.adapters()} == current
        in_store = {place.name for place in (self.registry.folder / "store").iterdir()} - {".lock"}
        assert in_store == {self.hashes[content] for content in self.contents_in_use()}


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
