"""How commands tell a user what went wrong: one line on stderr, exit status 1, no traceback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from moe_lora.core.errors import MoeLoraError


def user_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn ValueError, OSError and the project's own errors of the function into click's error message."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ValueError, OSError, MoeLoraError) as error:
            raise click.ClickException(str(error)) from error

    return wrapped
