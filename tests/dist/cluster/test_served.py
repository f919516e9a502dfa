# SPDX-License-Identifier: Apache-2.0
"""Accounts of what is served, joined after those who kept them have ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_lora.dist.cluster.instances import InstanceRegistry, Served, ServedVersion

versions = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4))


@st.composite
def accounts(draw) -> Served:
    """A version's path is the same in all accounts, as it is in a cluster."""
    known = draw(versions)
    gone = draw(st.sets(st.sampled_from("abcd")))
    adapters = {
        name: ServedVersion(f"{name}{version}", version, draw(st.booleans()))
        for name, version in known.items()
        if name not in gone
    }
    return Served(adapters, known)


@given(accounts(), accounts(), accounts())
def test_the_order_in_which_accounts_are_joined_changes_nothing(one, two, three):
    assert one.joined(two) == two.joined(one)
    assert one.joined(two).joined(three) == one.joined(two.joined(three))
    assert one.joined(one) == one


@given(accounts(), accounts())
def test_versions_never_fall(one, two):
    joined = one.joined(two)
    for name in {**one.versions, **two.versions}:
        assert joined.versions[name] == max(one.versions.get(name, 0), two.versions.get(name, 0))
        if name in joined.adapters:
            assert joined.adapters[name].version == joined.versions[name]


def test_what_was_replaced_or_unloaded_does_not_come_back():
    file = Served.of({"a": ServedVersion("a1", 1), "b": ServedVersion("b1", 1), "c": ServedVersion("c1", 1)})
    later = Served({"a": ServedVersion("a2", 2)}, {"a": 2, "b": 1})
    assert file.joined(later) == Served(
        {"a": ServedVersion("a2", 2), "c": ServedVersion("c1", 1)}, {"a": 2, "b": 1, "c": 1}
    )


def test_of_equal_versions_the_first_account_counts():
    here, there = (
        Served.of({"a": ServedVersion("here", 1, content_hash="h")}),
        Served.of({"a": ServedVersion("there", 1, True, "t")}),
    )
    assert here.joined(there) == here


def test_a_new_controller_s_start_does_not_replace_what_runs():
    """A registry's current version has changed since the instances' start."""
    registry = InstanceRegistry((), [("support", "registry/v8"), ("other", "registry/o")])
    living = ServedVersion("registry/v7", 1, True, "content")
    registry.recover(Served.of({"support": living}))
    registry.recover(Served.of({"support": ServedVersion("registry/v8", 1, False, "a restarted instance's")}))
    assert registry.adapters == {"support": living, "other": ServedVersion("registry/o", 1)}


def test_lacking_is_what_is_not_there_or_another_version():
    served = Served.of({"a": ServedVersion("p", 1), "b": ServedVersion("p", 2), "c": ServedVersion("p", 1)})
    have = {"a": ServedVersion("p", 1, pinned=True), "b": ServedVersion("p", 1), "d": ServedVersion("p", 1)}
    assert served.lacking(have) == {"b", "c"}
