# SPDX-License-Identifier: Apache-2.0
"""Names found at their first request: one search a name, missing names remembered, idle adapters unloaded."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from moe_lora.config.optional_parts import SourcesConfig
from moe_lora.core.errors import AdapterError, AdapterNotFoundError, PeerUnreachableError
from moe_lora.dist.cluster.resolving import MAX_LOADS, MissingNames, Resolver, find_folder, finder, is_below
from tests.adapters.peft_folders import peft_folder
from tests.loopback_hub import reached_hub

from .fleet_parts import cluster_config


class Found:
    """Finds every name but `error`'s; a search ends once `go` is set.  refused: errors of loads by name."""

    def __init__(
        self, errors: dict[str, Exception] | None = None, refused: dict[str, Exception] | None = None
    ) -> None:
        self.errors, self.refused = errors or {}, refused or {}
        self.searches: list[str] = []
        self.loads: list[tuple[str, str]] = []
        self.running = self.most = 0
        self.go = asyncio.Event()

    async def find(self, name: str) -> str:
        self.searches.append(name)
        self.running += 1
        self.most = max(self.most, self.running)
        await self.go.wait()
        self.running -= 1
        if name in self.errors:
            raise self.errors[name]
        return f"/{name}"

    async def load(self, name: str, folder: str) -> None:
        self.loads.append((name, folder))
        if name in self.refused:
            raise self.refused[name]

    def resolver(self, kept_s: float = 60.0) -> Resolver:
        return Resolver(self.find, self.load, MissingNames(kept_s))


def test_callers_of_one_name_share_a_load() -> None:
    async def run() -> None:
        found = Found()
        resolver = found.resolver()
        callers = [asyncio.create_task(resolver.load("a")) for _ in range(50)]
        await asyncio.sleep(0)
        callers[0].cancel()
        found.go.set()
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert [type(one) for one in results] == [asyncio.CancelledError, *[type(None)] * 49]
        assert found.searches == ["a"]
        assert found.loads == [("a", "/a")]
        assert not resolver.running

    asyncio.run(run())


def test_few_names_are_searched_at_once() -> None:
    async def run() -> None:
        found = Found()
        resolver = found.resolver()
        callers = [asyncio.create_task(resolver.load(f"a{number}")) for number in range(40)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert found.running == MAX_LOADS
        found.go.set()
        await asyncio.gather(*callers)
        assert found.most == MAX_LOADS
        assert len(found.loads) == 40

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "searches"),
    [
        (AdapterNotFoundError("gone"), 1),
        (AdapterError("rank 512"), 1),
        (PeerUnreachableError("away"), 2),
    ],
)
def test_a_lasting_error_is_remembered(error: Exception, searches: int) -> None:
    async def run() -> None:
        found = Found(refused={"a": error})
        found.go.set()
        resolver = found.resolver()
        for _ in range(2):
            with pytest.raises(type(error), match=str(error)):
                await resolver.load("a")
        assert len(found.searches) == searches

    asyncio.run(run())


@pytest.mark.parametrize("at_load", [False, True])
def test_an_unreadable_file_is_an_error_of_the_adapter(at_load: bool) -> None:
    async def run() -> None:
        errors: dict[str, Exception] = {"a": OSError(errno.EIO, os.strerror(errno.EIO), "/a/config")}
        found = Found(refused=errors) if at_load else Found(errors)
        found.go.set()
        resolver = found.resolver()
        for _ in range(2):
            with pytest.raises(AdapterError, match=r"adapter 'a' can't be read \(Input/output error\)"):
                await resolver.load("a")
        assert len(found.searches) == 1

    asyncio.run(run())


def test_a_refused_search_tells_callers_only_that_nothing_is_found(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        found = Found({"a": AdapterError("sources.allow has hf://acme/*")})
        found.go.set()
        resolver = found.resolver()
        for _ in range(2):
            with pytest.raises(AdapterNotFoundError, match=r"^no adapter 'a' is found$"):
                await resolver.load("a")

    asyncio.run(run())
    assert [one.message for one in caplog.records] == [
        "adapter a is not found: sources.allow has hf://acme/*"
    ]


def test_a_remembered_error_expires() -> None:
    async def run() -> None:
        found = Found({"a": AdapterNotFoundError("gone")})
        found.go.set()
        resolver = found.resolver(kept_s=0.0)
        with pytest.raises(AdapterNotFoundError):
            await resolver.load("a")
        del found.errors["a"]
        await resolver.load("a")
        assert found.loads == [("a", "/a")]

    asyncio.run(run())


def test_remembered_errors_are_bounded() -> None:
    missing = MissingNames(60.0, most=3)
    for name in "abcd":
        missing.add(name, AdapterNotFoundError(name))
    assert len(missing) == 3
    missing.check("a")
    with pytest.raises(AdapterNotFoundError, match="d"):
        missing.check("d")


@pytest.mark.parametrize(("name", "cause"), [("nobody", "set HF_TOKEN"), ("secret", "sources.allow has")])
def test_a_name_that_the_hub_refuses_is_not_found(
    name: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = SourcesConfig(resolver="hf:acme", allow=("hf://acme/[!s]*",), folder=str(tmp_path / "cache"))
    cluster = replace(cluster_config(), sources=config)

    async def run() -> None:
        found = Found()
        resolver = Resolver(finder(cluster, found.find), found.load, MissingNames(60.0))
        await resolver.load("good")
        assert [one for one, _ in found.loads] == ["good"]
        with pytest.raises(AdapterNotFoundError, match=f"^no adapter '{name}' is found$"):
            await resolver.load(name)

    with reached_hub(monkeypatch) as hub:
        for one in ("good", "secret"):
            hub.folders[f"acme/{one}"] = peft_folder(tmp_path / one, 1)
        asyncio.run(run())
    assert cause in caplog.text


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/etc", "a/", "a//b", "../a", "a/../b", "a/./b", ".hidden", "a\0b", "a,b", "a" * 2000],
)
def test_names_stay_below_the_folder(name: str, tmp_path: Path) -> None:
    assert not is_below(name)
    with pytest.raises(AdapterNotFoundError):
        find_folder(name, str(tmp_path), None)


def test_a_folder_below_is_found_and_links_stay_in_the_root(tmp_path: Path) -> None:
    folder = tmp_path / "names"
    (folder / "team").mkdir(parents=True)
    peft_folder(folder / "team" / "a", 1)
    peft_folder(tmp_path / "outside", 1)
    os.symlink(tmp_path / "outside", folder / "b")
    assert find_folder("team/a", str(folder), str(folder)) == str(folder / "team" / "a")
    assert find_folder("b", str(folder), None) == str(folder / "b")
    for name in ("b", "team", "c"):
        with pytest.raises(AdapterNotFoundError):
            find_folder(name, str(folder), str(folder))
