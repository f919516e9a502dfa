# SPDX-License-Identifier: Apache-2.0
"""Errors for users.  Each message states the given value, the allowed values and the way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class MoeLoraError(Exception):
    """Root of the project's own errors."""


class ConfigError(MoeLoraError, ValueError):
    """An invalid setting, found at start."""


class FieldError(ValueError):
    """The field `param` of a request is wrong, or contradicts another."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message.encode("utf-8", "backslashreplace").decode())
        self.param = param.encode("utf-8", "backslashreplace").decode()

    def __reduce__(self) -> Any:
        return FieldError, (self.param, str(self))


class AdapterError(MoeLoraError, ValueError):
    """An adapter with unusable files; names the file and the key."""


class AdapterFailedError(MoeLoraError):
    """An adapter with a failed load or failed deltas; requests are refused until a load succeeds."""


class AdapterNotFoundError(MoeLoraError, KeyError):
    """An unknown adapter name."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class BusyError(MoeLoraError):
    """A request that the server can't take now; sent again later, it may pass."""


class AdapterVersionError(MoeLoraError):
    """An answer's adapter version was replaced before the answer ended."""


class AdapterExistsError(MoeLoraError, ValueError):
    """A name already in use."""


class RegistryError(MoeLoraError):
    """A registry of adapters can't be opened, read or written."""


class CapacityError(MoeLoraError):
    """A request or adapter that could never fit."""


class GenerationError(MoeLoraError):
    """Requests of one call that the engine could not complete, with the reason of each.

    problems: index of a prompt -> reason.  completions: of all prompts in order; a failed prompt has its
    tokens so far and finish_reason "error".
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
    """Storage is full or not writable, or the process has no free file descriptor."""


class SloError(MoeLoraError):
    """The hardware can't meet these latency goals or this load; names the exceeded term."""


class EngineDeadError(MoeLoraError):
    """The engine's process has ended."""


class MoveError(MoeLoraError):
    """A request could not be moved and stays on the instance."""


class EngineSilentError(EngineDeadError):
    """The engine's process exists without progress: stopped, cut off, or hanging."""


class ControllerAwayError(EngineDeadError):
    """The cluster's controller does not answer; its decisions can't change meanwhile."""


class PeerUnreachableError(MoeLoraError):
    """A process could not be found or connected to; a later retry may help."""


class PeerGoneError(MoeLoraError):
    """A connected process has ended, or has freed the memory written to."""


class SignalTimeoutError(MoeLoraError, TimeoutError):
    """A signal did not reach the awaited value in time."""


class UnreadError(MoeLoraError):
    """The unread part of an answer exceeds the limit."""


class LoraServerError(MoeLoraError):
    """The LoRA Server can't be reached, or refuses this process."""


class LastProblem:
    """Reports each problem of repeated attempts once."""

    def __init__(self) -> None:
        self._last = ""

    def is_new(self, problem: str) -> bool:
        """True if the problem differs from the last call's."""
        new = problem != self._last
        self._last = problem
        return new

    def over(self) -> None:
        """Reset after a success: the next problem is new."""
        self._last = ""


_MAX_SHOWN_CHARS = 100
MAX_REASON_CHARS = 300
"""Of a foreign error or a path in our errors."""


def shown(value: Any, max_chars: int = _MAX_SHOWN_CHARS) -> str:
    """repr for an error's text, cut to max_chars."""
    try:
        return cut(repr(value), max_chars)
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__} of too many digits"


def cut(text: str, max_chars: int = _MAX_SHOWN_CHARS) -> str:
    """A text for an error or the log: cut to max_chars, line breaks escaped."""
    text = text if len(text) <= max_chars else f"{text[:max_chars]}…"
    return text if text.isprintable() else repr(text)[1:-1]
