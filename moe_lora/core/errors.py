# SPDX-License-Identifier: Apache-2.0
"""Errors a user can meet.  Each message says what was given, what is allowed, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class MoeLoraError(Exception):
    """Root of the project's own errors."""


class ConfigError(MoeLoraError, ValueError):
    """A setting that can't work, known at start."""


class AdapterError(MoeLoraError, ValueError):
    """An adapter whose files can't be served, with the file and the key."""


class AdapterFailedError(MoeLoraError):
    """An adapter whose load or deltas failed; its requests are refused until a load succeeds."""


class AdapterNotFoundError(MoeLoraError, KeyError):
    """A name that no adapter has."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class AdapterVersionError(MoeLoraError):
    """An answer that one version of an adapter began can't go on, since another has taken its place."""


class AdapterExistsError(MoeLoraError, ValueError):
    """A name that is already taken."""


class RegistryError(MoeLoraError):
    """A registry of adapters that can't be opened, read or written."""


class CapacityError(MoeLoraError):
    """A request or adapter that could never fit."""


class GenerationError(MoeLoraError):
    """Requests of one call that the engine could not complete, with the reason of each.

    problems: index of a prompt -> reason.  completions: of all prompts in order; a failed one has the tokens
    until then and finish_reason "error".
    """

    def __init__(self, problems: Mapping[int, str], completions: Sequence[Any]) -> None:
        self.problems, self.completions = dict(problems), tuple(completions)
        first, reason = next(iter(self.problems.items()))
        others = f" and {len(self.problems) - 1} more" if len(self.problems) > 1 else ""
        super().__init__(
            f"prompt {first}{others} of {len(self.completions)} failed: {reason}; the error's completions "
            "hold the other answers"
        )

    def __reduce__(self) -> Any:
        return GenerationError, (self.problems, self.completions)


class StorageError(CapacityError):
    """A place for files that is full or can't be written, or no file can be opened now."""


class SloError(MoeLoraError):
    """Latency goals, or a load, that the hardware in question can't hold; names the term that exceeds."""


class EngineDeadError(MoeLoraError):
    """The engine's process has ended."""


class MoveError(MoeLoraError):
    """A request could not be moved to another instance; it goes on where it is."""


class EngineSilentError(EngineDeadError):
    """The engine's process is there, but does not get on: it is stopped, cut off, or hangs."""


class ControllerAwayError(EngineDeadError):
    """The controller of the cluster does not answer; nothing that it decides can be changed meanwhile."""


class PeerUnreachableError(MoeLoraError):
    """A process that could not be found or connected to; trying again later may help."""


class PeerGoneError(MoeLoraError):
    """A process that was connected and has ended, or has freed the memory written to."""


class SignalTimeoutError(MoeLoraError, TimeoutError):
    """A signal that did not reach the awaited value in time."""


class UnreadError(MoeLoraError):
    """More of an answer waits than may, because its client does not read it."""


class LoraServerError(MoeLoraError):
    """The LoRA Server can't be reached, or refuses this process."""


# Problems that last while something is tried again and again.


class LastProblem:
    """Tells a new problem from the one that was there before, so that each is logged once."""

    def __init__(self) -> None:
        self._last = ""

    def is_new(self, problem: str) -> bool:
        """Whether this is another problem than at the last call."""
        new = problem != self._last
        self._last = problem
        return new

    def over(self) -> None:
        """It works again: the next problem is new, be it the same."""
        self._last = ""
