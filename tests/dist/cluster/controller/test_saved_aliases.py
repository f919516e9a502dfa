# SPDX-License-Identifier: Apache-2.0
"""Aliases of an earlier server, from its registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_lora.adapters.registry.registry import Registry
from moe_lora.core.errors import AdapterNotFoundError
from moe_lora.dist.cluster.controller.saved_aliases import SavedAliases, save
from moe_lora.dist.cluster.controller.served_registry import ServedRegistry
from moe_lora.engine.client.messages import Alias

ROLLOUT = Alias("support@v1", "support@v2", 0.25, "rollout", number=7)
BASE = "0" * 64
DEMO = Path(__file__).parents[4] / "demo/adapters"


def folder_of(name: str, version: int) -> str:
    if version > 2:
        raise AdapterNotFoundError(f"{name!r} has no version {version} in the registry")
    return f"/store/{name}-{version}"


def loaded(folder: Path, **aliases: Alias) -> SavedAliases:
    """What a server with the adapter `plain` reads after these steps."""
    with Registry(folder, create=True) as registry:
        for name, alias in aliases.items():
            save(ServedRegistry(registry, BASE), name, alias, {})
    found = SavedAliases({"plain": "/plain"}, ("base",), folder_of)
    with Registry(folder) as registry:
        found.load(registry.aliases(BASE))
    return found


def test_an_alias_comes_back_with_its_share_and_the_versions_to_load(tmp_path):
    found = loaded(tmp_path, support=ROLLOUT, other=Alias("plain"), both=Alias("plain", "support@v2"))
    assert found.adapters == {"support@v1": "/store/support-1", "support@v2": "/store/support-2"}
    assert found.aliases["support"].share == 0.25
    assert found.aliases["support"].number == 6
    loads = {name: set(alias.loaded) for name, alias in found.aliases.items()}
    assert loads == {"support": {"support@v1"}, "other": set(), "both": {"support@v2"}}, "each load once"


def test_pins_and_loads_of_the_earlier_server_are_forgotten(tmp_path):
    found = loaded(tmp_path, other=Alias("plain", loaded=("plain",), pinned=("plain",), number=7))
    assert found.aliases["other"] == Alias("plain", number=6)


@pytest.mark.parametrize("current", [True, False])
def test_a_plain_name_means_its_version_after_the_next_is_added(tmp_path, current):
    with Registry(tmp_path, create=True) as registry:
        first, second = (
            registry.add("support", DEMO / name, base_hash=BASE).path for name in ("upper", "reverse")
        )

        def after(served: str, now: str) -> tuple[Alias, dict[str, str]]:
            """The alias and the adapters of a start, with `support` served before and now from these."""
            targets = ("support", "support@v2") if current else ("support@v2", "support")
            save(
                ServedRegistry(registry, BASE),
                "support",
                Alias(*targets, 0.05, "rollout"),
                {"support": served},
            )
            found = SavedAliases({"support": now}, (), lambda name, number: folders[number])
            found.load(registry.aliases(BASE))
            return found.aliases["support"], found.adapters

        folders = {1: first, 2: second}
        alias, adapters = after(first, second)
        assert {alias.current, alias.second} == {"support@v1", "support@v2"}
        assert (alias.current == "support@v1") is current
        assert adapters == {"support@v1": first, "support@v2": second}
        for served in (first, str(DEMO / "upper")):
            alias, adapters = after(served, served)
            assert {alias.current, alias.second} == {"support", "support@v2"}
            assert adapters == {"support@v2": second}


def test_an_alias_is_saved_if_the_next_start_has_its_adapters(tmp_path):
    with Registry(tmp_path, create=True) as registry:
        path = registry.add("support", DEMO / "upper", base_hash=BASE).path
        served = ServedRegistry(registry, BASE, named=frozenset(["plain"]))
        paths = {"support": path, "support@v1": path, "sent": "/sent"}
        for alias in (Alias("support"), Alias("support@v1"), Alias("plain", "support")):
            assert save(served, "alias", alias, paths)
        for alias in (Alias("sent"), Alias("support", "sent"), Alias("support@v2"), Alias("sent@v1")):
            assert not save(served, "alias", alias, paths)


@pytest.mark.parametrize(
    ("name", "alias", "said"),
    [
        ("base", Alias("plain"), "the base model has its name"),
        ("support", Alias("support@v3"), "no version 3"),
        ("support", Alias("sent-over-http"), "neither loaded at the start"),
    ],
)
def test_an_alias_without_its_adapter_is_left_out_and_logged(tmp_path, caplog, name, alias, said):
    found = loaded(tmp_path, **{name: alias, "other": Alias("plain")})
    assert list(found.aliases) == ["other"]
    assert said in caplog.text


def test_an_alias_without_its_second_adapter_is_settled(tmp_path, caplog):
    found = loaded(tmp_path, support=Alias("support@v2", "support@v3", 0.5, "rollout", number=3))
    assert found.aliases["support"] == Alias("support@v2", loaded=("support@v2",), number=2)
    assert "no version 3" in caplog.text


def test_a_removed_alias_and_aliases_of_another_base_are_not_loaded(tmp_path):
    with Registry(tmp_path, create=True) as registry:
        assert registry.aliases(BASE) == {}
        save(ServedRegistry(registry, BASE), "support", ROLLOUT, {})
        save(ServedRegistry(registry, "1" * 64), "other", Alias("plain"), {})
        assert list(registry.aliases(BASE)) == ["support"]
        save(ServedRegistry(registry, BASE), "support", Alias(number=8), {})
        assert registry.aliases(BASE) == {}


def test_an_unreadable_alias_is_left_out(tmp_path, caplog):
    with Registry(tmp_path, create=True) as registry:
        registry.save_alias(BASE, "support", b"\xff")
    assert loaded(tmp_path, other=Alias("plain")).aliases.keys() == {"other"}
    assert "alias support is left out" in caplog.text
