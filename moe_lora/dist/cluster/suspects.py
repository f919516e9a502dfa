# SPDX-License-Identifier: Apache-2.0
"""Adapters suspected of an instance's end: one trial request of one adapter at a time.

An instance that dies leaves notes of the adapters under load or compute (`step_notes`).  Each is a suspect
until a request, the trial, gains a token on another instance.  A trial that ends another instance convicts
the adapter: refused until the next load.  The notes' lock admits one trial among a host's front ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anyio import move_on_after

from moe_lora.core.errors import AdapterFailedError, EngineDeadError
from moe_lora.engine.client.step_notes import ReadNotes

logger = logging.getLogger(__name__)

WAIT_S = 60.0
"""Longest wait for a trial."""
ALONE_S = 30.0
"""Longest wait for a second live instance: a trial needs two."""
MOST_DEATHS = 2
"""Most deaths of an adapter that has gained tokens: unrelated kills may hit it twice."""
DEATHS_COUNT_S = 600.0
"""Older deaths do not count."""
_LOOK_S = 0.05
_PROVEN = "proven"


@dataclass(eq=False)
class Trial:
    """A suspect's request.  notes: locked for the trial."""

    adapter: str
    notes: Sequence[ReadNotes] = ()
    instance: str = ""


class Suspects:
    """The suspects of one front end and event loop.

    num_live, num_known: numbers of instances.
    """

    def __init__(self, num_live: Callable[[], int], num_known: Callable[[], int]) -> None:
        self._num_live = num_live
        self._num_known = num_known
        self._suspects: dict[str, list[str]] = {}
        """By adapter: instances that died with it in their notes."""
        self._died_s: dict[str, float] = {}
        """By adapter: time of the last death."""
        self._notes: dict[str, list[ReadNotes]] = {}
        """By adapter: notes without doubles."""
        self._refused: dict[str, str] = {}
        self.active = False
        """True while an adapter is a suspect or refused."""
        self.proven: set[str] = set()
        """Adapters that gained a token."""
        self._trial: Trial | None = None
        self._changed = asyncio.Event()

    def __bool__(self) -> bool:
        return self.active

    def note_death(self, instance: str, adapters: frozenset[str], notes: ReadNotes | None = None) -> None:
        """Record an instance's death; adapters: in its notes."""
        self._forget_old()
        tried, is_proven = self._tried_at(instance, adapters)
        if tried is not None:
            num_deaths = len(self._suspects.get(tried, ())) + 1
            if num_deaths > (MOST_DEATHS if is_proven else 1):
                self._refuse(tried, instance)
                self.wake()
                return  # the others ran beside the trial
        for name in sorted(adapters - self._refused.keys()):
            self._suspects.setdefault(name, []).append(instance)
            self._died_s[name] = time.monotonic()
            known = self._notes.setdefault(name, [])
            if notes is not None and all(one.place != notes.place for one in known):
                known.append(notes)
        if adapters:
            self.active = True
            logger.warning(
                "instance %s died at work for %s; their requests go on one adapter at a time",
                instance,
                ", ".join(sorted(adapters)),
            )

    def _forget_old(self) -> None:
        least_s = time.monotonic() - DEATHS_COUNT_S
        on_trial = None if self._trial is None else self._trial.adapter
        for name in [one for one, died_s in self._died_s.items() if died_s < least_s and one != on_trial]:
            self._clear(name)

    def _tried_at(self, instance: str, adapters: frozenset[str]) -> tuple[str | None, bool]:
        """The suspect on trial at the dead instance; True if the suspect had tokens."""
        trial = self._trial
        if trial is not None and trial.adapter in adapters and trial.instance == instance:
            self._trial = None
            for notes in trial.notes:
                notes.unlock()  # the notes still name the trial for other front ends
            return trial.adapter, trial.adapter in self.proven
        for name in adapters & self._suspects.keys():
            for notes in self._notes[name]:
                if notes.trial[:2] == (name, instance):
                    return name, name in self.proven or notes.trial[2:] == (_PROVEN,)
        return None, False

    def start(self, trial: Trial, instance: str) -> None:
        """Record the trial's instance."""
        trial.instance = instance
        words = (trial.adapter, instance, *([_PROVEN] if trial.adapter in self.proven else ()))
        for notes in trial.notes:
            notes.trial = words

    def note_token(self, adapter: str, trial: Trial | None) -> None:
        """Record an adapter's token; trial: its trial, if any."""
        self.proven.add(adapter)
        if trial is not None:
            self._clear(adapter)
            self.release(trial)

    def forget(self, adapter: str) -> None:
        """Forget a replaced or unloaded adapter."""
        self.proven.discard(adapter)
        if self.active:
            self._refused.pop(adapter, None)
            self._clear(adapter)
            self.wake()

    def _clear(self, adapter: str) -> list[str]:
        self._notes.pop(adapter, None)
        self._died_s.pop(adapter, None)
        instances = self._suspects.pop(adapter, [])
        self.active = bool(self._suspects or self._refused)
        return instances

    def problem(self, adapter: str) -> str | None:
        """Reason to refuse the adapter's requests, if any."""
        return self._refused.get(adapter)

    @property
    def refused(self) -> dict[str, str]:
        """A copy: refused adapters and reasons."""
        return dict(self._refused)

    async def admit(self, adapter: str, is_aborted: Callable[[], bool] = lambda: False) -> Trial | None:
        """Wait until the adapter's request may be sent; returns a Trial for a suspect's request.

        An adapter without a token waits up to ALONE_S for a second live instance, if several are known: a
        trial must not end the last instance.  Raises AdapterFailedError for a refused adapter,
        EngineDeadError if no trial is possible in time.
        """
        began_s = time.monotonic()
        with move_on_after(WAIT_S):
            while not is_aborted():
                problem = self._refused.get(adapter)
                if problem is not None:
                    raise AdapterFailedError(problem)
                if adapter not in self._suspects or not self._num_live():
                    return None  # the router raises without an instance
                may_try = self._trial is None and self._may_try(adapter, time.monotonic() - began_s)
                if may_try and (trial := self._locked(adapter)) is not None:
                    self._trial = trial
                    return trial
                with move_on_after(_LOOK_S):  # instances come and go without a wake
                    await self._changed.wait()
        if is_aborted() or adapter in self.proven:
            return None  # other trials used the time
        where = self._suspects[adapter][-1] if adapter in self._suspects else "an instance"
        raise EngineDeadError(
            f"adapter {adapter!r} may have ended instance {where}, and other adapters were tried before it "
            f"for {WAIT_S:.0f} s; send the request again"
        )

    def _may_try(self, adapter: str, waited_s: float) -> bool:
        alone = adapter in self.proven or waited_s >= ALONE_S
        least = 1 if alone else min(2, self._num_known())
        return self._num_live() >= least

    def _locked(self, adapter: str) -> Trial | None:
        """A trial; None during another front end's."""
        trial = Trial(adapter, tuple(self._notes.get(adapter, ())))
        for number, notes in enumerate(trial.notes):
            if not notes.try_lock():
                for locked in trial.notes[:number]:
                    locked.unlock()
                return None
        return trial

    def release(self, trial: Trial) -> None:
        """The trial's request left: the next suspect's turn."""
        if self._trial is trial:
            self._trial = None
            for notes in trial.notes:
                notes.trial = ()
                notes.unlock()
            self.wake()

    def _refuse(self, adapter: str, instance: str) -> None:
        before = self._clear(adapter)
        self.active = True
        self._refused[adapter] = (
            f"adapter {adapter!r} is unavailable: instances {', '.join([*before, instance])} died while they "
            "loaded or computed it; load it again once that is mended"
        )
        logger.error(self._refused[adapter])

    def wake(self) -> None:
        """Wake all waiting requests."""
        self._changed.set()
        self._changed = asyncio.Event()
