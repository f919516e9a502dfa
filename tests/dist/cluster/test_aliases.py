# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest

from moe_lora.core.errors import AdapterError, ConfigError
from moe_lora.dist.cluster import aliases as module
from moe_lora.dist.cluster.aliases import (
    MAX_REMOVED,
    check_load,
    check_unload,
    drawn_adapter,
    dropped,
    learn,
    promoted,
    replace_all,
    rolled_back,
    rolled_out,
)
from moe_lora.engine.client.messages import Alias, KnownAliases

SERVED = ("v7", "v8", "v9")
KEYS = [f"user-{number}" for number in range(4000)]


def of_other(alias: Alias) -> set[str]:
    return {key for key in KEYS if drawn_adapter("support", alias, key) == alias.second}


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_a_share_of_the_keys_gets_the_other_adapter(share):
    num = len(of_other(Alias("v7", "v8", share, "rollout")))
    spread = 5 * (len(KEYS) * share * (1 - share)) ** 0.5
    assert abs(num - len(KEYS) * share) < spread


def test_a_larger_share_keeps_the_keys_and_another_rollout_draws_others():
    small, large = (of_other(Alias("v7", "v8", share, "rollout")) for share in (0.05, 0.5))
    assert small < large
    assert of_other(Alias("v8", "v9", 0.05, "rollout")) != small
    assert len(of_other(Alias("v7", "v8", 1.0, "rollout"))) == len(KEYS)
    assert not of_other(Alias("v7", "v8", 0.0, "promoted"))
    assert drawn_adapter("support", Alias("v7", "v8", 0.5, "rollout"), "\ud800") in ("v7", "v8")


def test_steps_lead_from_the_first_adapter_to_the_next_and_back():
    first = rolled_out("support", Alias(), "v7", None, SERVED)
    assert first == Alias("v7")
    some = rolled_out("support", first, "v8", 0.05, SERVED)
    assert some == Alias("v7", "v8", 0.05, "rollout")
    more = rolled_out("support", some, "v8", 0.5, SERVED)
    assert more == replace(some, share=0.5)
    done = promoted("support", more)
    assert done == Alias("v8", "v7", 0.0, "promoted")
    back = rolled_back("support", done)
    assert back == Alias("v7", "v8", 0.0, "rolled_back")
    assert rolled_back("support", back) is back, "a second rollback changes nothing"
    assert rolled_back("support", more) == back
    assert dropped("support", back) == Alias("v7")
    assert dropped("support", first) is first
    assert rolled_out("support", done, "v9", 0.1, SERVED) == Alias("v8", "v9", 0.1, "rollout")
    assert rolled_out("support", back, "v8", 1, SERVED) == Alias("v7", "v8", 1, "rollout")


def test_an_adapter_of_the_name_is_the_first():
    assert rolled_out("v7", Alias(), "v8", 0.05, SERVED) == Alias("v7", "v8", 0.05, "rollout")


RUNNING = Alias("v7", "v8", 0.05, "rollout")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda: rolled_out("new", Alias(), "v8", 0.05, SERVED), "no adapter yet"),
        (lambda: rolled_out("a", Alias("v7"), "v7", 0.05, SERVED), "already"),
        (lambda: rolled_out("a", Alias("v7"), "v8", None, SERVED), "state the share"),
        (lambda: rolled_out("a", RUNNING, "v9", 0.1, SERVED), "roll back first"),
        (lambda: promoted("a", Alias("v7")), "no rollout"),
        (lambda: promoted("a", Alias("v8", "v7", 0.0, "promoted")), "no rollout"),
        (lambda: rolled_back("a", Alias("v7")), "no rollout to roll back"),
        (lambda: dropped("a", RUNNING), "roll back first"),
        *(
            (lambda share=share: rolled_out("a", RUNNING, "v8", share, SERVED), "share=")
            for share in (0, -1, 1.1)
        ),
        (lambda: rolled_out("a", RUNNING, "v8", float("nan"), SERVED), "share=nan"),
    ],
)
def test_a_step_out_of_order_is_refused(step, said):
    with pytest.raises(ConfigError, match=said):
        step()


def test_adapters_of_an_alias_stay_and_a_hidden_name_is_not_loaded():
    aliases = {"support": Alias("v7", "v8", 0.05, "rollout"), "gone": Alias(number=3)}
    for name in ("v7", "v8"):
        with pytest.raises(AdapterError, match="keeps adapter"):
            check_unload(aliases, name)
    check_unload(aliases, "v9")
    with pytest.raises(AdapterError, match="alias of adapter 'v7'"):
        check_load(aliases, "support")
    check_load({"v7": Alias("v7", "v8", 0.05, "rollout")}, "v7")
    check_load(aliases, "gone")


def test_the_later_step_of_each_alias_counts_and_few_removed_ones_are_kept(monkeypatch):
    known = {"a": Alias("v7", number=2), "b": Alias("v7", number=5)}
    learn(known, {"a": Alias("v8", number=3), "b": Alias("v8", number=4), "c": Alias(number=1)})
    assert {name: (one.current, one.number) for name, one in known.items()} == {
        "a": ("v8", 3),
        "b": ("v7", 5),
        "c": ("", 1),
    }
    monkeypatch.setattr(module, "MAX_REMOVED", 2)
    assert MAX_REMOVED > 2
    learn(known, {str(number): Alias(number=number) for number in range(10, 14)})
    assert set(known) == {"a", "b", "12", "13"}
    same = known
    replace_all(known, {"z": Alias("v7")})
    assert same == {"z": Alias("v7")}


def test_live_aliases_are_a_new_mapping_after_each_change_and_empty_after_the_last():
    known = KnownAliases()
    assert not known.live
    learn(known, {"a": Alias("v7", number=1)})
    before = known.live
    learn(known, {"a": Alias(number=2)})
    assert set(before) == {"a"} == set(known)
    assert not known.live
    replace_all(known, {"b": Alias("v8", number=3), "c": Alias(number=4)})
    assert set(known.live) == {"b"}
