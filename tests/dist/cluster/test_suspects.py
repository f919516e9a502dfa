# SPDX-License-Identifier: Apache-2.0
"""Adapters that may have ended an instance are tried one at a time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap

import pytest

from moe_lora.core.errors import AdapterFailedError, EngineDeadError
from moe_lora.dist.cluster import suspects as module
from moe_lora.dist.cluster.suspects import Suspects, Trial
from moe_lora.engine.client.step_notes import ReadNotes, StepNotes


class Fleet:
    def __init__(self, live: int = 2, known: int = 2) -> None:
        self.live, self.known = live, known
        self.suspects = Suspects(lambda: self.live, lambda: self.known)

    def die(self, instance: str, *adapters: str) -> None:
        self.suspects.note_death(instance, frozenset(adapters))

    async def try_at(self, adapter: str, instance: str) -> Trial:
        trial = await self.suspects.admit(adapter)
        assert trial is not None
        trial.instance = instance
        return trial


async def waits(work: asyncio.Task) -> bool:
    await asyncio.sleep(0.15)
    return not work.done()


def test_adapters_of_no_death_are_not_held_up():
    async def run() -> None:
        fleet = Fleet()
        assert not fleet.suspects
        fleet.die("0", "a")
        assert await fleet.suspects.admit("b") is None

    asyncio.run(run())


def test_suspects_are_tried_one_adapter_at_a_time_and_a_token_clears_them():
    async def run() -> None:
        fleet = Fleet()
        fleet.die("0", "a", "b")
        trial = await fleet.try_at("a", "1")
        others = [asyncio.create_task(fleet.suspects.admit(name)) for name in ("a", "b")]
        assert all([await waits(one) for one in others])
        fleet.suspects.note_token("a", trial)
        assert await others[0] is None, "the adapter is cleared"
        second = await others[1]
        assert second is not None
        assert second.adapter == "b"
        fleet.suspects.note_token("b", second)
        assert not fleet.suspects

    asyncio.run(run())


def test_adapter_whose_trial_ends_its_instance_is_refused_and_those_beside_it_are_not():
    async def run() -> None:
        fleet = Fleet()
        fleet.die("0", "a")
        await fleet.try_at("a", "1")
        waiting = asyncio.create_task(fleet.suspects.admit("a"))
        await asyncio.sleep(0)
        fleet.die("1", "a", "neighbour")
        for work in (waiting, fleet.suspects.admit("a")):
            with pytest.raises(
                AdapterFailedError, match="instances 0, 1 died while they loaded or computed it"
            ):
                await work
        assert await fleet.suspects.admit("neighbour") is None
        assert list(fleet.suspects.refused) == ["a"]
        fleet.suspects.forget("a")  # it was loaded anew
        assert await fleet.suspects.admit("a") is None

    asyncio.run(run())


def test_death_of_a_trials_instance_at_other_work_shows_nothing():
    async def run() -> None:
        fleet = Fleet()
        fleet.die("0", "a")
        trial = await fleet.try_at("a", "1")
        fleet.die("1", "b")
        fleet.suspects.release(trial)
        assert (await fleet.try_at("a", "0")).adapter == "a"
        assert fleet.suspects.problem("a") is None

    asyncio.run(run())


def test_unproven_adapter_waits_until_a_second_instance_lives():
    async def run() -> None:
        fleet = Fleet(live=1)
        fleet.suspects.note_token("proven", None)
        fleet.die("0", "new", "proven")
        waiting = asyncio.create_task(fleet.suspects.admit("new"))
        assert await waits(waiting)
        proven = await fleet.try_at("proven", "1")
        fleet.suspects.note_token("proven", proven)
        assert await waits(waiting)
        fleet.live = 2
        assert await waiting is not None

    asyncio.run(run())


def test_one_instance_alone_is_tried_once_more():
    async def run() -> None:
        fleet = Fleet(live=1, known=1)
        fleet.die("0", "a")
        await fleet.try_at("a", "0")
        fleet.die("0", "a")
        with pytest.raises(AdapterFailedError):
            await fleet.suspects.admit("a")

    asyncio.run(run())


def test_without_an_instance_nobody_waits_here():
    async def run() -> None:
        fleet = Fleet(live=0)
        fleet.die("0", "a")
        assert await fleet.suspects.admit("a") is None

    asyncio.run(run())


def test_request_whose_trial_never_comes_is_told_why_and_a_proven_adapter_goes_on(monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.2)

    async def run() -> None:
        fleet = Fleet()
        fleet.suspects.note_token("proven", None)
        fleet.die("0", "a", "b", "proven")
        await fleet.try_at("a", "1")
        with pytest.raises(EngineDeadError, match="'b' may have ended instance 0, and other adapters were"):
            await fleet.suspects.admit("b")
        assert await fleet.suspects.admit("proven") is None

    asyncio.run(run())


def test_a_second_instance_that_stays_away_is_not_awaited_for_ever(monkeypatch):
    monkeypatch.setattr(module, "ALONE_S", 0.1)

    async def run() -> None:
        fleet = Fleet(live=1)
        fleet.die("0", "a")
        assert (await fleet.try_at("a", "1")).adapter == "a"

    asyncio.run(run())


def test_adapter_that_gained_tokens_is_refused_after_one_more_death():
    async def run() -> None:
        fleet = Fleet()
        fleet.suspects.note_token("a", None)
        fleet.die("0", "a")
        await fleet.try_at("a", "1")
        fleet.die("1", "a", "b")
        await fleet.try_at("a", "2")
        fleet.die("2", "a")
        with pytest.raises(AdapterFailedError, match="instances 0, 1, 2 died"):
            await fleet.suspects.admit("a")
        assert (await fleet.try_at("b", "0")).adapter == "b"

    asyncio.run(run())


def test_deaths_of_long_ago_are_forgotten(monkeypatch):
    async def run() -> None:
        fleet = Fleet()
        for instance in ("0", "1", "2"):
            fleet.die(instance, "a")
        monkeypatch.setattr(module, "DEATHS_COUNT_S", -1.0)
        fleet.die("0", "b")
        assert await fleet.suspects.admit("a") is None
        trial = await fleet.try_at("b", "1")
        fleet.die("2", "c")
        assert fleet.suspects._trial is trial, "a trial is no matter of the past"

    asyncio.run(run())


def test_trial_of_an_adapter_that_is_loaded_anew_meanwhile_ends_with_its_token():
    async def run() -> None:
        fleet = Fleet()
        fleet.die("0", "a", "b")
        trial = await fleet.try_at("a", "1")
        fleet.suspects.forget("a")
        fleet.suspects.note_token("a", trial)
        assert (await fleet.try_at("b", "1")).adapter == "b"

    asyncio.run(run())


def test_forgotten_adapter_is_neither_refused_nor_a_suspect():
    async def run() -> None:
        fleet = Fleet()
        fleet.die("0", "a")
        await fleet.try_at("a", "1")
        fleet.die("1", "a")
        fleet.suspects._suspects["a"] = ["2"]  # noted by a death that was read late
        fleet.suspects.forget("a")
        assert not fleet.suspects
        assert await fleet.suspects.admit("a") is None

    asyncio.run(run())


class TwoFrontEnds:
    """Two that hear of the deaths of the same instances, whose notes they both have."""

    def __init__(self) -> None:
        self.fleets = Fleet(live=3, known=3), Fleet(live=3, known=3)
        self.engines = {name: StepNotes() for name in "0123"}
        self.readers = [{name: ReadNotes(one.place) for name, one in self.engines.items()} for _ in "12"]

    def hear(self, number: int, instance: str, *adapters: str) -> None:
        notes = self.readers[number][instance]
        self.fleets[number].suspects.note_death(instance, frozenset(adapters), notes)

    def die(self, instance: str, *adapters: str) -> None:
        for number in (0, 1):
            self.hear(number, instance, *adapters)

    async def try_at(self, number: int, adapter: str, instance: str) -> Trial:
        suspects = self.fleets[number].suspects
        trial = await suspects.admit(adapter)
        assert trial is not None
        suspects.start(trial, instance)
        return trial


def test_two_front_ends_have_one_trial_of_an_adapter_at_a_time():
    async def run() -> None:
        both = TwoFrontEnds()
        first, second = (one.suspects for one in both.fleets)
        both.die("0", "a")
        trial = await both.try_at(0, "a", "1")
        waiting = asyncio.create_task(second.admit("a"))
        assert await waits(waiting)
        first.note_token("a", trial)
        assert await waiting is not None
        assert not first

    asyncio.run(run())


@pytest.mark.parametrize("heard_first", [0, 1])
def test_a_trial_that_ends_its_instance_is_known_to_the_other_front_end(heard_first):
    async def run() -> None:
        both = TwoFrontEnds()
        both.die("0", "a", "b")
        await both.try_at(0, "a", "1")
        waiting = asyncio.create_task(both.fleets[1].suspects.admit("a"))
        await asyncio.sleep(0)
        for number in (heard_first, 1 - heard_first):
            both.hear(number, "1", "a", "neighbour")
        with pytest.raises(AdapterFailedError, match="instances 0, 1 died"):
            await waiting
        for fleet in both.fleets:
            assert list(fleet.suspects.refused) == ["a"]
            assert await fleet.suspects.admit("neighbour") is None
        assert (await both.try_at(1, "b", "2")).adapter == "b"

    asyncio.run(run())


def test_the_other_front_end_grants_a_proven_adapter_its_second_trial():
    async def run() -> None:
        both = TwoFrontEnds()
        first, second = (one.suspects for one in both.fleets)
        first.note_token("a", None)
        both.die("0", "a")
        await both.try_at(0, "a", "1")
        both.die("1", "a")
        assert second.problem("a") is None
        trial = await both.try_at(0, "a", "2")
        waiting = asyncio.create_task(second.admit("a"))
        assert await waits(waiting)
        first.note_token("a", trial)
        assert await waiting is not None

    asyncio.run(run())


def test_a_trial_that_ended_well_is_nothing_against_a_later_death():
    async def run() -> None:
        both = TwoFrontEnds()
        first, second = (one.suspects for one in both.fleets)
        both.die("0", "a")
        trial = await both.try_at(0, "a", "1")
        first.note_token("a", trial)
        both.hear(1, "1", "a")
        assert second.problem("a") is None

    asyncio.run(run())


def test_a_front_end_that_ends_leaves_its_trial_to_another():
    async def run() -> None:
        both = TwoFrontEnds()
        both.die("0", "a")
        code = textwrap.dedent("""
            import asyncio, sys
            from moe_lora.dist.cluster.suspects import Suspects
            from moe_lora.engine.client.step_notes import ReadNotes
            suspects = Suspects(lambda: 3, lambda: 3)
            suspects.note_death("0", frozenset({"a"}), ReadNotes(sys.argv[1]))
            asyncio.run(suspects.admit("a"))
            print("tries", flush=True)
            sys.stdin.read()
        """)
        other = subprocess.Popen(
            [sys.executable, "-c", code, both.engines["0"].place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"tries\n"
        waiting = asyncio.create_task(both.fleets[0].suspects.admit("a"))
        assert await waits(waiting)
        other.kill()
        other.wait()
        assert await waiting is not None
        other.stdin.close()
        other.stdout.close()

    asyncio.run(run())


def test_notes_of_one_process_that_was_cut_off_twice_are_locked_once():
    async def run() -> None:
        fleet, engine = Fleet(), StepNotes()
        for _ in range(2):
            fleet.suspects.note_death("0", frozenset({"a"}), ReadNotes(engine.place))
        assert await fleet.suspects.admit("a") is not None

    asyncio.run(run())
