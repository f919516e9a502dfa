# SPDX-License-Identifier: Apache-2.0
"""Errors for users: one line on stderr, and an exit status."""

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
    """Unusable input; exit status 2, as in click."""

    exit_code = 2


OUTPUT_CLOSED = 141
"""A shell's status after SIGPIPE: the output's reader is gone."""
_STDOUT = 1


def is_output_closed() -> bool:
    """True if stdout has no reader any more."""
    poller = select.poll()
    poller.register(_STDOUT, 0)
    return any(events & select.POLLERR for _, events in poller.poll(0))


def close_output() -> None:
    """Flush stdout, or drop the rest without a reader."""
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
    """Turn ValueError, OSError and the project's errors into click's."""
    return _reported_as(click.ClickException, function)


def input_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `user_errors`, with exit status 2, for commands that only compute."""
    return _reported_as(InputError, function)
