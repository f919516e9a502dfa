# SPDX-License-Identifier: Apache-2.0
"""How commands tell a user what went wrong: one line on stderr, no traceback, an exit status that isn't 0."""

from __future__ import annotations

import functools
import os
import select
import sys
from collections.abc import Callable
from typing import Any

import click

from moe_lora.core.errors import MoeLoraError


class InputError(click.ClickException):
    """What was asked for can't be done with what was given; exit status 2, as for options click refuses."""

    exit_code = 2


OUTPUT_CLOSED = 141
"""What a shell reports for a command that SIGPIPE ended: the reader of its output, such as head, is gone."""
_STDOUT = 1


def is_output_closed() -> bool:
    """True if nobody reads this process's stdout any more."""
    poller = select.poll()
    poller.register(_STDOUT, 0)
    return any(events & select.POLLERR for _, events in poller.poll(0))


def close_output() -> None:
    """Flush stdout, or drop its rest if the reader is gone, so that the interpreter's end says nothing."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, _STDOUT)
        os.close(nothing)


def _reported_as(kind: type[click.ClickException], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ValueError, OSError, MoeLoraError) as error:
            if isinstance(error, BrokenPipeError) and is_output_closed():
                raise
            raise kind(str(error)) from error

    return wrapped


def user_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn ValueError, OSError and the project's own errors of the function into click's, exit status 1."""
    return _reported_as(click.ClickException, function)


def input_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `user_errors`, with exit status 2: for commands that only compute something of their input."""
    return _reported_as(InputError, function)
