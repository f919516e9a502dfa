"""Adapters that may have ended an instance: their requests go on one adapter at a time, on one instance.

An instance that dies leaves notes of the adapters that it was about to load or compute (`step_notes`).  Each
of these adapters is a suspect until one of its requests, the trial, gains a token on another instance.  A
trial that ends its instance too shows the culprit, which is refused until it is loaded again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from anyio import move_on_after

from moe_lora.core.errors import AdapterFailedError, EngineDeadError

logger = logging.getLogger(__name__)

WAIT_S = 60.0
"""A request of a suspect waits so long for its trial."""
ALONE_S = 30.0
"""After so long the second instance is not expected any more: a trial needs one."""
MOST_DEATHS = 2
"""An adapter that gained tokens before is refused after one more death: two unrelated kills may meet it."""
_LOOK_S = 0.05


@dataclass(eq=False)
class Trial:
    """One request of a suspect, and the instance that computes it."""

    adapter: str
    instance: str = ""


class Suspects:
    """The suspects of one front end; belongs to its event loop.

    num_live, num_known: count instances that take requests, and all that this front end knows.
    """

    def __init__(self, num_live: Callable[[], int], num_known: Callable[[], int]) -> None:
        self._num_live = num_live
        self._num_known = num_known
        self._suspects: dict[str, list[str]] = {}
        """By adapter: the instances that died with the adapter in their notes."""
        self._refused: dict[str, str] = {}
        self._proven: set[str] = set()
        self._trial: Trial | None = None
        self._changed = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._suspects or self._refused)

    def note_death(self, instance: str, adapters: frozenset[str]) -> None:
        """An instance died; adapters: those in its notes."""
        trial = self._trial
        if trial is not None and trial.adapter in adapters and trial.instance == instance:
            self._trial = None
            num_deaths = len(self._suspects.get(trial.adapter, ())) + 1
            if num_deaths > (MOST_DEATHS if trial.adapter in self._proven else 1):
                self._refuse(trial.adapter, instance)
                self.wake()
                return  # the others ran beside it
        for name in sorted(adapters - self._refused.keys()):
            self._suspects.setdefault(name, []).append(instance)
        if adapters:
            logger.warning(
                "instance %s died at work for %s; their requests go on one adapter at a time",
                instance,
                ", ".join(sorted(adapters)),
            )

    def note_token(self, adapter: str, trial: Trial | None) -> None:
        """A request of the adapter gained a token; trial: the one that it was."""
        self._proven.add(adapter)
        if trial is not None:
            self._suspects.pop(adapter, None)
            self.release(trial)

    def forget(self, adapter: str) -> None:
        """The adapter was loaded anew, or unloaded: nothing is known against what the name means now."""
        self._proven.discard(adapter)
        self._refused.pop(adapter, None)
        self._suspects.pop(adapter, None)
        self.wake()

    def problem(self, adapter: str) -> str | None:
        """Why requests of the adapter are refused; None: they are not."""
        return self._refused.get(adapter)

    @property
    def refused(self) -> dict[str, str]:
        """A copy: the refused adapters and the reasons."""
        return dict(self._refused)

    async def admit(self, adapter: str, is_aborted: Callable[[], bool] = lambda: False) -> Trial | None:
        """Return when a request of the adapter may be sent; a Trial if it is the one that shows.

        is_aborted: ends the wait after a `wake`.

        An adapter without a token waits up to ALONE_S for a second live instance, if there are several: a
        trial must not take the last one from all other requests.
        Raises AdapterFailedError for a refused adapter, EngineDeadError if no trial is possible in time.
        """
        began_s = time.monotonic()
        with move_on_after(WAIT_S):
            while not is_aborted():
                problem = self._refused.get(adapter)
                if problem is not None:
                    raise AdapterFailedError(problem)
                if adapter not in self._suspects or not self._num_live():
                    return None  # without an instance the router says so
                if self._trial is None and self._may_try(adapter, time.monotonic() - began_s):
                    self._trial = Trial(adapter)
                    return self._trial
                with move_on_after(_LOOK_S):  # instances come and go without a word here
                    await self._changed.wait()
        if is_aborted() or adapter in self._proven:
            return None  # other trials took the time
        where = self._suspects[adapter][-1] if adapter in self._suspects else "an instance"
        raise EngineDeadError(
            f"adapter {adapter!r} may have ended instance {where}, and other adapters were tried before it "
            f"for {WAIT_S:.0f} s; send the request again"
        )

    def _may_try(self, adapter: str, waited_s: float) -> bool:
        alone = adapter in self._proven or waited_s >= ALONE_S
        least = 1 if alone else min(2, self._num_known())
        return self._num_live() >= least

    def release(self, trial: Trial) -> None:
        """The trial's request has ended, or goes on elsewhere: the next suspect has its turn."""
        if self._trial is trial:
            self._trial = None
            self.wake()

    def _refuse(self, adapter: str, instance: str) -> None:
        before = self._suspects.pop(adapter, [])
        self._refused[adapter] = (
            f"adapter {adapter!r} is unavailable: instances {', '.join([*before, instance])} died while they "
            "loaded or computed it; load it again once that is mended"
        )
        logger.error(self._refused[adapter])

    def wake(self) -> None:
        """Have all requests that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()
